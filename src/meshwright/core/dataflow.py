"""A model's dataflow: its logical dims (heads, hidden features, vocabulary entries, channels), and what each operation does to them.

[Note: logical dims]
A dim of a tensor is a product of logical dims. `qkv(x).view(B, S, 3, 12, 64)` shows that the 2304 features of `qkv` are three logical dims of
3, 12 and 64; the one of 12 then passes through attention unchanged and is contracted in the output projection. Tensor dims that element-wise
operations, products or views relate to each other have the same logical dim. Tensor parallelism shards one logical dim over ranks: every
parameter that has it is sharded along it, products that contract it give partial sums, and an operation that needs all of it at once (a softmax,
a norm) prevents sharding. Nothing here depends on names, and nothing needs torch.
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
    """One tensor of a traced forward pass; `logical_dims` lists, for each tensor dim, the logical dims it is a product of, outermost first."""

    shape: tuple[int, ...]
    logical_dims: tuple[tuple[int, ...], ...]
    needs_grad: bool = False
    parameter: str = ""
    itemsize: int = 4
    floating: bool = True  # False for indices and masks


@dataclass(frozen=True)
class SizedCallSite:
    """A call in the model's code with sizes among its arguments: `function`, and the sizes by position (-1 where the code leaves one open)."""

    module: str
    function: str
    sizes: tuple[int, ...]
    dim: int = 0  # for calls that split one dim
    dims: tuple[int, ...] = ()  # for slices, whose sizes are bounds: the dim of each bound


@dataclass(frozen=True)
class SlidingWindow:
    """The window that an operation slides over the last dims of its input, with one number per dim. `grow` is the inverse: every position
    becomes `stride` positions that depend on it alone."""

    kind: WindowKind
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True)
class SizeRead:
    """The code of `module` read the size of dim `dim` of a value, before operation `before_operation`."""

    value: int
    dim: int
    before_operation: int
    module: str = ""


@dataclass(frozen=True)
class Operation:
    """One traced operation: it contracts the logical dims `contracted_dims`, needs all of `indivisible_dims`, and treats others index by index."""

    name: str
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    contracted_dims: tuple[int, ...] = ()
    indivisible_dims: tuple[int, ...] = ()
    call_index: int = -1  # index into Dataflow.sized_calls
    function: str = ""  # the function in the model's code that issued it
    # slice: dim, start and step; range: start and step; convolution: groups; loss: its reduction, and ignore_index; batch norm: whether it is
    # training; product or quotient with a number: the number's power of the batch size; sum with a number: whether it is more than a small epsilon
    int_args: tuple[int, ...] = ()
    window: SlidingWindow | None = None


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its input and output values, and its operations (from `first_op` up to, not including, `end_op`). An input that is
    None has a value without dims: whether a mask is given depends on the batch, and the positions of other inputs do not depend on it."""

    module: str
    kind: LayerKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first_op: int
    end_op: int
    ops_before_last_save: int = -1  # how many operations had run when autograd last saved a tensor for backward inside it


@dataclass(frozen=True)
class BatchTensor:
    """One tensor of the batch: its index among the batch's leaves, a display name, and its value, -1 if nothing used it."""

    leaf: int
    name: str
    value: int


@dataclass(frozen=True)
class Dataflow:
    """A model's forward pass and loss, as dataflow. `sizes` are the lengths of the logical dims."""

    batch: int
    sizes: tuple[int, ...]
    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    modules: tuple[ModuleCall, ...]
    sized_calls: tuple[SizedCallSite, ...]
    outputs: tuple[int, ...] = ()  # what the model returned
    batch_tensors: tuple[BatchTensor, ...] = ()  # the batch
    loss: tuple[int, ...] = ()  # what the loss returned: a mean, or a sum and a count; -1 for a non-tensor
    size_reads: tuple[SizeRead, ...] = ()

    @cached_property
    def memo(self) -> Memo:
        """Results derived from this dataflow."""
        return Memo()

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Values that are neither an operation's output nor a parameter: the data, and constants."""
        computed = {v for op in self.operations for v in op.outputs}
        return tuple(i for i, value in enumerate(self.values) if i not in computed and not value.parameter)

    @cached_property
    def sample_dims(self) -> frozenset[int]:
        """The logical dims that count samples; a value without any of them has the same size for every batch size."""

        def first_dims(values: tuple[int, ...]) -> set[int]:
            return {dim for v in values if self.values[v].shape[:1] == (self.batch,) for dim in self.values[v].logical_dims[0]}

        dims = first_dims(self.inputs)
        for op in self.operations:  # one without a rule does not relate its outputs' sample dim to its inputs'
            if not dims.isdisjoint(op.indivisible_dims):
                dims |= first_dims(op.outputs)
        return frozenset(dims)
