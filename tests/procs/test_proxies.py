"""Proxies on real ranks: what is counted is what the schedule lists, figures add up, and a launcher's ranks are adopted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from meshwright.core.schedule import COLLECTIVE_OPS, Schedule
from meshwright.cost.action_cost import ActionCost
from meshwright.launch.mpi_launcher import find_mpirun
from meshwright.proxies import PROXIES
from meshwright.proxies.call_stats import summarize
from meshwright.proxies.schedule_runner import RunPolicy
from meshwright.schedule.lower import lower
from meshwright.schedule.planned_ledger import ledger_name
from tests.procs.plan_cases import model_of, spread
from tests.pure.fake_inputs import rates

RUNS = 2
POLICY = RunPolicy(1, RUNS)
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 4, "stages": 2, "micro_batches": 2},
    "bert": {"layers": 4, "stages": 2, "micro_batches": 4, "order": "1f1b", "gradients": "tensor"},
    "resnet50": {"exchange": "both"},
    "resnet152": {},
    "cosmoflow": {"shards": 2},
    "dlrm": {},
    "gpt3": {"stages": 2, "shards": 2, "order": "interleaved", "chunks": 2, "rank_order": "tensor"},
    "gpt3-moe": {"stages": 2, "experts": 2},
    "gpt3-one-pipe-step": {"stages": 2, "shards": 2},
    "fsdp": {"units": 3, "sharding": 2},
}


def expected(schedule: Schedule, rank: int) -> Counter[tuple[Any, ...]]:
    """Calls and bytes that the communication layer should count on one rank."""
    members, found = schedule.groups_of(rank), Counter[tuple[Any, ...]]()
    for action in schedule.program_for(rank):
        if action.is_communication:
            ranks = len(members[action.axis]) if action.op in COLLECTIVE_OPS else 2
            found[ledger_name(action.name), action.op, ranks, "calls"] += RUNS
            found[ledger_name(action.name), action.op, ranks, "bytes"] += RUNS * action.bytes
    return found


def check(pool: Any, schedule: Schedule, policy: RunPolicy = POLICY) -> dict[str, Any]:
    answers = pool.run("meshwright.proxies.proxy_launch:run_rank", world=schedule.world, schedule=schedule, policy=policy)
    for rank, (tally, spans, lines) in enumerate(answers):
        counted = Counter[tuple[Any, ...]]()
        for line in lines:
            counted[line.name, line.op, line.group, "calls"] += line.calls
            counted[line.name, line.op, line.group, "bytes"] += line.bytes
        assert counted == expected(schedule, rank)
        assert len(tally.steps) == RUNS and len(spans) == sum(a.op != "wait" for a in schedule.program_for(rank))
    return summarize([answer[0] for answer in answers])


@pytest.mark.parametrize("name", SMALL)
def test_what_is_counted_is_what_the_schedule_lists(pool: Any, name: str) -> None:
    schedule = PROXIES[name].build(PROXIES[name].parse_config((), {"scale_down": 2048, **SMALL[name]}), 4)
    found = check(pool, schedule)
    assert found["step_s"]["median"] >= found["compute_s"]
    for row in found["collectives"]:
        assert row["median_s"] <= row["p95_s"] <= row["max_s"] and row["exposed_s"] >= 0 and row["calls"] > 0


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt-tiny", Mesh(pp=2, dp=2), {"micro": 2}),
        ("gpt-tiny", Mesh(shard=2, tp=(2,)), {"zero": 3}),
        ("cnn", Mesh(cp=4), {}),
        ("dlrm-tiny", Mesh(ep=2, dp=2), {}),
    ],
    ids=str,
)
def test_the_communication_of_a_plan_without_its_model(pool: Any, name: str, mesh: Mesh, options: dict[str, Any]) -> None:
    plan, profile = spread(model_of(name), mesh, 8, **options)
    schedule = lower(plan, profile, ActionCost(plan, "adamw", rates(4)), clip=True)
    programs = tuple(tuple(replace(a, bytes=a.bytes if a.expected_bytes is None else a.expected_bytes) for a in p) for p in schedule.programs)
    check(pool, replace(schedule, programs=programs))


def test_computation_as_products(pool: Any) -> None:
    schedule = PROXIES["resnet152"].build(PROXIES["resnet152"].parse_config((), {"scale_down": 1e5}), 2)
    found = check(pool, schedule, replace(POLICY, compute="real"))
    assert found["compute_s"] > 0


def test_ranks_of_a_launcher_are_adopted() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "meshwright.cli.main",
        "proxy",
        "gpt2",
        "2",
        "2",
        "--scale-down",
        "5000",
        "--runs",
        "2",
        "--warm-up",
        "1",
        "--json",
    ]
    places = [{"RANK": str(r), "WORLD_SIZE": "2", "LOCAL_RANK": str(r), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} for r in (0, 1)]
    ranks = [subprocess.Popen(command, env={**os.environ, **place}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for place in places]
    (out, err), (silent, _) = (rank.communicate(timeout=120) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], err
    found = json.loads(out)
    assert silent == "" and found["world"] == 2 and len(found["ranks"]) == 2
    assert {"name", "op", "group", "calls", "bytes", "median_s", "bandwidth", "exposed_s"} <= set(found["collectives"][0])


@pytest.mark.skipif(find_mpirun() is None, reason="needs mpirun")
def test_ranks_over_mpi_are_started(tmp_path: Path) -> None:
    words = ["proxy", "gpt2", "4", "2", "--backend", "mpi", "--nproc", "4", "--scale-down", "5000", "--runs", "2", "--warm-up", "1", "--json"]
    command = [sys.executable, "-m", "meshwright.cli.main", *words, "--csv", "table.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["proxy"], found["world"], found["backend"], found["runs"], len(found["ranks"])) == ("gpt2", 4, "mpi", 2, 4)
    assert (tmp_path / "table.csv").exists()
