"""Unequal parts, run: shards of the state and stages of any size, and batches beside them, equal one device and are counted to the byte."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.calibration import Rates
from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy
from meshwright.cost.memory_cost import model_state_bytes
from meshwright.describe.speed_groups import rates_by_speed_group
from meshwright.launch import ForkServer, WorkerPool
from meshwright.plan.pipeline_planner import build_stages, find_stage_boundaries
from tests.procs.plan_cases import check, model_of, spread, traced


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_state_is_cut_by_parts_and_the_batch_by_others(pool: Any, zero: int) -> None:
    """Two replicas of two shards: a slice's gradients meet the other replica's, in as many bytes as it has."""
    model = model_of("gpt-tiny")
    plan, profile = spread(model, Mesh(dp=2, shard=2), 8, zero=zero, micro=1)
    plan = replace(plan, balance=BalancePolicy((1, 3, 2, 2), (0.8, 0.2)))
    ranks = check(pool, model, plan, profile)
    for rank, mine in enumerate(ranks):
        assert mine["held"] == model_state_bytes(plan, profile, "adamw", plan.mesh.coordinate(rank, "shard"))
    assert ranks[0]["held"]["optimizer"] > 3.5 * ranks[1]["held"]["optimizer"]


def test_a_rank_may_hold_none_of_the_state(pool: Any) -> None:
    model = model_of("vae")
    for zero in (1, 3):
        plan, profile = spread(model, Mesh(shard=3), 6, zero=zero)
        ranks = check(pool, model, replace(plan, balance=BalancePolicy((), (0.25, 0.75, 0.0))), profile, steps=2)
        assert ranks[2]["held"]["optimizer"] == 0


@pytest.mark.parametrize("zero", [0, 3])
def test_stages_of_any_size_and_replicas_of_other_batches(pool: Any, zero: int) -> None:
    """Stages as unequal as the model can be cut, on neighbouring ranks; under ZeRO-3 what stages share (a tied embedding) is cut unevenly too."""
    model = model_of("GPT2" if zero else "gpt-tiny")
    mesh = replace(Mesh(pp=2, shard=2) if zero else Mesh(pp=2, dp=2), order=("shard" if zero else "dp", "pp"))
    plan, profile = spread(model, mesh, 8, zero=zero, micro=2)
    boundaries = find_stage_boundaries(traced(model)[1], profile)
    uneven = build_stages(boundaries, boundaries.cut_positions[-1:])
    assert uneven != plan.stages
    balance = BalancePolicy((2, 6), (0.3, 0.7) if zero else ())
    check(pool, model, replace(plan, stages=uneven, balance=balance), profile, steps=2)


@pytest.fixture
def throttled() -> Iterator[Path]:
    """A control group whose processes get a hundredth of a core; skips where none can be made."""
    group = Path("/sys/fs/cgroup/cpu") / f"meshwright-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text(str(int((group / "cpu.cfs_period_us").read_text()) // 100))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control groups here: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


def test_a_throttled_rank_is_slower_in_every_turn(fork_server: ForkServer, throttled: Path) -> None:
    """So little of a core that no other process leaves less to the rank beside it."""
    like = Rates(2, 1, {"matmul/fp32": ((1.0, 1e10),)}, ((1.0, 1e10),), 1e-6)
    with WorkerPool(fork_server, 2) as workers:
        speeds = workers.call("procs.behaviours:speeds_in_turns", {"who": 1, "control_group": str(throttled)}, timeout_s=250)
    assert [r.members for r in rates_by_speed_group([like, like], speeds)] == [(), (0,), (1,)], speeds
