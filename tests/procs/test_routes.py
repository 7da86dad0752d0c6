"""Plans whose collectives go through shared memory, or whose gradients are compressed: equal to one process, or near it; counted in any case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from meshwright.core.plan import SyncPolicy
from meshwright.core.routes import Route
from meshwright.core.serialization import to_data
from meshwright.schedule import ledger_differences, plan_ledger
from tests.procs.plan_cases import check, model_of, spread

TINY = model_of("gpt-tiny")
SMALL = {"bucket_bytes": 50_000, "first_bucket_bytes": 5_000}
SHARED = tuple(Route(op, "gloo", 0, "shared") for op in ("reduce_scatter", "all_gather", "all_reduce"))


@pytest.mark.parametrize(
    ("mesh", "zero", "sync"),
    [
        (Mesh(dp=2, tp=(2,)), 0, SyncPolicy(**SMALL, routes=(Route("all_reduce", "gloo", 0, "two-level"),), ranks_per_node=(3, 1))),
        (Mesh(dp=4), 0, SyncPolicy(**SMALL, routes=(Route("all_reduce", "gloo", 0, "two-level"),), ranks_per_node=(2, 2))),
        (Mesh(dp=3), 0, SyncPolicy(**SMALL, routes=SHARED)),
        (Mesh(dp=2, shard=2), 2, SyncPolicy(**SMALL, routes=SHARED)),
        (Mesh(shard=2), 3, SyncPolicy(**SMALL, routes=SHARED)),
    ],
    ids=["uneven nodes", "two-level", "shared", "shared-zero-2", "shared-zero-3"],
)
def test_a_plan_is_the_same_by_any_algorithm(pool: Any, mesh: Mesh, zero: int, sync: SyncPolicy) -> None:
    plan, profile = spread(TINY, mesh, batch=mesh.data_parallel_size * 2, zero=zero)
    check(pool, TINY, replace(plan, sync=sync), profile, steps=2)


@pytest.mark.parametrize(
    ("mesh", "zero", "compression", "optimizer", "falls", "near"),
    [
        (Mesh(dp=2), 0, "bf16", "adamw", 0.9, 0.01),
        (Mesh(dp=2, shard=2), 1, "bf16", "adamw", 0.9, 0.01),
        (Mesh(dp=2), 0, "powersgd", "sgd", 0.98, 0.05),  # tokens at random are what low rank is worst at
    ],
    ids=["bf16", "bf16-zero-1", "powersgd"],
)
def test_a_compressed_run_trains_as_well_and_is_counted(
    pool: Any, mesh: Mesh, zero: int, compression: Any, optimizer: str, falls: float, near: float
) -> None:  # fmt: skip
    plan, profile = spread(TINY, mesh, batch=8, zero=zero, precision="fp32")
    plans = [replace(plan, sync=SyncPolicy(**SMALL, compression=c, compression_rank=4)) for c in ("none", compression)]
    kwargs = {"model": TINY | {"fixed": True}, "steps": 20, "clip": 1.0, "dtype": "float32", "optimizer": optimizer}
    plain, packed = (pool.run("procs.jobs:train_curve", world=mesh.size, plan=to_data(p), **kwargs) for p in plans)
    assert packed[0]["losses"][-1] < falls * packed[0]["losses"][0]
    assert packed[0]["losses"][-1] == pytest.approx(plain[0]["losses"][-1], rel=near)
    assert packed[0]["losses"] != plain[0]["losses"]
    assert len({found["digest"] for found in packed}) == 1
    for rank, mine in enumerate(packed):
        lines = [tuple(line[what] for what in ("name", "op", "group", "calls", "bytes")) for line in mine["ledger"]]
        assert ledger_differences(plan_ledger(plans[1], profile, clip=True, rank=rank), lines) == []
