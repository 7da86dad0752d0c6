"""Records of a dataflow trace in progress, while logical dims may still be unified and split."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.core.dataflow import LayerKind, ModuleCall, SizedCallSite, SizeRead, SlidingWindow
from meshwright.describe.dim_unification import LogicalDim
from meshwright.describe.propagation_rules import TensorDims


@dataclass
class TracedOp:
    """An operation, while its logical dims may still change."""

    name: str
    module: str
    inputs: list[int]
    outputs: list[int]
    contracted_dims: list[LogicalDim]
    unsharded_dims: list[LogicalDim]
    call_site: tuple[int, str, tuple[int, ...]]  # index of the call that contains its sizes, the function in the code, its constants
    window: SlidingWindow | None
    factor: float | None = None  # the number that it multiplies by


@dataclass
class ModuleFrame:
    """A module whose forward is running."""

    module: str
    kind: LayerKind
    inputs: list[int]
    first_op: int
    last_saved_op: int = -1


@dataclass
class TracedTensor:
    shape: tuple[int, ...]
    dims: TensorDims
    itemsize: int = 4
    floating: bool = True
    parameter: str = ""
    needs_grad: bool = False


@dataclass
class DataflowTrace:
    """Everything recorded so far, in order."""

    values: list[TracedTensor] = field(default_factory=list)
    ops: list[TracedOp] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    calls: list[SizedCallSite] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    loss: tuple[int, ...] = ()
    reads: set[SizeRead] = field(default_factory=set)
