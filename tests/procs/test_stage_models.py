"""Models that are hard to cut into pipeline stages train as a plain loop trains them, under every schedule."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.launch import RankFailure
from tests.procs import stage_models

SCHEDULES = [{}, {"schedule": "1f1b", "micro_batches": 4}, {"schedule": "interleaved", "micro_batches": 2}]


@pytest.mark.parametrize("constraints", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", stage_models.KINDS)
def test_stages_of_every_model_are_equal_to_one_device(pool: Any, kind: str, constraints: dict[str, Any]) -> None:
    found = pool.run("procs.stage_models:train", world=2, kind=kind, mesh="pp=2", **constraints)
    assert found[-1] == pytest.approx(stage_models.trained_alone(kind), rel=1e-4)


def test_micro_batches_that_a_norm_does_not_take_are_refused(pool: Any) -> None:
    with pytest.raises(RankFailure, match=r"does not take a batch of one micro-batch's size .*: use fewer micro-batches"):
        pool.run("procs.stage_models:train", world=2, kind="norms of single values", mesh="pp=2", micro_batches=4)
