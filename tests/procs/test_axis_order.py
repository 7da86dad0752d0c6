"""Meshes whose axes are neighbours in another order, and plans that the search proposes by itself: equal to one device, and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster, Device, Node
from meshwright.core.mesh import Mesh
from meshwright.core.workload import Workload
from meshwright.plan import Constraints, rank_plans
from tests.procs.plan_cases import check, model_of, spread, traced


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        (Mesh(dp=2, tp=(2,), order=("tp", "dp")), {}),
        (Mesh(pp=2, dp=2, order=("dp", "pp")), {"micro": 2}),
        (Mesh(pp=2, tp=(2,), order=("tp", "pp")), {"micro": 2, "schedule": "interleaved"}),
        (Mesh(shard=2, cp=2, order=("cp", "shard")), {"zero": 3}),
    ],
    ids=str,
)
def test_another_order_is_equal_to_one_device(pool: Any, mesh: Mesh, how: dict[str, Any]) -> None:
    model = model_of("gpt-tiny")
    check(pool, model, *spread(model, mesh, 4, **how))


@pytest.mark.parametrize(("name", "batch", "axis"), [("llama-tiny", 1, "cp"), ("cosmoflow-tiny", 2, "cp"), ("dlrm-tiny", 16, "ep")])
def test_what_the_search_proposes_is_equal_to_one_device(pool: Any, name: str, batch: int, axis: str) -> None:
    """The best plan with an axis that nobody asked for."""
    model = model_of(name)
    profile, flow = traced(model)
    devices = tuple(Device("cpu", "made-up", i, 2**36) for i in range(4))
    where = Cluster("made-up", (Node("node", devices, 4, 2**38),))
    machine = Calibration("made-up", "made-up", "2026-01-01T00:00:00+00:00", (Rates(1, 1, {"matmul/fp32": ((1.0, 1e9),)}, ((1.0, 1e9),), 0.0),))
    found = rank_plans(profile, where, Workload(batch, precision="fp64"), machine, Constraints(world=4, flow=flow, zero=0))
    plan = next(s.plan for s in found.scored if s.plan.mesh.degree(axis) > 1)
    check(pool, model, replace(plan, model="test", threads=0), profile)
