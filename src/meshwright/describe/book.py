"""What a trace of the dataflow writes down, while strands may still be tied and split."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.core.strand import Call, LayerKind, ModuleCall, Read, Window
from meshwright.describe.rules import Dims
from meshwright.describe.strands import Strand

__all__ = ["Book", "Dims", "Frame", "Noted", "Op"]


@dataclass
class Op:
    """An operation while strands may still change."""

    name: str
    module: str
    inputs: list[int]
    outputs: list[int]
    sums: list[Strand]
    binds: list[Strand]
    source: tuple[int, str, tuple[int, ...]]  # the call that holds its sizes, the function in the code, its numbers
    window: Window | None


@dataclass
class Frame:
    """A module whose forward is running."""

    module: str
    kind: LayerKind
    inputs: list[int]
    first: int
    kept: int = -1


@dataclass
class Noted:
    """What is known of one tensor."""

    shape: tuple[int, ...]
    dims: Dims
    itemsize: int = 4
    floating: bool = True
    parameter: str = ""
    needs_grad: bool = False


@dataclass
class Book:
    """Everything that was seen, in order."""

    values: list[Noted] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    loss: tuple[int, ...] = ()
    reads: set[Read] = field(default_factory=set)
