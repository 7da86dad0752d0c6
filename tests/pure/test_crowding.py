"""Ranks that share cores: a waiting rank leaves its core to others, so a bubble is hidden until the cores themselves are the limit."""

from __future__ import annotations

import pytest

from meshwright.cost.crowding import crowded


@pytest.mark.parametrize(
    ("end", "busy", "crowding", "expected"),
    [
        (14.0, (8.0, 8.0, 8.0, 8.0), 2.0, 8.0),  # 4 stages, 4 micro-batches on 2 cores: the cores are busy throughout
        (20.0, (8.0, 8.0), 2.0, 10.0),  # more bubble than there is other work to fill it
        (14.0, (8.0, 8.0), 1.0, 14.0),  # a core for each: every bubble shows
    ],
)
def test_a_step_takes_its_path_alone_or_all_work_over_the_cores(end: float, busy: tuple[float, ...], crowding: float, expected: float) -> None:
    assert crowded(end, busy, crowding) == expected
