"""Every proxy run for real on 4 ranks, scaled down, beside what the simulator predicts from times measured by turns with them.

These are measured with the proxies' own runner: schedules of nothing but one call, repeated, over the groups that the proxies have (two ranks that
share a core take longer than two that do not), all of them at the same time, and over one of them while the other ranks sleep; one call after the
other, all at once, which also tells how long a rank is busy handing one over, and both again with a wait before each call, which takes longer. All
schedules, these and the proxies', are run in one process group by turns; of a proxy's three steps a round the last counts: as in a job, a step's
memory was used by the step before it. The simulator is given a round's times (medians of it and its neighbours), each proxy's schedule and who shares
a core, and nothing else; predicted and measured are compared within the round, and the median of these ratios is what counts: a machine that changes
its pace does so for both.

Ranks keep to cores of their own, or take turns on them where these are fewer, as `meshwright` starts them. Left to the kernel, one proxy took 13 ms
for a while and 19 for another, by which ranks happened to share a core: two kinds of steps, of which no number is within 10%.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from meshwright.core.calibration import AlphaBetaModel
from meshwright.core.schedule import COLLECTIVE_OPS, Schedule, wire_factor
from meshwright.core.span import Span
from meshwright.execute.process_groups import register_backend
from meshwright.launch import ForkServer, Rendezvous, WorkerPool, detect_launched_rank, join_process_group, leave_process_group
from meshwright.proxies import PROXIES
from meshwright.proxies.proxy_program import ProgramBuilder, build_schedule
from meshwright.proxies.schedule_runner import GroupComms, RunPolicy, ScheduleRunner
from meshwright.simulate import CallTiming, CoreNetwork, IdealNetwork, TimeCurve, simulate
from meshwright.simulate.core_network import busy_cores

HERE = Path(__file__).parent
WORLD = 4
SIZES = (2**10, 2**16, 2**17, 2**19, 2**20, 2**21, 2**22, 3 * 2**21)  # what the cases below send, and no more
CALLS, RESTED_CALLS = 16, 6
STEPS, WARM_UP = 3, 3  # of a proxy in a round; rounds that are not counted
LEAST_S = 1e-6
NEIGHBOURS = 2  # rounds before and after one that its times are taken from, too
IDLE_S, IDLE_RATE = 2e-3, 6e8  # longer than any call here takes
REST_S, REST_RATE = 1e-3, 1.5e9  # as long as it takes
NOTHING = AlphaBetaModel(0.0, float("inf"))
Times = tuple[float, float, float]  # seconds of a schedule, between one call and the next handed over, and of work that its thread did
Groups = tuple[tuple[int, ...], ...]
Probe = tuple[str, Groups, int, bool, bool]  # operation, groups that work at once, bytes, one by one, after a wait each
# Widths are smaller than a GPT-3's so that messages stay in the range of the lines while waits stay a visible part, as they are at full size.
CASES: Mapping[str, dict[str, Any]] = {
    "gpt2": {"layers": 8, "stages": 2, "scale_down": 64},
    "bert": {"layers": 8, "stages": 2, "scale_down": 32},
    "resnet50": {"scale_down": 8},
    "resnet152": {"scale_down": 8},
    "resnet152-strong": {"table": [[4, 128, 119000, 23800]], "scale_down": 8},
    "cosmoflow": {"shards": 2, "scale_down": 4},
    "dlrm": {},
    "gpt3": {"stages": 2, "shards": 2, "hidden": 1536, "scale_down": 8},
    "gpt3-moe": {"stages": 2, "experts": 2, "hidden": 1536, "scale_down": 8},
    "gpt3-one-pipe-step": {"stages": 2, "shards": 2, "hidden": 1536, "scale_down": 4},
    "gpt3-moe-one-pipe-step": {"stages": 2, "experts": 2, "hidden": 1536, "scale_down": 4},
    "fsdp": {"units": 8, "sharding": 2, "unit_floats": 8_520_000, "scale_down": 10},
    "hybrid-2d": {"stages": 2, "hidden": 768, "scale_down": 8},
    "hybrid-3d": {"stages": 2, "shards": 2, "hidden": 1536, "scale_down": 8},
    "hybrid-3d-moe": {"stages": 2, "experts": 2, "hidden": 1536, "scale_down": 8},
}


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each schedule.")] = 36,
    backend: Annotated[str, typer.Option(help="A backend of torch.distributed.")] = "gloo",
    only: Annotated[str, typer.Option(help="One proxy alone.")] = "",
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = HERE / "results" / "proxies.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print that JSON on stdout instead of the table.")] = False,
) -> None:
    """Measure single calls, run every proxy, and compare with the simulator.

    Example: python bench/proxies.py

    Example: mpirun -n 4 --oversubscribe python bench/proxies.py --backend mpi
    """
    if only and only not in CASES:
        raise typer.BadParameter(f"no {only}: choose of {', '.join(CASES)}", param_hint="--only")
    schedules = {name: PROXIES[name].build(PROXIES[name].parse_config((), CASES[name]), WORLD) for name in CASES if only in ("", name)}
    probes = {probe: repeated(*probe) for probe in wanted(schedules.values())}
    policy = RunPolicy(WARM_UP, rounds, backend=backend)
    answers = measured([*probes.values(), *schedules.values()], [1] * len(probes) + [STEPS] * len(schedules), policy)
    if not answers:
        return
    places = numbered([answer.cores for answer in answers])
    rows = list(zip(*(answer.times for answer in answers), strict=True))  # by schedule, rank, round
    times = [{probe: [by_rank[turn] for by_rank in row] for probe, row in zip(probes, rows, strict=False)} for turn in range(rounds)]
    machines = [fitted(settled(times, turn), places) for turn in range(rounds)]
    steps = [[max(taken for taken, *_ in every) for every in zip(*row, strict=True)] for row in rows[len(probes) :]]
    found = [compare(name, schedule, machines, taken) for (name, schedule), taken in zip(schedules.items(), steps, strict=True)]
    result = {"machine": _machine(), "backend": backend, "rounds": rounds, "places": places, "times": typical(machines), "proxies": found}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result)) if as_json else Console().print(show(result))
    print(f"written to {output}", file=sys.stderr)


class Answer(NamedTuple):
    """Of a rank: the cores that it kept to, and by schedule and round the last of so many steps."""

    cores: tuple[int, ...]
    times: list[list[Times]]


def measured(schedules: list[Schedule], steps: list[int], policy: RunPolicy) -> list[Answer]:
    """By rank, on ranks of our own or on those that a launcher started; there rank 0 alone gets the answer."""
    place = detect_launched_rank(os.environ)
    if place is not None:
        mine = by_turns(place.rank, place.world, place.init_method, schedules, steps, policy, gather=True)
        return mine if place.rank == 0 else []
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    nursery = ForkServer(1, {**os.environ, "PYTHONPATH": path})
    try:
        with WorkerPool(nursery, WORLD) as workers:
            return workers.call("proxies:by_turns", {"schedules": schedules, "steps": steps, "policy": policy})
    finally:
        nursery.close()


def by_turns(
    rank: int, world: int, init_method: str, schedules: list[Schedule], steps: list[int], policy: RunPolicy, *, gather: bool = False
) -> Any:  # fmt: skip
    """In a rank: its answer; with `gather`, every rank's."""
    cores = keep_to_cores(rank, world)
    torch.set_num_threads(1)
    register_backend(policy.backend, policy.timeout_s)
    join_process_group(Rendezvous(rank, world, init_method, policy.backend))
    groups = GroupComms()
    runners = [ScheduleRunner(schedule, rank, torch.device("cpu"), policy, groups) for schedule in schedules]
    found: list[list[Times]] = [[] for _ in schedules]
    gc.collect()
    gc.freeze()
    for turn in range(-policy.warm, policy.runs):
        for at, runner in enumerate(runners):
            for _ in range(steps[at]):
                runner.align_ranks()
                worked = time.thread_time()
                spans = runner.run_step_now(max(turn, 0))
                worked = time.thread_time() - worked
            if turn >= 0:
                found[at].append(times_of(spans, worked))
        if rank == 0:
            print(f"round {turn + policy.warm + 1} of {policy.warm + policy.runs}", file=sys.stderr, flush=True)
    every: list[Any] = [None] * world
    if gather:
        dist.all_gather_object(every, Answer(cores, found))
    leave_process_group()
    return every if gather else Answer(cores, found)


def keep_to_cores(rank: int, world: int) -> tuple[int, ...]:
    """This rank's part of the cores that it may use, of which threads that it starts take theirs; empty where the system has no such notion."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    each = max(len(allowed) // world, 1)
    first = rank * each % len(allowed)
    os.sched_setaffinity(0, allowed[first : first + each])
    return tuple(allowed[first : first + each])


def numbered(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """By rank, a number for its cores; one for itself where nobody knows them."""
    keys = [mine or (-1, rank) for rank, mine in enumerate(cores)]
    return tuple(keys.index(key) for key in keys)


def times_of(spans: list[Span], worked: float) -> Times:
    begun = [span.start_s for span in spans]
    return max(span.end_s for span in spans), (max(begun) - min(begun)) / max(len(begun) - 1, 1), worked


def wanted(schedules: Iterable[Schedule]) -> list[Probe]:
    """Every operation over groups as the schedules have them, and over one of them alone: one call after the other, and all at once."""
    found: dict[tuple[str, int], Groups] = {}
    for schedule in schedules:
        for action in (action for program in schedule.programs for action in program):
            groups = schedule.groups.get(action.axis, ())
            if groups and len(groups[0]) > 1 and action.op in (*COLLECTIVE_OPS, "send"):
                ranks = 2 if action.op == "send" else len(groups[0])
                found.setdefault((action.op, ranks), tuple(group[:ranks] for group in groups))
    over = [(op, groups) for (op, _), groups in found.items()]
    how = [(size, blocks) for size in SIZES for blocks in (True, False)]
    warm = [(op, busy, size, blocks, False) for op, groups in over for busy in dict.fromkeys((groups, groups[:1])) for size, blocks in how]
    return warm + [(op, groups, size, blocks, True) for op, groups in over for size, blocks in how]


def settled(rows: list[dict[Probe, list[Times]]], turn: int) -> dict[Probe, list[Times]]:
    """A round's times, each the median of this round's and of its neighbours': a pause of the machine's in a row of calls would be in each of them,
    and so in a proxy's step as often as it makes that call."""
    near = rows[max(turn - NEIGHBOURS, 0) : turn + NEIGHBOURS + 1]
    return {
        probe: [tuple(statistics.median(kind) for kind in zip(*every, strict=True)) for every in zip(*(row[probe] for row in near), strict=True)]
        for probe in rows[turn]
    }  # type: ignore[return-value]


def fitted(times: Mapping[Probe, list[Times]], places: tuple[int, ...]) -> CoreNetwork:
    """What each operation takes among 4 and among 2, from one round."""
    crowds = {f"{op}/{len(groups[0])}": crowd(op, groups, places) for op, groups, _, _, rested in times if rested}
    found: dict[tuple[str, int, bool, str], list[tuple[float, float]]] = {}
    for (op, groups, size, blocks, rested), by_rank in times.items():
        ranks, busy = len(groups[0]), [by_rank[rank] for group in groups for rank in group]
        hands = [by_rank[group[0]] for group in groups] if op == "send" else busy  # who receives a message copies it, and is busy with that
        sent, last = size * wire_factor(op, ranks), max(t for t, *_ in busy)
        if rested and blocks:
            now = {"rested": (last - (RESTED_CALLS + 1) * rest_s(size)) / RESTED_CALLS}
        elif rested:
            now = {"rested": statistics.mean(worked for *_, worked in hands) / RESTED_CALLS}
        else:
            now = {"each": last / CALLS, "hand": statistics.mean(hand for _, hand, _ in hands)}
        for kind, seconds in now.items():
            found.setdefault((f"{op}/{ranks}", len(groups), blocks, kind), []).append((sent, max(seconds, LEAST_S)))
    curves = {key: TimeCurve(tuple(sorted(points))) for key, points in found.items()}

    def less(curve: TimeCurve, *others: TimeCurve) -> TimeCurve:
        return TimeCurve(tuple((sent, max(seconds - sum(o.seconds(sent) for o in others), LEAST_S)) for sent, seconds in curve.points))

    def on_its_way(pairs: int) -> TimeCurve:
        """A message is handed over, which takes as long as one pair alone takes for it: beside others the sender waits for a core, which is theirs.
        Then it is on its way: both are in what each takes in a row, and in there and back."""
        row, back, hand = curves["send/2", pairs, False, "each"], curves["send/2", pairs, True, "each"], curves["send/2", 1, False, "hand"]
        return less(TimeCurve(tuple((sent, max(seconds, back.seconds(sent))) for sent, seconds in row.points)), hand)

    def taken(name: str, blocks: bool) -> CallTiming:
        """A rank that stands still for a call takes for it what one by one take; what more it takes after a wait is its handing over. One that does
        not stand still works for a call after a wait as long as its thread does, of which as much as in a row of calls is in a row's times."""
        most = max(number for other, number, *_ in curves if other == name)
        together, alone, rested = curves[name, most, blocks, "each"], curves[name, 1, blocks, "each"], curves[name, most, blocks, "rested"]
        if blocks:
            return CallTiming(together, alone, NOTHING, less(rested, together), crowds[name])
        hand = curves[name, 1 if name == "send/2" else most, blocks, "hand"]
        if name == "send/2":
            together, alone = on_its_way(most), on_its_way(1)
        return CallTiming(together, alone, hand, less(rested, hand), crowds[name])

    names = {name for name, *_ in curves}
    return CoreNetwork({name: taken(name, False) for name in names}, {name: taken(name, True) for name in names}, places)


def crowd(op: str, groups: Groups, places: tuple[int, ...]) -> int:
    """Groups at work on one core when all are."""
    return max(Counter(place for group in groups for place in busy_cores(op, group, places)).values())


def typical(machines: list[CoreNetwork]) -> dict[str, Any]:
    """What was measured: by way, operation and kind of time, the bytes that a rank sends and the median over rounds."""

    def median(way: str, name: str, kind: str) -> list[tuple[float, float]]:
        every = [getattr(getattr(cores, way)[name], kind).points for cores in machines]
        return [(points[0][0], statistics.median(seconds for _, seconds in points)) for points in zip(*every, strict=True)]

    kinds = {"beside": ("together", "alone", "hand", "rested"), "blocking": ("together", "alone", "rested")}
    return {way: {name: {kind: median(way, name, kind) for kind in kinds[way]} for name in sorted(machines[0].async_timings)} for way in kinds}


def rest_s(size: int) -> float:
    return REST_S + size / REST_RATE


def repeated(op: str, groups: Groups, size: int, blocks: bool, rested: bool) -> Schedule:
    """One call after the other, a message there and the next one back; or all at once, and all messages from the first to the second; `rested`
    with a wait before each and after the last. Ranks of no group sleep meanwhile: one that waits for others may take a core."""
    programs = []
    for place in range(2 if op == "send" else 1):
        out = ProgramBuilder()
        for number in range(RESTED_CALLS if rested else CALLS):
            if rested:
                out.compute(f"rest/{number}", rest_s(size))
            if op != "send":
                out.collective(f"call/{number}", op, "probe", size, blocks=blocks)  # type: ignore[arg-type]
            elif place == (number % 2 if blocks else 0):
                out.send(f"call/{number}", "probe", 1 - place, size, blocks=blocks)
            else:
                out.receive(f"call/{number}", "probe", 1 - place, size, blocks=blocks)
        if rested:
            out.compute("rest/last", rest_s(size))
        programs.append(out)
    idle = ProgramBuilder()
    idle.compute("idle", CALLS * (IDLE_S + size / IDLE_RATE))
    places = {rank: place % len(programs) for group in groups for place, rank in enumerate(group)}
    return build_schedule(f"{op} of {size}", WORLD, {"probe": groups}, [*programs, idle], lambda rank: places.get(rank, len(programs)))


def compare(name: str, schedule: Schedule, machines: list[CoreNetwork], steps: list[float]) -> dict[str, Any]:
    """A proxy's steps beside what each round's times make of it."""
    predicted = [simulate(cores.with_launch_overhead(schedule), cores).step_s for cores in machines]
    off = [a / b - 1 for a, b in zip(predicted, steps, strict=True)]
    return {
        "proxy": name,
        "measured_s": statistics.median(steps),
        "predicted_s": statistics.median(predicted),
        "off": statistics.median(off),
        "off_by_round": off,
        "ideal_s": simulate(schedule, IdealNetwork()).step_s,
        "steps_s": steps,
    }


def _machine() -> dict[str, Any]:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": when}


def show(result: dict[str, Any]) -> Table:
    table = Table(title=f"4 ranks, {result['backend']}, medians of {result['rounds']} steps", title_justify="left", header_style="bold", box=None)
    table.add_column("proxy")
    for column in ("measured", "predicted", "off by", "in half the rounds", "compute alone"):
        table.add_column(column, justify="right")
    for row in result["proxies"]:
        low, _, high = statistics.quantiles(row["off_by_round"], n=4)
        times = [f"{row[key] * 1e3:.1f} ms" for key in ("measured_s", "predicted_s")]
        table.add_row(row["proxy"], *times, f"{row['off']:+.0%}", f"{low:+.0%} to {high:+.0%}", f"{row['ideal_s'] * 1e3:.1f} ms")
    good = sum(abs(row["off"]) <= 0.1 for row in result["proxies"])
    table.caption = f"{good} of {len(result['proxies'])} within 10%"
    table.caption_justify = "left"
    return table


if __name__ == "__main__":
    typer.run(main)
