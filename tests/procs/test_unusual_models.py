"""Layers with code of their own, layers that are called several times or never, and two models with one loss: as a plain loop trains them."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.launch import RankFailure
from tests.procs import unusual_models

CONSTRAINTS = [
    ("tp=2", {"sequence": False}),
    ("tp=2", {"sequence": True}),
    ("tp=2", {"sequence": False, "recompute": "full"}),
    ("shard=2", {"zero": 3}),
    ("shard=2", {"zero": 3, "recompute": "full"}),
    ("pp=2", {}),
]


def refusal(kind: str, mesh: str, constraints: dict[str, Any]) -> str:
    """What is said where a plan cannot run the model as it is."""
    if kind == "renormalized embedding" and mesh != "tp=2":
        return "words renormalizes its weight in forward"
    if kind == "reads a value" and mesh != "shard=2":
        return r"Python reads the value of a tensor in `if x.abs\(\).max\(\) > 1e6:` \(.*unusual_models.py"
    whole = "no tensor-parallel layer is followed by another one that takes the same positions"
    reasons = {
        "conv with its own forward": "combines sharded positions",
        "blocks by forward": "combines sharded positions",
        "renormalized embedding": "words.weight is used several times",
        "reused blocks": "blocks.0 is called several times",
        "a part of a block": "is called several times, with sharded and with replicated positions|is used several times",
        "asks for finite values": "needs all positions of a value that no module returns",
        "mixed tokens": "combines sharded positions",
        "gates by sample": "combines sharded positions",
        "an output used inside": "combines sharded positions",
        "samples second": "combines sharded positions",
        "windows": "computes sizes from the number of positions",
    }
    reasons |= dict.fromkeys(("depthwise conv as a function", "concatenated features", "repeated mask"), whole)
    return reasons.get(kind, "") if constraints.get("sequence") else ""


@pytest.mark.parametrize(("mesh", "constraints"), CONSTRAINTS, ids=str)
@pytest.mark.parametrize("kind", unusual_models.KINDS)
def test_every_plan_runs_the_models_own_code_or_is_refused(pool: Any, kind: str, mesh: str, constraints: dict[str, Any]) -> None:
    if reason := refusal(kind, mesh, constraints):
        with pytest.raises(RankFailure, match=reason):
            pool.run("procs.unusual_models:train", world=2, kind=kind, mesh=mesh, **constraints)
        return
    found = pool.run("procs.unusual_models:train", world=2, kind=kind, mesh=mesh, **constraints)
    assert found[-1] == pytest.approx(unusual_models.trained_alone(kind), rel=1e-4)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_that_another_models_loss_left_are_dropped(pool: Any, zero: int) -> None:
    for losses in pool.run("procs.unusual_models:adversaries", world=2, zero=zero):
        assert [x for pair in losses for x in pair] == pytest.approx([x for pair in unusual_models.adversaries_alone() for x in pair], rel=1e-4)
