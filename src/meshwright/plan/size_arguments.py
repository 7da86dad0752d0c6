"""Which integer arguments of calls in the model's code (`view`, `split`, `unflatten`, slices …) count which dim of the call's output."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.dataflow import Dataflow, Operation

VIEW_OPS = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten")
SLICE_OPS = ("slice", "narrow")  # slices by number that can be rewritten are recorded as sized calls; the others block sharding


def size_arguments(dataflow: Dataflow, op: Operation) -> Iterator[tuple[int, int, int, int]]:
    """Yield (index among the call's sizes, the number, the output dim that it counts, the length of the dim that it slices or 0).

    A call may run several operations: a size belongs to the operation whose output has the dim of that size, a slice index to the operation that
    sliced the dim. A slice from 0 has no start to count.
    """
    call, out = dataflow.sized_calls[op.call_index], dataflow.values[op.outputs[0]]
    for i, number in enumerate(call.sizes):
        if number == -1:
            continue
        if call.dims:
            at, source = call.dims[i], dataflow.values[op.inputs[0]]
            if op.name in SLICE_OPS and number and source.shape[at] != out.shape[at]:
                yield i, number, at, source.shape[at]
            continue
        dim = call.dim if call.function.startswith(("split", "unflatten")) else i
        if call.function == "unflatten":  # a dim counted from the end moves by the dims that come in
            dim += i if dim >= 0 else i - len(call.sizes) + 1
        at = dim
        if -len(out.logical_dims) <= at < len(out.logical_dims) and out.shape[at] == number:
            yield i, number, at, 0
