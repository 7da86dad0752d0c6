"""Owners of experts and tables along `ep`: equal to one device, and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from meshwright.core.plan import OVERLAPS, BalancePolicy, SyncPolicy
from meshwright.core.serialization import to_data
from meshwright.cost.memory_cost import model_state_bytes
from meshwright.schedule import local_profile
from tests.procs.plan_cases import check, model_of, spread

MIXTURE, SKEWED, TABLES = ({"own": kind} for kind in ("mixture", "skewed", "tables"))


@pytest.mark.parametrize("name", ["Mixtral", "dlrm-tiny"])
@pytest.mark.parametrize("mesh", [Mesh(ep=2), Mesh(ep=4), Mesh(dp=2, ep=2)], ids=str)
def test_owners_are_equal_to_one_device(pool: Any, name: str, mesh: Mesh) -> None:
    model = model_of(name)
    plan, profile = spread(model, mesh, 8)
    for rank, mine in enumerate(check(pool, model, plan, profile)):
        owner = mesh.coordinate(rank, "ep")
        assert mine["held"] == model_state_bytes(plan, local_profile(plan, profile, 0, 0, owner), "adamw")


@pytest.mark.parametrize(
    ("model", "mesh", "zero", "micro", "recompute"),
    [
        (MIXTURE, Mesh(ep=2), 0, 2, "full"),  # five experts: three here, two there
        (MIXTURE, Mesh(dp=2, ep=2), 0, 2, "none"),
        (MIXTURE, Mesh(shard=2, ep=2), 1, 1, "none"),
        (SKEWED, Mesh(shard=2, ep=2), 2, 2, "full"),  # no token goes to the second owner
        (SKEWED, Mesh(dp=2, ep=2), 0, 1, "none"),
        (SKEWED, Mesh(ep=4), 0, 1, "none"),
        (TABLES, Mesh(ep=2), 0, 2, "none"),
        (TABLES, Mesh(ep=4), 0, 1, "full"),
        (TABLES, Mesh(shard=2, ep=2), 2, 2, "none"),
        (model_of("Mixtral"), Mesh(ep=2, tp=(2,)), 0, 1, "full"),
        (SKEWED, Mesh(dp=2, ep=2), 0, 2, "selective"),
        (SKEWED, Mesh(shard=2, ep=2), 3, 2, "full"),
        (model_of("Mixtral"), Mesh(shard=2, ep=2), 3, 1, "none"),
        (model_of("Mixtral"), Mesh(pp=2, ep=2), 0, 2, "none"),
    ],
    ids=str,
)
def test_owners_beside_other_parallelism(pool: Any, model: dict[str, Any], mesh: Mesh, zero: int, micro: int, recompute: str) -> None:
    check(pool, model, *spread(model, mesh, 8, zero=zero, micro=micro, recompute=recompute))


@pytest.mark.parametrize("model", [SKEWED, TABLES], ids=str)
@pytest.mark.parametrize("overlap", [OVERLAPS, ()], ids=["beside", "after"])
def test_many_small_buckets_go_in_one_order_on_all_ranks(pool: Any, model: dict[str, Any], overlap: Any) -> None:
    """Gradients of what every rank holds travel between the exchanges of backward, whatever a rank owns and whether a token came to it."""
    plan, profile = spread(model, Mesh(dp=2, ep=2), 8)
    check(pool, model, replace(plan, sync=SyncPolicy(200, 50, overlap)), profile)


@pytest.mark.parametrize("model", [MIXTURE, TABLES], ids=str)
def test_ranks_with_unequal_shares(pool: Any, model: dict[str, Any]) -> None:
    plan, profile = spread(model, Mesh(ep=2), 8)
    check(pool, model, replace(plan, balance=BalancePolicy((1, 7))), profile)


def test_a_rank_without_tokens_takes_part(pool: Any) -> None:
    plan, _ = spread(MIXTURE, Mesh(ep=2), 8)
    for counts in ([0, 5], [4, 0], [0, 0]):
        alone, *_ = pool.run("procs.jobs:uneven_tokens", world=1, plan=to_data(replace(plan, mesh=Mesh())), model=MIXTURE, counts=counts)
        ranks = pool.run("procs.jobs:uneven_tokens", world=2, plan=to_data(plan), model=MIXTURE, counts=counts)
        for what in ("results", "weights"):
            assert sum(r[what] for r in ranks) == pytest.approx(alone[what], rel=1e-9)
        for i, square in enumerate(alone["squares"]):
            assert sum(r["squares"][i] for r in ranks) == pytest.approx(square, rel=1e-9)


@pytest.mark.parametrize("model", [MIXTURE, TABLES], ids=str)
def test_a_user_s_own_loop_averages_over_ranks(pool: Any, model: dict[str, Any]) -> None:
    plan, _ = spread(model, Mesh(dp=2, ep=2), 8)
    single, *_ = pool.run("procs.jobs:own_loop", world=1, plan=to_data(replace(plan, mesh=Mesh())), use_context=False, model=model)
    for use_context in (True, False):
        for mine in pool.run("procs.jobs:own_loop", world=4, plan=to_data(plan), use_context=use_context, model=model):
            assert mine == pytest.approx(single, rel=1e-9)
