"""Unequal devices: the planner's shares against the best equal split, measured on CPU ranks of which one is slowed, and estimated on mixed GPUs.

The slowed rank runs in a control group that gives it a part of its core (Linux, version 1, as root). Both ranks are probed as they then are; from
that the planner makes its plan and the best equal one, and both run alternately in one set of processes. A plan's time is the median over rounds
of the median of its steps, each as long as the slower rank's. GPUs are priced from data sheets; nothing of them is run.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from grid import TASKS, Subject, label, median_of_slowest, subject
from meshwright import zoo
from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.core.heterogeneous import with_measured_names
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data, write_json
from meshwright.core.workload import Workload
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.cost.step_cost import HEADROOM
from meshwright.describe.cluster_file import parse_cluster
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.discover import discover
from meshwright.describe.foreign_load import PROBE_ERROR
from meshwright.describe.profile_tracer import trace_task
from meshwright.launch import ForkServer, WorkerPool
from meshwright.plan import Ranking, rank_plans
from meshwright.plan.heterogeneous_planner import describe_shares
from meshwright.plan.search_space import Constraints
from overhead import fail
from rounds import HERE, machine, say

_GROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000
WORLD, WARM, STEPS = 2, 2, 8
# What is left to the planner, and what is given: the kinds of parts one by one.
CASES: dict[str, dict[str, Any]] = {
    "free": {},
    "batches": {"mesh": Mesh(dp=2)},
    "state and batches": {"mesh": Mesh(shard=2), "zero": 1},
    "stages": {"mesh": Mesh(pp=2), "micro_batches": 4, "schedule": "1f1b"},
    "state": {"mesh": Mesh(shard=2), "zero": 1, "micro_batches": 1},
}
SHORT = "state"  # where both ranks are as quick, and the second has no room for half of the states beside a step that recomputes nothing
_MIX = """
name = "mix"

[[nodes]]
name = "new"
devices = ["4 x A100-40GB"]
cores = 64
memory = "512 GB"
inside = { kind = "wired", name = "NVLink 3", bandwidth = "100 GB/s", latency = "3 us", efficiency = 0.74 }

[[nodes]]
name = "old"
devices = ["4 x V100-SXM2-16GB"]
cores = 40
memory = "384 GB"
inside = { kind = "wired", name = "NVLink 2", bandwidth = "50 GB/s", latency = "3 us", efficiency = 0.74 }

[network]
kind = "flat"
name = "100 Gb/s InfiniBand"
bandwidth = "100 Gb/s"
latency = "5 us"
efficiency = 0.8
"""
SHEETS = (("workstation", "gpt2-124m", 16), ("mix", "gpt2-124m", 64), ("mix", "gpt2-1.5b", 64))


def main(
    models: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}; gpt and vae if not given.")] = None,
    slow: Annotated[float, typer.Option(min=0.05, max=1.0, help="The fraction of its core that the slowed rank gets.")] = 0.4,
    rounds: Annotated[int, typer.Option(min=1, help="How often each plan is built and timed.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}, sheets; all if not given.")] = None,
    output: Annotated[Path, typer.Option(help="JSON file for the results; cases in it that are not measured now stay.")] = HERE
    / "results"
    / "unequal.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Measure and estimate the gain of unequal shares.

    Examples:
      python bench/unequal.py
      python bench/unequal.py --models gpt --only batches --slow 0.25
    """
    selected = only or [*CASES, "sheets"]
    result: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"measured": {}, "estimated": {}}
    try:
        for name in models or ("gpt", "vae") if set(selected) & set(CASES) else ():
            of, cases = subject(name), [c for c in CASES if c in selected]
            for part, some in ((slow, [c for c in cases if c != SHORT]), (1.0, [c for c in cases if c == SHORT])):
                result["measured"] |= measured(of, part, rounds, some) if some else {}
        result["machine"] = machine()
        if "sheets" in selected:
            result["estimated"] |= {f"{model} on {where}": estimated(where, model, batch) for where, model, batch in SHEETS}
    except MeshwrightError as error:
        fail("unequal", error)
    write_json(output, result)
    print(json.dumps(result)) if as_json else Console().print(show(result))
    say(f"written to {output}")


# -- measured --


def measured(of: Subject, slow: float, rounds: int, cases: list[str]) -> dict[str, Any]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    fork_server = ForkServer(1, {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    results: dict[str, Any] = {}
    try:
        with WorkerPool(fork_server, WORLD) as workers:
            cluster, known = probed(workers, slow)
            for case in cases:
                where = short_of_memory(of, cluster, known) if case == SHORT else cluster
                constraints = Constraints(flow=of.flow, reorder=case != SHORT, **CASES[case])
                ranking = rank_plans(of.profile, where, of.workload, known, constraints)
                say(f"{of.task.name}, {case}: {describe_shares(ranking.best.plan, where)}")
                timed = _alternating(workers, of, ranking, slow, rounds)
                results[f"{of.task.name}: {case}"] = {"slow": slow, **_ranking_to_json(ranking, where), **timed}
    finally:
        fork_server.close()
    return results


def probed(workers: WorkerPool, slow: float) -> tuple[Cluster, Calibration]:
    """This machine as two ranks of one thread, of which the second is slowed, as a probe finds it."""
    arguments = {"device": "cpu", "backend": "gloo", "threads": 1, "quick": True}
    probe = "meshwright.orchestrate.rank_entrypoints:probe_rank"
    layouts = workers.call(probe, arguments, world=1, timeout_s=120)[0][0]
    with slowed(workers.pids[1], slow):
        layouts += workers.call(probe, arguments, timeout_s=200)[0][0]
    cluster = discover({}, ranks=WORLD)
    known = Calibration(cluster.nodes[0].name, cluster.devices[0].name, machine()["date"], tuple(layouts), error=PROBE_ERROR)
    return with_measured_names(cluster, known), known


def short_of_memory(of: Subject, cluster: Cluster, known: Calibration) -> Cluster:
    """The second device's memory lacks half of the optimizer state of its share."""
    best = rank_plans(of.profile, cluster, of.workload, known, Constraints(flow=of.flow, recompute="none", **CASES[SHORT])).best
    enough = int((max(best.estimate.memory_bytes) - best.estimate.memory_kinds["optimizer"] / 2) / HEADROOM)
    node = cluster.nodes[0]
    devices = (node.devices[0], replace(node.devices[1], memory_bytes=enough))
    return replace(cluster, nodes=(replace(node, devices=devices),))


@contextmanager
def slowed(pid: int, part: float) -> Iterator[None]:
    """Limits the process and its threads to `part` of a core."""
    if part == 1.0:
        yield
        return
    group = _GROUPS / f"meshwright-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(part * _PERIOD_US)))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise RequestError(f"{group}: {error.strerror}: slowing a rank needs control groups of version 1, and root") from error
    try:
        yield
    finally:
        (_GROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _alternating(workers: WorkerPool, of: Subject, ranking: Ranking, slow: float, rounds: int) -> dict[str, Any]:
    assert ranking.best_equal_split is not None
    plans = {"equal": ranking.best_equal_split.plan, "planned": ranking.best.plan}
    times: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds):
        for name in list(plans)[:: 1 if number % 2 else -1]:
            times[name].append(_timed(workers, of, plans[name], slow))
    seconds = {name: statistics.median(rounds_s) for name, rounds_s in times.items()}
    gain = statistics.median(a / b for a, b in zip(times["equal"], times["planned"], strict=True))
    return {"measured_s": seconds, "measured_gain": gain, "rounds": times}


def _timed(workers: WorkerPool, of: Subject, plan: Plan, slow: float) -> float:
    """Seconds of a step, with the process slowed whose rank the plan puts on the slow device."""
    device_of_rank = plan.device_order or tuple(range(plan.world))
    arguments = {"model": of.task.name, "plans": [(to_data(plan), STEPS)], "warm": WARM}
    if 1 not in device_of_rank:
        return median_of_slowest([rank[0].steps for rank in workers.call("grid:timed", arguments, world=plan.world, timeout_s=200)])
    with slowed(workers.pids[device_of_rank.index(1)], slow):
        return median_of_slowest([rank[0].steps for rank in workers.call("grid:timed", arguments, world=plan.world, timeout_s=200)])


# -- estimated --


def estimated(where: str, model: str, batch: int) -> dict[str, Any]:
    cluster = parse_cluster(_MIX, "mix.toml", "mix", None) if where == "mix" else resolve_cluster(where, {})
    task = zoo.load(model)
    precision = "fp16" if where == "mix" else "bf16"  # V100s have no bf16
    profile, flow = trace_task(task, precision=precision, device="cuda"), trace_dataflow(task, precision)
    say(f"{model} on {where}")
    ranking = rank_plans(profile, cluster, Workload(batch, precision=precision), datasheet_calibration(cluster), Constraints(flow=flow, reorder=True))
    return _ranking_to_json(ranking, cluster)


def _ranking_to_json(ranking: Ranking, cluster: Cluster) -> dict[str, Any]:
    best, equal = ranking.best, ranking.best_equal_split
    assert equal is not None
    return {
        "planned": f"{label(best.plan)}: {describe_shares(best.plan, cluster)}",
        "equal": f"{label(equal.plan)}: {describe_shares(equal.plan, cluster)}",
        "predicted_s": {"equal": equal.estimate.step_s if equal.estimate.fits else None, "planned": best.estimate.step_s},
        "predicted_gain": ranking.speedup_over_equal,
        "fits": best.estimate.fits,
        "memory": {"has": [d.memory_bytes for d in cluster.devices], "planned": best.estimate.memory_bytes, "equal": equal.estimate.memory_bytes},
        "plans": {"equal": to_data(equal.plan), "planned": to_data(best.plan)},
    }


def show(result: dict[str, Any]) -> Table:
    table = Table(title="Unequal shares against the best equal split", title_justify="left", header_style="bold", box=None)
    table.add_column("case")
    for column in ("equal", "planned", "gain", "predicted"):
        table.add_column(column, justify="right")
    table.add_column("planned", overflow="fold")
    for name, row in {**result["measured"], **result["estimated"]}.items():
        seconds = row.get("measured_s", row["predicted_s"])
        fits = row["predicted_s"]["equal"] is not None
        times = [f"{seconds['equal'] * 1e3:.1f} ms" if fits else "does not fit", f"{seconds['planned'] * 1e3:.1f} ms"]
        gains = [f"{g:.2f}×" if g and fits else "–" for g in (row.get("measured_gain"), row["predicted_gain"])]
        table.add_row(name, *times, *gains, row["planned"])
    return table


if __name__ == "__main__":
    typer.run(main)
