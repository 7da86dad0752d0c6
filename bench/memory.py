"""Is the predicted memory right? Random plans of six small models on CPU ranks: the predicted peak of a rank's tensors beside the measured one.

The peak is that of torch's allocator in a step (its profiler's record of every allocation, from before the model is built): exact to the byte,
and free of what libraries and the C library hold, which "framework" stands for in a prediction and which is left out on both sides. So one set of
processes can run all plans, one after the other. The largest rank counts.

Steps differ: gloo's thread frees what it sent only when it gets a core again, after the waiting rank has continued; a stage that is ahead
holds what it has sent. So the smallest peak of a rank's steps counts, without the first, which has no optimizer state yet: what the plan
itself needs. All steps are in the JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch._C._profiler import RecordScope, _ExperimentalConfig
from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState, _disable_profiler, _enable_profiler, _prepare_profiler
from torch.profiler import record_function

from grid import TASKS, WORLD, Subject, batch_of, cluster_here, label, legal, session_of, subject
from meshwright.core.calibration import Calibration, Rates
from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data, to_data, write_json
from meshwright.cost import estimate
from meshwright.launch import ForkServer, Rendezvous, WorkerPool, join_process_group, leave_process_group
from overhead import fail
from rounds import HERE, machine, say

_MARK = "meshwright step"
_STEPS = 5


def main(
    count: Annotated[int, typer.Option(min=1, help="Number of plans.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed that selects them.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Start with this plan; results of those before stay in the JSON.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON file for the results.")] = HERE / "results" / "memory.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Predict and measure the peak memory of random plans, as many of each model.

    Example: python bench/memory.py --count 30 --seed 0
    """
    subjects = {name: subject(name) for name in TASKS}
    rows = json.loads(output.read_text())["plans"][:first] if first else []
    fork_server = ForkServer(1, {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])})
    try:
        with WorkerPool(fork_server, WORLD) as workers:
            for name, plan in drawn(subjects, count, seed)[first:]:
                rows.append(_row(workers, subjects[name], plan))
                write_json(output, {"machine": machine(), "seed": seed, "plans": rows})
    except MeshwrightError as error:
        fail("memory", error)
    finally:
        fork_server.close()
    print(output.read_text()) if as_json else Console().print(show(rows))
    say(f"written to {output}")


def drawn(subjects: dict[str, Subject], count: int, seed: int) -> list[tuple[str, Plan]]:
    """Models take turns; of each, plans without order."""
    generator, cluster = random.Random(seed), cluster_here()
    plans = {name: legal(of, cluster) for name, of in subjects.items()}
    names = list(subjects)
    return [(name, generator.choice(plans[name])) for name in (names[i % len(names)] for i in range(count))]


def _row(workers: WorkerPool, of: Subject, plan: Plan) -> dict[str, Any]:
    kinds = predicted_kinds(of, plan)
    predicted = sum(kinds.values()) - kinds["framework"]
    row: dict[str, Any] = {"model": of.task.name, "plan": label(plan), "predicted": predicted, "kinds": kinds}
    found = workers.call("memory:peaks", {"model": of.task.name, "plan": to_data(plan)}, world=plan.world, timeout_s=600)
    refused = next((said for said in found if isinstance(said, str)), None)
    if refused is not None:
        return row | {"refused": refused}
    measured = max(map(min, found))
    say(f"{of.task.name}: {label(plan)}: {predicted / measured:.3f}")
    return row | {"measured": measured, "steps": found, "ratio": predicted / measured}


def predicted_kinds(of: Subject, plan: Plan) -> dict[str, int]:
    """Memory by kind, without any calibration."""
    known = Calibration("", "", "", (Rates(plan.world, 1, {}, (), 0.0),))
    return dict(estimate(plan, of.profile, of.workload, cluster_here(), known, with_time=False).memory_kinds)


def peaks(rank: int, world: int, init_method: str, model: str, plan: Any) -> list[int] | str:
    """In a worker: the peak bytes of tensors in each step after the first, or why the plan cannot run."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    join_process_group(Rendezvous(rank, world, init_method))
    task, made = TASKS[model], from_data(Plan, plan, "plan")

    def train() -> None:
        session = session_of(task, made)
        data_rank = made.mesh.data_rank(session.applied.groups.rank)
        batch = batch_of(task, made.sample_range(data_rank)[1], data_rank)
        for _ in range(_STEPS):
            with record_function(_MARK):
                session.step(batch, task.loss)

    try:
        found = _step_peaks(train)[1:]
    except RequestError as error:
        return str(error)
    leave_process_group()
    gc.collect()
    return found


def _step_peaks(run: Callable[[], None]) -> list[int]:
    """Peak of allocated bytes after each mark, beyond those allocated before the run. Of operations only marks are recorded: a record of all would
    be hundreds of times as long."""
    _count_all_threads()
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _prepare_profiler(config, {ProfilerActivity.CPU})
    _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
    try:
        run()
    finally:
        record = _disable_profiler()
    events = sorted(_all_events(record.experimental_event_tree()), key=lambda event: event.start_time_ns)
    now, peaks = 0, list[int]()
    sizes = [event.extra_fields for event in events if event.name == "[memory]"]
    base = sizes[0].total_allocated - sizes[0].alloc_size
    for event in events:
        if event.name == _MARK:
            peaks.append(now)
        elif event.name == "[memory]":
            now = event.extra_fields.total_allocated - base
            peaks[-1:] = [max(now, peak) for peak in peaks[-1:]]
    return peaks


def _count_all_threads() -> None:
    """Make the allocator's total count allocations of all threads. By default only the profiled thread counts, and gloo's thread is often the last to
    hold a sent buffer."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _all_events(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all_events(event.children)


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
