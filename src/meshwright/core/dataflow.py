"""Strands: the indices that run through a model (heads, hidden features, vocabulary entries, channels), and what each operation does to them.

[Note: strands]
A dim of a tensor is a product of strands. `qkv(x).view(B, S, 3, 12, 64)` says that the 2304 features of `qkv` are three strands of 3, 12
and 64; the dim of 12 then runs through attention untouched and is summed away in the output projection. Whatever dims are tied to each
other by element-wise work, products or views carry one strand. To cut a model by tensor parallelism is to deal one strand out over
ranks: every parameter that carries it is cut along it, products that sum over it give partial sums, and an operation that needs all
of it at once (a softmax, a norm) stands in the way. Nothing here looks at names, and nothing needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshwright.core.memo import Memo

LayerKind = Literal["linear", "conv", "embedding", "bag", "other"]
WindowKind = Literal["conv", "max", "mean", "grow"]


@dataclass(frozen=True)
class Value:
    """One tensor of a traced forward pass; `logical_dims` holds, dim by dim, the strands it is a product of, outermost first."""

    shape: tuple[int, ...]
    logical_dims: tuple[tuple[int, ...], ...]
    needs_grad: bool = False
    parameter: str = ""
    itemsize: int = 4
    floating: bool = True  # False for indices and masks


@dataclass(frozen=True)
class SizedCallSite:
    """A call in the model's code whose arguments hold sizes: `function`, and the sizes by position (-1 where the code leaves one open)."""

    module: str
    function: str
    sizes: tuple[int, ...]
    dim: int = 0  # for those that cut one dim
    dims: tuple[int, ...] = ()  # for slices: the dim that each size is a place in


@dataclass(frozen=True)
class SlidingWindow:
    """What slides over the last dims of an operation's input, a number a dim. `grow` is the other way round: every position becomes
    `stride` positions that depend on it alone."""

    kind: WindowKind
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True)
class SizeRead:
    """The model's own code asked for a size of a value: of dim `dim`, before operation `before_operation`."""

    value: int
    dim: int
    before_operation: int


@dataclass(frozen=True)
class Operation:
    """What one operation did: `contracted_dims` strands were contracted away, `indivisible_dims` strands were needed whole; all others passed
    freely."""

    name: str
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    contracted_dims: tuple[int, ...] = ()
    indivisible_dims: tuple[int, ...] = ()
    call_index: int = -1  # index into Flow.calls
    function: str = ""  # the call in the code that led to it
    int_args: tuple[int, ...] = ()  # of a slice its dim, start and step; of a range its start and step; of a loss how it reduces
    window: SlidingWindow | None = None


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: the values that went in and came out, and the operations in between (first to last, exclusive)."""

    module: str
    kind: LayerKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first_op: int
    end_op: int
    ops_before_last_save: int = -1  # how many operations had run when autograd last kept a tensor for backward inside it


@dataclass(frozen=True)
class BatchTensor:
    """One tensor of the batch: its place among the batch's leaves, a name to call it by, and its value, -1 if nothing looked at it."""

    leaf: int
    name: str
    value: int


@dataclass(frozen=True)
class Dataflow:
    """A model's forward pass and loss, as dataflow. `sizes` are the strands' lengths."""

    batch: int
    sizes: tuple[int, ...]
    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    modules: tuple[ModuleCall, ...]
    sized_calls: tuple[SizedCallSite, ...]
    outputs: tuple[int, ...] = ()  # what the model returned
    batch_tensors: tuple[BatchTensor, ...] = ()  # the batch
    loss: tuple[int, ...] = ()  # what the loss returned: a mean, or a sum and a count; -1 for what is no tensor
    size_reads: tuple[SizeRead, ...] = ()

    @cached_property
    def memo(self) -> Memo:
        """What was found out about it."""
        return Memo()

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Values that no operation made and that are no parameters: the data, and constants."""
        made = {v for op in self.operations for v in op.outputs}
        return tuple(i for i, value in enumerate(self.values) if i not in made and not value.parameter)

    @cached_property
    def sample_dims(self) -> frozenset[int]:
        """The strands that count samples; a value that carries none of them is of one size however many there are."""
        found = {s for v in self.inputs if self.values[v].shape[:1] == (self.batch,) for s in self.values[v].logical_dims[0]}
        for op in self.operations:  # one without a rule makes samples of samples, and nobody has said so
            if not found.isdisjoint(op.indivisible_dims):
                found.update(s for v in op.outputs if self.values[v].shape[:1] == (self.batch,) for s in self.values[v].logical_dims[0])
        return frozenset(found)
