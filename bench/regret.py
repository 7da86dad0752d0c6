"""Is the planner right? Plans of six small models, predicted and measured on this machine: the regret of its choice, and the rank correlation.

The grid of a model (`grid.py`) holds at most 60 plans of one, two and four ranks of one thread. A pool of four processes stays up; in every
round each plan is built, warmed up, timed and freed, in an order that is reversed from one round to the next. A plan's time is the median over
rounds of the median of its steps, each as long as the slowest rank's. Regret is the measured time of the plan with the best prediction over the
best measured time, less one. Predictions come from a probe of this machine as it is during the run (`--calibration` takes another).

Two cores that four ranks share show every disturbance. So the CPU time of other processes is counted while each plan runs, and a plan that was
disturbed is measured again, a few times; the least disturbed time counts, and the share of the others is in the JSON.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from grid import TASKS, WORLD, Ran, Subject, chosen, cluster_here, label, legal, median_of_slowest, others_share, subject
from links import RATES, shaped
from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, unknown_name_error
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data, read_json, to_data, write_json
from meshwright.cost import estimate
from meshwright.describe.foreign_load import PROBE_ERROR
from meshwright.launch import ForkServer, WorkerPool
from meshwright.orchestrate.calibrate import probed_rank_counts
from meshwright.plan.objective import complexity_penalty
from meshwright.plan.search import rank_plans
from meshwright.plan.search_space import Constraints
from overhead import fail
from rounds import HERE, machine, say

MOST = 60
WARM, STEPS, TIMED_S = 2, (2, 5), 0.5  # steps that are not counted; fewest and most that are; about how long they take together
LONG = 20  # times the best plan's step: of a plan whose first takes longer, that one counts
DISTURBED, TRIES = 0.1, 4  # cores that others had while a plan ran, from which on it is measured again; how often at most
_AT_ONCE = 12  # plans in one process group: their groups are let go with it


@dataclass
class Measured:
    """A plan, with its seconds and the cores that others had meanwhile, in each round."""

    plan: Plan
    seconds: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def add(self, number: int, ranks: Sequence[Ran]) -> None:
        """A round's time; if there is one already, the less disturbed counts."""
        seconds, others = median_of_slowest([r.steps for r in ranks]), others_share(list(ranks))
        if len(self.seconds) <= number:
            self.seconds.append(seconds)
            self.others.append(others)
        elif others < self.others[number]:
            self.seconds[number], self.others[number] = seconds, others

    def wants(self, number: int) -> bool:
        return len(self.seconds) <= number or self.others[number] > DISTURBED


Times = dict[str, Measured]  # by a plan's label


def main(
    models: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}; all if not given.")] = None,
    link: Annotated[str, typer.Option(help="fast (the machine as it is), or slow (200 Mbit/s, with each rank in a network namespace).")] = "fast",
    rounds: Annotated[int, typer.Option(min=1, help="How often each plan is built and timed.")] = 2,
    calibration: Annotated[Path | None, typer.Option(help="A probe's JSON; read if it is there, written if it is not.")] = None,
    output: Annotated[Path, typer.Option(help="JSON file for the results; models in it that are not measured now stay.")] = HERE
    / "results"
    / "regret.json",
    more: Annotated[bool, typer.Option(help="Continue from the JSON: measure rounds that are missing or were disturbed.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which no further plans are started; --more continues from there.")] = math.inf,
    again: Annotated[bool, typer.Option(help="Measure nothing; predict the plans of the JSON again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Predict and measure a grid of plans for each model.

    Examples:
      python bench/regret.py
      python bench/regret.py --models gpt --models cnn --rounds 3
    """
    try:
        for name in models or ():
            if name not in TASKS:
                raise unknown_name_error("model", name, tuple(TASKS))
        if link not in RATES:
            raise unknown_name_error("link", link, tuple(RATES))
        result, until = _result(output), time.monotonic() + limit
        cluster = cluster_here()
        with _fork_server() as fork_server, shaped(link, WORLD) as space:
            known = _calibration(calibration, cluster, fork_server, space)
            for name in models or TASKS:
                of, key = subject(name), name if link == "fast" else f"{name}, {link} link"
                before = _earlier_times(result, key, of, cluster, known) if again or more else {}
                times = before if again else _measured(fork_server, of, cluster, known, rounds, space, before, until)
                result["models"][key] = judged(of, cluster, known, times) | {"machine": machine()}
                write_json(output, result)
    except MeshwrightError as error:
        fail("regret", error)
    print(json.dumps(result)) if as_json else Console().print(show(result))
    say(f"written to {output}")


@contextmanager
def _fork_server() -> Iterator[ForkServer]:
    server = ForkServer(1, {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])})
    try:
        yield server
    finally:
        server.close()


def _result(output: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"most": MOST, "warm": WARM, "steps": list(STEPS), "models": {}}
    return result


def _calibration(path: Path | None, cluster: Cluster, fork_server: ForkServer, space: str) -> Calibration:
    if path is not None and path.exists():
        return from_data(Calibration, read_json(path), str(path))
    layouts = []
    for ranks in probed_rank_counts(cluster):
        say(f"measuring {ranks} ranks")
        with WorkerPool(fork_server, ranks) as workers:
            layouts += workers.call("grid:probed", {"space": space}, timeout_s=120)[0][0]
    calibration = Calibration(cluster.nodes[0].name, cluster.devices[0].name, machine()["date"], tuple(layouts), error=PROBE_ERROR)
    if path is not None:
        write_json(path, calibration)
    return calibration


def _earlier_times(result: dict[str, Any], name: str, of: Subject, cluster: Cluster, known: Calibration) -> Times:
    """Times of an earlier run. Plans are matched by their labels; those that are no longer legal are logged."""
    rows = result["models"][name]["plans"] if name in result["models"] else []
    plans = {label(p): p for p in (*legal(of, cluster), rank_plans(of.profile, cluster, of.workload, known, Constraints(flow=of.flow)).best.plan)}
    for row in rows:
        if row["label"] not in plans:
            say(f"  no longer legal: {row['label']}")
    return {
        r["label"]: Measured(plans[r["label"]], r["seconds"], r.get("others", [math.inf] * len(r["seconds"]))) for r in rows if r["label"] in plans
    }


def _measured(
    fork_server: ForkServer, of: Subject, cluster: Cluster, known: Calibration, rounds: int, space: str, before: Times, until: float
) -> Times:  # fmt: skip
    """Each plan by its label, with what was measured `before`; plans that cannot run, or for which no time was left, are left out and logged."""
    times = dict(before)
    for plan in chosen(legal(of, cluster), MOST - 1) if not before else ():
        times.setdefault(label(plan), Measured(plan))
    chosen_plan = rank_plans(of.profile, cluster, of.workload, known, Constraints(flow=of.flow)).scored[0].plan
    times.setdefault(label(chosen_plan), Measured(chosen_plan))
    predicted = {name: estimate(m.plan, of.profile, of.workload, cluster, known).step_s for name, m in times.items()}
    with WorkerPool(fork_server, WORLD) as workers:
        trial = _Trial(workers, of.task.name, predicted, space)
        for number, attempt in ((n, a) for n in range(rounds) for a in range(TRIES)):
            names = [name for name, m in times.items() if m.wants(number)]
            say(f"{of.task.name}: round {number + 1} of {rounds}, {len(names)} plans" + " again" * bool(attempt)) if names else None
            for batch in _batches(names, [times[n].plan.world for n in names], number):
                if time.monotonic() < until:
                    trial.run(times, batch, number)
    late = [name for name, m in times.items() if not m.seconds]
    say(f"  no time for {', '.join(late)}") if late else None
    return {name: m for name, m in times.items() if m.seconds}


def _batches(names: list[str], worlds: list[int], number: int) -> list[list[str]]:
    """Batches of plans with the same number of ranks; every other round runs in reverse order."""
    batches = []
    for world in sorted(set(worlds)):
        same_world = [n for n, w in zip(names, worlds, strict=True) if w == world]
        batches += [same_world[i : i + _AT_ONCE] for i in range(0, len(same_world), _AT_ONCE)]
    return [batch[::-1] for batch in batches[::-1]] if number % 2 else batches


def _steps(step_s: float) -> int:
    return min(max(round(TIMED_S / step_s), STEPS[0]), STEPS[1])


@dataclass(frozen=True)
class _Trial:
    """Workers that measure plans of one model, with the predicted step times."""

    workers: WorkerPool
    model: str
    predicted: Mapping[str, float]
    space: str

    def run(self, times: Times, names: Sequence[str], number: int) -> None:
        world = times[names[0]].plan.world
        best_s = min((min(m.seconds) for m in times.values() if m.seconds), default=min(self.predicted.values()))
        plans = [(to_data(times[n].plan), _steps(self.predicted[n])) for n in names]
        arguments = {"model": self.model, "plans": plans, "warm": WARM, "space": self.space if world > 1 else "", "long_s": LONG * best_s}
        ranks = self.workers.call("grid:timed", arguments, world=world, timeout_s=240)
        for name, results in zip(names, zip(*ranks, strict=True), strict=True):
            if refused := next((ran.refused for ran in results if ran.refused), ""):
                say(f"  left out {name}: {refused}")
                del times[name]
            else:
                times[name].add(number, results)


# -- evaluation --


def judged(of: Subject, cluster: Cluster, known: Calibration, times: Times) -> dict[str, Any]:
    """Every plan with predicted and measured time, and the regret of the choice."""
    rows = []
    for name, m in times.items():
        predicted = estimate(m.plan, of.profile, of.workload, cluster, known)
        rows.append({
            "label": name, "world": m.plan.world, "measured_s": statistics.median(m.seconds), "predicted_s": predicted.step_s, "seconds": m.seconds,
            "others": m.others, "breakdown": dict(predicted.breakdown), "weight": _weight(m.plan),
        })  # fmt: skip
    rows.sort(key=lambda row: row["measured_s"])
    pick = min(rows, key=lambda row: row["predicted_s"] * row["weight"])
    planner_choice = label(rank_plans(of.profile, cluster, of.workload, known, Constraints(flow=of.flow)).scored[0].plan)
    best = rows[0]["measured_s"]
    planner_choice_s = next((row["measured_s"] for row in rows if row["label"] == planner_choice), None)
    return {
        "best": rows[0]["label"],
        "choice": pick["label"],
        "regret": pick["measured_s"] / best - 1,
        "rank_plans": planner_choice,
        "rank_plans_regret": planner_choice_s / best - 1 if planner_choice_s else None,
        "spearman": spearman([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows]),
        "off": statistics.median(abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows),
        "noise": statistics.median(max(r["seconds"]) / min(r["seconds"]) - 1 for r in rows),
        "plans": rows,
    }


def _weight(plan: Plan) -> float:
    """The factor of the planner's complexity penalty."""
    return complexity_penalty(plan.mesh, plan.memory.zero, plan.micro_batches, plan.tensor.is_sequence_parallel, bool(plan.memory.recompute_modes))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks; equal values share a rank."""
    x, y = _ranks(a), _ranks(b)
    return statistics.correlation(x, y) if len(set(x)) > 1 < len(set(y)) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def show(result: dict[str, Any]) -> Table:
    found = result["models"]
    table = Table(title="The planner's choice against the best of a grid, 4 ranks", title_justify="left", header_style="bold", box=None)
    table.add_column("model")
    for column in ("plans", "best", "ms", "choice", "ms", "regret", "own search", "regret", "rank corr.", "off by"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        by = {r["label"]: r["measured_s"] * 1e3 for r in row["plans"]}
        own = "–" if row["rank_plans_regret"] is None else f"{row['rank_plans_regret']:.1%}"
        table.add_row(
            name, str(len(by)), row["best"], f"{by[row['best']]:.1f}", row["choice"], f"{by[row['choice']]:.1f}", f"{row['regret']:.1%}",
            row["rank_plans"], own, f"{row['spearman']:.3f}", f"{row['off']:.0%}",
        )  # fmt: skip
    regrets = [row["regret"] for row in found.values()]
    correlation = statistics.fmean(row["spearman"] for row in found.values())
    table.caption = f"Mean regret {statistics.fmean(regrets):.1%}, worst {max(regrets):.1%}; mean rank correlation {correlation:.3f}."
    table.caption_justify = "left"
    return table


if __name__ == "__main__":
    typer.run(main)
