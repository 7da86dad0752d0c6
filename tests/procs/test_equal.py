"""Equal: whatever the plan, the loss curve is one device's on the same global batches.

A property over random models and plans. `make test` draws a dozen; `make prove` draws hundreds and runs them longer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy, MemoryPolicy, Plan
from meshwright.core.serialization import to_data
from tests.procs.plans import cases

Case = tuple[dict[str, Any], Plan, str, float | None]
QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
DTYPE = {"fp64": "float64", "fp32": "float32", "bf16": "float32"}


def alone(plan: Plan) -> Plan:
    """The same batches on one device, in one piece."""
    memory = replace(plan.memory, zero=0, recompute="none")
    return replace(plan, mesh=Mesh(), micro_batches=1, memory=memory, balance=BalancePolicy())


def curve(pool: Any, plan: Plan, case: Case, steps: int) -> dict[str, Any]:
    model, _, optimizer, clip = case
    kwargs = {"plan": to_data(plan), "model": model, "optimizer": optimizer, "clip": clip, "steps": steps}
    return pool.run("procs.jobs:train_curve", world=plan.world, dtype=DTYPE[plan.memory.precision], **kwargs)[0]


def check(pool: Any, case: Case, steps: int, tolerance: float) -> None:
    plan = case[1]
    spread, single = curve(pool, plan, case, steps), curve(pool, alone(plan), case, steps)
    assert spread["losses"] == pytest.approx(single["losses"], rel=tolerance, abs=tolerance)
    if case[3] is not None:
        assert spread["norms"] == pytest.approx(single["norms"], rel=10 * tolerance, abs=10 * tolerance)
    if plan.memory.precision == "fp64":
        assert spread["state"] == pytest.approx(single["state"], rel=1e-6, abs=1e-7)


@given(case=cases("fp64"))
@QUICK
def test_a_dozen_plans_in_float64(pool: Any, case: Case) -> None:
    check(pool, case, steps=5, tolerance=1e-9)


@given(case=cases("fp32"))
@settings(QUICK, max_examples=6)
def test_plans_in_fp32(pool: Any, case: Case) -> None:
    check(pool, case, steps=5, tolerance=1e-4)


# bf16 keeps 8 bits of mantissa (2^-9 relative a rounding). Where a sum is cut over ranks each part is rounded apart, and five steps
# of Adam carry it on: 5% bounds every curve seen, with a margin of two.
BF16 = 0.05


@given(case=cases("bf16"))
@settings(QUICK, max_examples=3)
def test_plans_in_bf16(pool: Any, case: Case) -> None:
    check(pool, case, steps=3, tolerance=BF16)


@pytest.mark.prove
@given(case=cases("fp64"))
@LONG
def test_hundreds_of_plans_in_float64(pool: Any, case: Case) -> None:
    check(pool, case, steps=20, tolerance=1e-9)


@pytest.mark.prove
@given(case=cases("fp32"))
@settings(LONG, max_examples=100)
def test_a_hundred_plans_in_fp32(pool: Any, case: Case) -> None:
    check(pool, case, steps=20, tolerance=1e-4)


def test_the_digest_is_the_same_for_any_layout_of_the_same_values(pool: Any) -> None:
    """Zero steps leave rank 0's values on every layout; the hash of the whole state must agree, and change with a step."""
    model = {"sizes": [8, 8, 8], "activation": "relu", "norm": True}
    digests = {}
    for mesh, zero in (("dp=1", 0), ("dp=3", 0), ("shard=2", 1), ("shard=4", 2), ("shard=3", 3)):
        plan = Plan("test", 12, Mesh.parse(mesh), memory=MemoryPolicy(zero, ("0", "1"), precision="fp64"))  # type: ignore[arg-type]
        ended = pool.run("procs.jobs:train_curve", world=plan.world, plan=to_data(plan), model=model, steps=0)
        digests[mesh, zero] = {rank["digest"] for rank in ended}
    assert len(set.union(*digests.values())) == 1, digests
    moved = pool.run("procs.jobs:train_curve", world=1, plan=to_data(Plan("test", 12)), model=model, steps=1)[0]["digest"]
    assert moved not in digests["dp=1", 0]


def test_a_user_s_own_loop_may_accumulate(pool: Any) -> None:
    """backward twice before one step: the sum of both, averaged over ranks, under every stage."""
    for mesh, zero in (("dp=2", 0), ("shard=2", 1), ("shard=2", 2), ("shard=2", 3)):
        plan = Plan("test", 8, Mesh.parse(mesh), memory=MemoryPolicy(zero, ("0",), precision="fp64"))  # type: ignore[arg-type]
        for use_context in (False, True):
            ended = pool.run("procs.jobs:own_loop", world=2, plan=to_data(plan), use_context=use_context)
            single = pool.run("procs.jobs:own_loop", world=1, plan=to_data(Plan("test", 8)), use_context=False)
            assert ended[0] == pytest.approx(single[0], rel=1e-9), (mesh, zero, use_context)


def test_parameters_that_one_rank_does_not_use(pool: Any) -> None:
    """A branch taken on one rank only must neither hang nor change the other rank's part."""
    for zero in (0, 1, 2):
        mesh = Mesh(shard=2) if zero else Mesh(dp=2)
        plan = Plan("test", 4, mesh, memory=MemoryPolicy(zero, precision="fp64"))  # type: ignore[arg-type]
        ended = pool.run("procs.jobs:branching", world=2, plan=to_data(plan))
        assert ended[0] == pytest.approx(ended[1], rel=1e-12)
        assert ended[0] == pytest.approx(pool.run("procs.jobs:branching", world=1, plan=to_data(Plan("test", 4)))[0], rel=1e-9)


def test_clipping_in_a_user_s_own_loop_sees_the_whole_gradient(pool: Any) -> None:
    single = pool.run("procs.jobs:clipped_norm", world=1, plan=to_data(Plan("test", 8)))[0]
    assert single[0] > 0.2, "or nothing is clipped"
    for mesh, zero in (("dp=2", 0), ("shard=2", 1), ("shard=2", 2), ("shard=2", 3)):
        plan = Plan("test", 8, Mesh.parse(mesh), memory=MemoryPolicy(zero, ("0",), precision="fp64"))  # type: ignore[arg-type]
        for rank in pool.run("procs.jobs:clipped_norm", world=2, plan=to_data(plan)):
            assert rank == pytest.approx(single, rel=1e-6), (mesh, zero)
            assert rank[1] == pytest.approx(0.2, rel=1e-4)
