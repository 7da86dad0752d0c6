"""Every axis at once, as a property: for random models, meshes, schedules and policies, one device's curve and the plan's own ledger.

`make test` draws a dozen on up to four ranks; `make prove` draws hundreds on up to eight. What a plan or the planner refuses is drawn again.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from meshwright.core.mesh import Mesh
from tests.procs.axis_plans import Case, cases
from tests.procs.plan_cases import check, model_of, spread

QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True)
LONG = settings(QUICK, max_examples=150, derandomize=False)


@given(case=cases(4, "fp64"))
@QUICK
def test_a_dozen_plans_over_every_axis(pool: Any, case: Case) -> None:
    check(pool, *case, steps=5)


@pytest.mark.prove
@given(case=cases(8, "fp64"))
@LONG
def test_hundreds_of_plans_over_every_axis(large_pool: Any, case: Case) -> None:
    check(large_pool, *case, steps=20)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("model", "mesh", "how"),
    [
        (model_of("Mixtral"), Mesh(pp=2, shard=2, ep=2), {"zero": 3, "micro": 2}),
        (model_of("Mixtral"), Mesh(dp=2, shard=2, ep=2), {"zero": 3, "recompute": "selective"}),
        (model_of("Mixtral"), Mesh(pp=2, ep=2, tp=(2,)), {"micro": 2, "recompute": "full"}),
        (model_of("llama-tiny"), Mesh(pp=2, cp=2, tp=(2,)), {"micro": 2, "schedule": "interleaved"}),
        (model_of("gpt-tiny"), Mesh(pp=2, shard=2, cp=2), {"zero": 3, "micro": 2, "recompute": "selective"}),
        (model_of("gpt-tiny"), Mesh(pp=2, dp=2, tp=(2,)), {"micro": 2, "sequence": True}),
        (model_of("T5"), Mesh(shard=4, tp=(2,)), {"zero": 3, "sequence": True, "recompute": "full"}),
    ],
    ids=str,
)
def test_three_axes_at_once(large_pool: Any, model: dict[str, Any], mesh: Mesh, how: dict[str, Any]) -> None:
    check(large_pool, model, *spread(model, mesh, 8, **how))


@pytest.mark.prove
@given(case=cases(8, "fp32"))
@settings(LONG, max_examples=50)
def test_plans_over_every_axis_in_fp32(large_pool: Any, case: Case) -> None:
    check(large_pool, *case, steps=20)
