"""Layers with code of their own, layers that are called several times or never, and two models with one loss: as a plain loop trains them."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.launch import RankFailure
from tests.procs import unusual_models


@pytest.mark.parametrize(("mesh", "zero"), [("tp=2", 0), ("shard=2", 3), ("pp=2", 0)])
@pytest.mark.parametrize("kind", unusual_models.KINDS)
def test_every_plan_runs_the_models_own_code(pool: Any, kind: str, mesh: str, zero: int) -> None:
    if mesh != "tp=2" and kind == "renormalized embedding":
        with pytest.raises(RankFailure, match="words renormalizes its weight in forward"):
            pool.run("procs.unusual_models:train", world=2, kind=kind, mesh=mesh, zero=zero)
        return
    found = pool.run("procs.unusual_models:train", world=2, kind=kind, mesh=mesh, zero=zero)
    expected = unusual_models.trained_alone(kind)
    assert found[-1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_that_another_models_loss_left_are_dropped(pool: Any, zero: int) -> None:
    for losses in pool.run("procs.unusual_models:adversaries", world=2, zero=zero):
        assert [x for pair in losses for x in pair] == pytest.approx([x for pair in unusual_models.adversaries_alone() for x in pair], rel=1e-4)
