"""Is the predicted memory right? Random plans of six small models on CPU ranks: the predicted peak of a rank's tensors beside the measured one.

Every plan runs in processes of its own, forked for it, since a process keeps what it once had. The peak is that of torch's allocator in a step
(its profiler's record of every allocation, from before the model is built): exact to the byte, and free of what libraries and the C library
hold, which "framework" stands for in a prediction and which is left out on both sides. The largest rank counts.

Steps differ: gloo's thread lets go of what it sent only when it has a core again, after the rank that waited has gone on; a stage that is ahead
holds what it has sent. So of every rank the step that needed least counts, without the first, which has no optimizer state yet: what the plan
itself needs. All steps are in the JSON.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import warnings
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from grid import TASKS, WORLD, batch_of, cluster_here, label, legal, session_of, subject
from meshwright.core.calibration import Calibration, Rates
from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.core.plan import Plan
from meshwright.core.serial import from_data, to_data, write_json
from meshwright.cost import estimate
from meshwright.launch import Nursery, Rendezvous, Workers, join, leave
from overhead import fail
from rounds import HERE, machine, say

_MARK = "meshwright step"
_STEPS = 8


def main(
    count: Annotated[int, typer.Option(min=1, help="How many plans.")] = 30,
    seed: Annotated[int, typer.Option(help="Which ones.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = HERE / "results" / "memory.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print that JSON on stdout instead of the table.")] = False,
) -> None:
    """Predict and measure the peak memory of random plans, as many of each model.

    Example: python bench/memory.py --count 30 --seed 0
    """
    nursery = Nursery(1, {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])})
    try:
        rows = [_row(nursery, model, plan) for model, plan in drawn(count, seed)]
    except MeshwrightError as error:
        fail("memory", error)
    finally:
        nursery.close()
    result = {"machine": machine(), "seed": seed, "plans": rows}
    write_json(output, result)
    print(json.dumps(result)) if as_json else Console().print(show(rows))
    say(f"written to {output}")


def drawn(count: int, seed: int) -> list[tuple[str, Plan]]:
    """Models take turns; of each, plans without order."""
    made, cluster = random.Random(seed), cluster_here()
    plans = {name: legal(subject(name), cluster) for name in TASKS}
    names = list(TASKS)
    return [(name, made.choice(plans[name])) for name in (names[i % len(names)] for i in range(count))]


def _row(nursery: Nursery, model: str, plan: Plan) -> dict[str, Any]:
    of = subject(model)
    known = Calibration("", "", "", (Rates(plan.world, 1, {}, (), 0.0),))
    kinds = dict(estimate(plan, of.profile, of.workload, cluster_here(), known).memory_kinds)
    predicted = sum(kinds.values()) - kinds["framework"]
    row: dict[str, Any] = {"model": model, "plan": label(plan), "predicted": predicted, "kinds": kinds}
    with Workers(nursery, min(plan.world, WORLD)) as workers:
        found = workers.call("memory:peaks", {"model": model, "plan": to_data(plan)}, timeout_s=600)
    refused = next((said for said in found if isinstance(said, str)), None)
    if refused is not None:
        return row | {"refused": refused}
    measured = max(map(min, found))
    say(f"{model}: {label(plan)}: {predicted / measured:.3f}")
    return row | {"measured": measured, "steps": found, "ratio": predicted / measured}


def peaks(rank: int, world: int, meeting: str, model: str, plan: Any) -> list[int] | str:
    """In a worker: the most bytes that tensors held at once in each step after the first, or why the plan cannot run."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    join(Rendezvous(rank, world, meeting))
    task, made = TASKS[model], from_data(Plan, plan, "plan")
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            session = session_of(task, made)
            data_rank = made.mesh.data_rank(session.applied.groups.rank)
            batch = batch_of(task, made.share(data_rank)[1], data_rank)
            for _ in range(_STEPS):
                with record_function(_MARK):
                    session.step(batch, task.loss)
    except RequestError as error:
        return str(error)
    leave()
    return _most(record)[1:]


def _most(record: Any) -> list[int]:
    """The highest sum of all that was allocated and not yet freed, after each mark."""
    found: list[int] = []
    live, held = Live(), 0
    for event in sorted(_every(record.profiler.kineto_results.experimental_event_tree()), key=lambda e: e.start_time_ns):
        if event.name == _MARK:
            found.append(held)
        elif event.name == "[memory]":
            held += live.change(event.extra_fields.ptr, event.extra_fields.alloc_size)
            found[-1:] = [max(held, each) for each in found[-1:]]
    return found


def _every(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _every(event.children)


class Live:
    """Blocks in use by their address. What gloo's thread frees is not in the record; that its memory is given out again says it."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.sizes: dict[int, int] = {}

    def change(self, start: int, size: int) -> int:
        """Bytes more in use, or less, after a block was given out, or (negative) given back."""
        if size < 0:
            return -self._gone(start)
        at = max(bisect_right(self.starts, start) - 1, 0)
        while at < len(self.starts) and self.starts[at] + self.sizes[self.starts[at]] <= start:
            at += 1
        lost = 0
        while at < len(self.starts) and self.starts[at] < start + size:
            lost += self._gone(self.starts[at])
        insort(self.starts, start)
        self.sizes[start] = size
        return size - lost

    def _gone(self, start: int) -> int:
        if start in self.sizes:
            del self.starts[bisect_left(self.starts, start)]
        return self.sizes.pop(start, 0)


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Peak memory of a rank's tensors", title_justify="left", header_style="bold", box=None)
    for column in ("model", "plan"):
        table.add_column(column)
    for column in ("predicted MB", "measured MB", "ratio"):
        table.add_column(column, justify="right")
    done = [row for row in rows if "ratio" in row]
    for row in done:
        table.add_row(row["model"], row["plan"], f"{row['predicted'] / 1e6:.2f}", f"{row['measured'] / 1e6:.2f}", f"{row['ratio']:.3f}")
    good = sum(abs(row["ratio"] - 1) <= 0.1 for row in done)
    off = [abs(row["ratio"] - 1) for row in done]
    refused = f"{len(rows) - len(done)} refused"
    table.caption = f"{good} of {len(done)} within 10%, off by {statistics.fmean(off):.1%} on average, {max(off):.1%} at most; {refused}."
    table.caption_justify = "left"
    return table


if __name__ == "__main__":
    typer.run(main)
