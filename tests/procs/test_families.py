"""Other people's models under every kind of plan, as one device trains them; `bench/families.py` sweeps over all of them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from meshwright.launch import RankFailure

pytest.importorskip("transformers")
CELLS = ("dp", "zero3", "tp", "pp")
# Each has shown a bug once: an embedding with its own forward, layers that share a span of operations, a value that crosses three stages, numbers
# that count heads, LayerDrop, a parameter of zero elements.
MODELS = ("gemma2", "timesformer", "canine", "bloom", "opt", "mobilebert")


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", MODELS)
def test_a_fixed_few_are_equal(pool: Any, name: str, cell: str) -> None:
    found = pool.run("procs.families:run_cell", world=2, key=f"transformers/{name}", cell=cell)[0]
    assert found["status"] == "equal", found


@pytest.mark.prove
def test_drawn_ones_are_equal_or_say_why_not(pool: Any) -> None:
    from tests.procs.families import model_names

    draw = random.Random(time.time_ns())
    counts: dict[str, int] = {}
    for name in draw.sample(model_names(), 40):
        for cell in CELLS:
            try:
                found = pool.run("procs.families:run_cell", world=2, key=name, cell=cell)[0]
            except RankFailure as failure:
                pytest.fail(f"{name}, {cell}: {failure}")
            assert found["status"] in ("equal", "refused", "inexact", "not built"), (name, cell, found)
            assert found["status"] == "equal" or found["why"]
            counts[found["status"]] = counts.get(found["status"], 0) + 1
    assert counts["equal"] > 80, counts
