"""Spatial parallelism: blocks with halos equal one device, and every message is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from tests.procs.plan_cases import check, model_of, spread


@pytest.mark.parametrize(
    ("model", "ways", "grid"),
    [
        (model_of("cosmoflow-tiny"), 4, ()),
        (model_of("cnn"), 2, ()),
        ({"images": "windows"}, 2, ()),
        ({"images": "windows", "masked": True}, 4, ()),
        ({"images": "resnet"}, 4, ()),
        ({"images": "resnet", "masked": True}, 3, (1, 3)),
        ({"images": "hourglass"}, 4, ()),
        ({"images": "hourglass"}, 4, (4, 1)),
    ],
)
def test_blocks_are_equal_to_one_device(pool: Any, model: dict[str, Any], ways: int, grid: tuple[int, ...]) -> None:
    check(pool, model, *spread(model, Mesh(cp=ways), grid=grid))


@pytest.mark.parametrize(
    ("model", "mesh", "zero", "micro", "recompute"),
    [
        (model_of("cosmoflow-tiny"), Mesh(dp=2, cp=2), 0, 2, "full"),
        (model_of("cnn"), Mesh(shard=2, cp=2), 1, 1, "full"),
        ({"images": "windows", "masked": True}, Mesh(shard=2, cp=2), 2, 2, "none"),
        ({"images": "hourglass"}, Mesh(shard=2, cp=2), 3, 1, "full"),
        (model_of("cosmoflow-tiny"), Mesh(shard=2, cp=2), 3, 2, "none"),
    ],
)
def test_with_data_parallelism_and_zero(pool: Any, model: dict[str, Any], mesh: Mesh, zero: int, micro: int, recompute: str) -> None:
    check(pool, model, *spread(model, mesh, 8, zero=zero, micro=micro, recompute=recompute))


QUICK = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], Plan, Any]:
    """Windows of any shape one after the other on images of any size, on any grid that the planner accepts."""
    window = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2))
    layers = [[draw(st.sampled_from(["conv", "conv", "max", "mean", "norm"])), *draw(window)] for _ in range(draw(st.integers(1, 4)))]
    told = {"layers": layers, "size": [draw(st.integers(6, 20)), draw(st.integers(6, 20))]}
    model = {"images": json.dumps(told), "masked": draw(st.booleans())}
    grid = draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (4, 1), (1, 3)]))
    try:
        return model, *spread(model, Mesh(cp=grid[0] * grid[1]), 2, grid=grid)
    except (RequestError, RuntimeError) as refused:  # torch refuses windows that are larger than what is left
        note(f"refused: {refused}")
        assume(False)
        raise


@given(case=cases())
@QUICK
def test_any_windows_on_any_grid(pool: Any, case: tuple[dict[str, Any], Plan, Any]) -> None:
    check(pool, *case)


@pytest.mark.prove
@given(case=cases())
@settings(QUICK, max_examples=150, derandomize=False)
def test_many_windows_on_many_grids(pool: Any, case: tuple[dict[str, Any], Plan, Any]) -> None:
    check(pool, *case)


@pytest.mark.prove
def test_compiled_blocks(pool: Any) -> None:
    """Neighbours meet between the graphs."""
    model = model_of("cosmoflow-tiny")
    plan, profile = spread(model, Mesh(cp=2))
    check(pool, model, replace(plan, compile="blocks"), profile)


def test_a_users_own_loop(pool: Any) -> None:
    """torch's own verbs after `parallelize`; running statistics, evaluation and a prepared loader are one device's too."""
    alone = pool.run("procs.user_jobs:spatial_loop", world=1)[0]
    for mesh in ("cp=2", "cp=4"):
        for mine in pool.run("procs.user_jobs:spatial_loop", world=Mesh.parse(mesh).size, mesh=mesh):
            assert mine["losses"] == pytest.approx(alone["losses"], rel=1e-9)
            assert mine["buffers"] == pytest.approx(alone["buffers"], rel=1e-9)
            assert mine["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-9)
            assert mine["prepared"] == pytest.approx(alone["prepared"], rel=1e-6)  # the session reports losses in the plan's fp32
            assert "this plan splits inputs of 32x32 positions, and this input has 16x16" in mine["refused"]
