"""How long planning takes, on one core: tracing the model, ranking the plans, explaining the choice; small, large and very large clusters, and
batches drawn at random, since the search depends on how a batch divides."""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshwright.core.quantities import show_seconds
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.orchestrate import Orchestrator, RunConfig
from meshwright.orchestrate.job import resolve_job
from meshwright.orchestrate.knobs import constraints_from_config
from meshwright.plan import explain, rank_plans

HERE = Path(__file__).parent
CASES = (("gpt2-124m", "dgx-h100:8", 512, 1.0), ("llama3-405b", "dgx-h100:2048", 4096, 10.0), ("llama3-405b", "dgx-h100:12500", 100_000, 60.0))
DRAWN_MODEL, DRAWN_CLUSTER, DRAWN_GOAL_S = "llama3-405b", "dgx-h100:2048", 15.0
FEWEST_SAMPLES, MOST_SAMPLES = 512, 8192


def main(
    only: Annotated[str, typer.Option(help="Only cases whose cluster holds this text.")] = "",
    draws: Annotated[int, typer.Option(min=0, help="Number of batches drawn for the large cluster: powers of two and others in turn.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    profile: Annotated[bool, typer.Option("--profile", help="Also say which functions take the time of ranking.")] = False,
    output: Annotated[Path, typer.Option(help="JSON file for the results.")] = HERE / "results" / "planning_time.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Plan models for clusters that nobody has here, and say where the seconds of processor time went.

    Example: python bench/planning_time.py --only 2048
    """
    cases = [*CASES, *((DRAWN_MODEL, DRAWN_CLUSTER, batch, DRAWN_GOAL_S) for batch in drawn_batches(draws, seed))]
    rows = [measured(*case, profile) for case in cases if only in case[1]]
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"cases": rows}, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps({"cases": rows}))
    else:
        Console().print(show(rows))


def drawn_batches(count: int, seed: int) -> list[int]:
    """Global batches from `FEWEST_SAMPLES` to `MOST_SAMPLES`: a power of two, then any number, in turn."""
    generator = random.Random(seed)
    powers = [2**n for n in range(FEWEST_SAMPLES.bit_length() - 1, MOST_SAMPLES.bit_length())]
    return [generator.randint(FEWEST_SAMPLES, MOST_SAMPLES) if i % 2 else generator.choice(powers) for i in range(count)]


def measured(model: str, cluster: str, batch: int, goal: float, profile: bool = False) -> dict[str, Any]:
    """One case; seconds are of this process's one thread, so that a busy machine does not count."""
    config = RunConfig(model=model, cluster=cluster, global_batch=batch)
    with Orchestrator(config, os.environ, lambda _: None) as orchestrator:
        config, task = resolve_job(config)
        workload, calibration = orchestrator.workload(task), orchestrator.calibration()
        marks = [time.process_time()]
        traced = trace_task(task, precision=workload.precision)
        flow = trace_dataflow(task, workload.precision)
        marks.append(time.process_time())
        watch = cProfile.Profile()
        if profile:
            watch.enable()
        ranking = rank_plans(traced, orchestrator.cluster, workload, calibration, constraints_from_config(config, flow))
        watch.disable()
        marks.append(time.process_time())
        why = explain(ranking)
        marks.append(time.process_time())
    trace, rank, told = (b - a for a, b in pairwise(marks))
    found = {
        "model": model,
        "cluster": cluster,
        "batch": batch,
        "devices": len(orchestrator.cluster.devices),
        "goal_s": goal,
        "trace_s": trace,
        "rank_s": rank,
    }
    found |= {"explain_s": told, "total_s": trace + rank + told, "considered": ranking.num_considered, "priced": len(ranking.scored)}
    return found | {"best": ranking.best.plan.summary(), "why": why, **({"profile": _hot(watch)} if profile else {})}


def _hot(watch: cProfile.Profile, most: int = 12) -> list[str]:
    """The functions that take most themselves."""
    stats = pstats.Stats(watch).stats  # type: ignore[attr-defined]
    rows = sorted(((own, f"{Path(file).name}:{name}") for (file, _, name), (_, _, own, _, _) in stats.items()), reverse=True)
    return [f"{name} {own:.2f} s" for own, name in rows[:most]]


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("model", "devices", "batch", "trace", "rank", "explain", "all", "goal", "weighed", "priced", "best"):
        table.add_column(column, justify="left" if column in ("model", "best") else "right", overflow="fold")
    for row in rows:
        times = [show_seconds(row[key]) for key in ("trace_s", "rank_s", "explain_s", "total_s", "goal_s")]
        table.add_row(row["model"], f"{row['devices']:,}", f"{row['batch']:,}", *times, f"{row['considered']:,}", str(row["priced"]), row["best"])
    return table


if __name__ == "__main__":
    typer.run(main)
