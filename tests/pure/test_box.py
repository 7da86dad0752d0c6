"""Boxes and layouts, against tensors that are really cut."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.box import Box, contiguous_runs, flat_range_boxes, missing_parts, whole_box
from meshwright.core.tensor_layout import TensorLayout

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(starts, tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True)))


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(SHAPES)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def marked(shape: tuple[int, ...], *boxes: Box) -> torch.Tensor:
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[box.slices()] += 1
    return counts


@given(shape_and_boxes())
def test_intersection_and_difference_are_those_of_elements(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = drawn
    common = a.intersect(b)
    both = (marked(shape, a) > 0) & (marked(shape, b) > 0)
    assert torch.equal(both, marked(shape, *([common] if common else [])) > 0)
    rest = a.subtract(b)
    assert torch.equal(marked(shape, *rest), ((marked(shape, a) > 0) & ~(marked(shape, b) > 0)).long()), "parts overlap, or miss some"
    assert a.contains(b) == (not b.subtract(a))
    if common:
        assert torch.equal(marked(shape, a)[a.slices()][common.inside(a).slices()], marked(shape, a)[common.slices()])


@given(shape_and_boxes())
def test_missing_parts_and_present_ones_are_the_whole(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = drawn
    missing = missing_parts(whole_box(shape), [a, b])
    assert torch.equal(marked(shape, *missing), (marked(shape, a, b) == 0).long())


@given(SHAPES, st.data())
def test_a_flat_range_is_a_few_boxes_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel - 1))
    count = data.draw(st.integers(0, numel - first))
    values = torch.arange(numel).view(shape)
    found = flat_range_boxes(shape, first, count)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    flat = torch.cat([values[box.slices()].reshape(-1) for _, box in found]) if found else torch.empty(0, dtype=torch.int64)
    assert flat.tolist() == list(range(first, first + count))
    offsets = [offset for offset, _ in found]
    assert offsets == [sum(b.numel for _, b in found[:i]) for i in range(len(found))]


@given(shape_and_boxes())
def test_runs_of_a_box_are_its_elements_in_order(drawn: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, box, _ = drawn
    starts, length = contiguous_runs(shape, box)
    values = torch.arange(math.prod(shape)).view(shape)
    assert [start + i for start in starts for i in range(length)] == values[box.slices()].reshape(-1).tolist()


@given(st.data())
def test_cuts_of_a_layout_are_cuts_of_a_tensor(data: st.DataObject) -> None:
    """Fused blocks (outer > 1), several cuts of one dim, and boxes of what is left."""
    dims = data.draw(st.integers(1, 3))
    parts = [[data.draw(st.integers(1, 3)) for _ in range(3)] for _ in range(dims)]  # outer, size, inner
    shape = tuple(math.prod(p) for p in parts)
    whole = torch.arange(math.prod(shape)).view(shape)
    layout, local = TensorLayout.uncut(shape), whole
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, dims - 1))
        length = local.shape[dim]
        outer = data.draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0]))
        size = data.draw(st.sampled_from([n for n in range(1, length // outer + 1) if (length // outer) % n == 0]))
        inner = length // outer // size
        first = data.draw(st.integers(0, size - 1))
        count = data.draw(st.integers(1, size - first))
        layout = layout.cut(dim, size, first, count, outer, inner)
        local = local.unflatten(dim, (outer, size * inner)).narrow(dim + 1, first * inner, count * inner).flatten(dim, dim + 1)
    assert layout.local_shape == tuple(local.shape)
    box = data.draw(boxes_in(tuple(local.shape)))
    seen = torch.zeros_like(local)
    for inside, outside in layout.boxes(box):
        assert torch.equal(local[inside.slices()], whole[outside.slices()])
        seen[inside.slices()] += 1
    assert torch.equal(seen, marked(tuple(local.shape), box))
