"""Which of the numbers that a call in the model's code spells out count which dim of what it made."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.dataflow import Dataflow, Operation

SLICE_OPS = ("slice", "narrow")  # those by number are noted as calls where they can be rewritten; what is left is in the way


def size_arguments(dataflow: Dataflow, op: Operation) -> Iterator[tuple[int, int, int, int]]:
    """(place among the call's sizes, the number, the dim of the output that it counts, the length of a dim that it slices or 0).

    A call may take several operations; a size is counted by the one that made the dim of that size, a place in a dim by the one that
    sliced it. Where a slice begins at nothing there is nothing to count.
    """
    call, made = dataflow.sized_calls[op.call_index], dataflow.values[op.outputs[0]]
    for position, number in enumerate(call.sizes):
        if number == -1:
            continue
        if call.dims:
            at, given = call.dims[position], dataflow.values[op.inputs[0]]
            if op.name in SLICE_OPS and number and given.shape[at] != made.shape[at]:
                yield position, number, at, given.shape[at]
            continue
        dim = call.dim if call.function.startswith(("split", "unflatten")) else position
        at = dim + position if call.function == "unflatten" else dim
        if -len(made.logical_dims) <= at < len(made.logical_dims) and made.shape[at] == number:
            yield position, number, at, 0
