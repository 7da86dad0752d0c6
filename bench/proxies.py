"""Every proxy run on 4 real ranks, scaled down, beside the simulator's prediction from call times that are measured in turn with it.

The proxies' own runner measures the calls, with schedules that repeat one call over the groups of the proxies: all groups at the same time (two
ranks that share a core take longer), and one group while the other ranks sleep; one call after the other; all calls launched at once, which also
gives the time that a rank needs to launch one; and both with a wait before each call, which takes longer. All schedules run in turn in one process
group; of a proxy's three steps in a round the last counts, because its memory was used before, as in a job. The simulator gets the times of a round
(medians of it and its neighbours), the proxy's schedule, and which ranks share a core. Prediction and measurement are compared within a round and the
median of these ratios counts, so that a machine that changes its speed does so for both.

Ranks are pinned to their own cores, or share them where there are fewer, as `meshwright` starts them. Without pinning one proxy took 13 ms at times
and 19 ms at others, depending on which ranks shared a core.
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
NEIGHBOURS = 2  # rounds before and after one that count for its medians too
IDLE_S, IDLE_RATE = 2e-3, 6e8  # longer than any call here takes
REST_S, REST_RATE = 1e-3, 1.5e9  # as long as it takes
NOTHING = AlphaBetaModel(0.0, float("inf"))
Times = tuple[float, float, float]  # seconds of a schedule, between two launches, and of the thread's CPU time
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
    rounds: Annotated[int, typer.Option(min=3, help="Number of timed rounds.")] = 36,
    backend: Annotated[str, typer.Option(help="A backend of torch.distributed.")] = "gloo",
    only: Annotated[str, typer.Option(help="Only this proxy.")] = "",
    output: Annotated[Path, typer.Option(help="JSON file for the results.")] = HERE / "results" / "proxies.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of the table.")] = False,
) -> None:
    """Measure single calls, run every proxy, and compare with the simulator.

    Example: python bench/proxies.py

    Example: mpirun -n 4 --oversubscribe python bench/proxies.py --backend mpi
    """
    if only and only not in CASES:
        raise typer.BadParameter(f"no {only}: choose one of {', '.join(CASES)}", param_hint="--only")
    schedules = {name: PROXIES[name].build(PROXIES[name].parse_config((), CASES[name]), WORLD) for name in CASES if only in ("", name)}
    probes = {probe: repeated(*probe) for probe in wanted(schedules.values())}
    policy = RunPolicy(WARM_UP, rounds, backend=backend)
    answers = measured([*probes.values(), *schedules.values()], [1] * len(probes) + [STEPS] * len(schedules), policy)
    if not answers:
        return
    core_ids = numbered([answer.cores for answer in answers])
    rows = list(zip(*(answer.times for answer in answers), strict=True))  # by schedule, rank, round
    times = [{probe: [by_rank[i] for by_rank in row] for probe, row in zip(probes, rows, strict=False)} for i in range(rounds)]
    machines = [fitted(settled(times, i), core_ids) for i in range(rounds)]
    steps = [[max(step_s for step_s, *_ in ranks) for ranks in zip(*row, strict=True)] for row in rows[len(probes) :]]
    rows_by_proxy = [compare(name, schedule, machines, step_s) for (name, schedule), step_s in zip(schedules.items(), steps, strict=True)]
    result = {"machine": _machine(), "backend": backend, "rounds": rounds, "places": core_ids, "times": typical(machines), "proxies": rows_by_proxy}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result)) if as_json else Console().print(show(result))
    print(f"written to {output}", file=sys.stderr)


class Answer(NamedTuple):
    """A rank's result: its cores, and the times of the last step by schedule and round."""

    cores: tuple[int, ...]
    times: list[list[Times]]


def measured(schedules: list[Schedule], steps: list[int], policy: RunPolicy) -> list[Answer]:
    """The answer of each rank, on ranks started here or by a launcher; in the latter case only rank 0 gets them."""
    launched = detect_launched_rank(os.environ)
    if launched is not None:
        answers = by_turns(launched.rank, launched.world, launched.init_method, schedules, steps, policy, gather=True)
        return answers if launched.rank == 0 else []
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    fork_server = ForkServer(1, {**os.environ, "PYTHONPATH": path})
    try:
        with WorkerPool(fork_server, WORLD) as workers:
            return workers.call("proxies:by_turns", {"schedules": schedules, "steps": steps, "policy": policy})
    finally:
        fork_server.close()


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
    times: list[list[Times]] = [[] for _ in schedules]
    gc.collect()
    gc.freeze()
    for round_number in range(-policy.warm, policy.runs):
        for i, runner in enumerate(runners):
            for _ in range(steps[i]):
                runner.align_ranks()
                cpu_s = time.thread_time()
                spans = runner.run_step_now(max(round_number, 0))
                cpu_s = time.thread_time() - cpu_s
            if round_number >= 0:
                times[i].append(times_of(spans, cpu_s))
        if rank == 0:
            print(f"round {round_number + policy.warm + 1} of {policy.warm + policy.runs}", file=sys.stderr, flush=True)
    answers: list[Any] = [None] * world
    if gather:
        dist.all_gather_object(answers, Answer(cores, times))
    leave_process_group()
    return answers if gather else Answer(cores, times)


def keep_to_cores(rank: int, world: int) -> tuple[int, ...]:
    """Pin this rank, and the threads that it starts, to its part of the cores; empty where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    num_cores = max(len(allowed) // world, 1)
    first = rank * num_cores % len(allowed)
    os.sched_setaffinity(0, allowed[first : first + num_cores])
    return tuple(allowed[first : first + num_cores])


def numbered(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """A number for each rank's set of cores; a distinct one where the cores are unknown."""
    keys = [rank_cores or (-1, rank) for rank, rank_cores in enumerate(cores)]
    return tuple(keys.index(key) for key in keys)


def times_of(spans: list[Span], cpu_s: float) -> Times:
    starts = [span.start_s for span in spans]
    return max(span.end_s for span in spans), (max(starts) - min(starts)) / max(len(starts) - 1, 1), cpu_s


def wanted(schedules: Iterable[Schedule]) -> list[Probe]:
    """Every operation over the schedules' groups, and over one of them: one call after the other, and all at once."""
    groups_by_op: dict[tuple[str, int], Groups] = {}
    for schedule in schedules:
        for action in (action for program in schedule.programs for action in program):
            groups = schedule.groups.get(action.axis, ())
            if groups and len(groups[0]) > 1 and action.op in (*COLLECTIVE_OPS, "send"):
                ranks = 2 if action.op == "send" else len(groups[0])
                groups_by_op.setdefault((action.op, ranks), tuple(group[:ranks] for group in groups))
    ops = [(op, groups) for (op, _), groups in groups_by_op.items()]
    variants = [(size, blocks) for size in SIZES for blocks in (True, False)]
    warm = [(op, busy, size, blocks, False) for op, groups in ops for busy in dict.fromkeys((groups, groups[:1])) for size, blocks in variants]
    return warm + [(op, groups, size, blocks, True) for op, groups in ops for size, blocks in variants]


def settled(rows: list[dict[Probe, list[Times]]], number: int) -> dict[Probe, list[Times]]:
    """The times of a round, each the median over it and its neighbours: a pause of the machine during repeated calls would otherwise count in
    every call of a proxy's step."""
    neighbours = rows[max(number - NEIGHBOURS, 0) : number + NEIGHBOURS + 1]

    def medians(times: Iterable[Times]) -> Times:
        return tuple(statistics.median(kind) for kind in zip(*times, strict=True))  # type: ignore[return-value]

    return {probe: [medians(times) for times in zip(*(row[probe] for row in neighbours), strict=True)] for probe in rows[number]}


def fitted(times: Mapping[Probe, list[Times]], core_ids: tuple[int, ...]) -> CoreNetwork:
    """The seconds of each operation among 4 and among 2 ranks, from one round."""
    crowds = {f"{op}/{len(groups[0])}": crowd(op, groups, core_ids) for op, groups, _, _, rested in times if rested}
    points_by_key: dict[tuple[str, int, bool, str], list[tuple[float, float]]] = {}
    for (op, groups, size, blocks, rested), by_rank in times.items():
        ranks, busy = len(groups[0]), [by_rank[rank] for group in groups for rank in group]
        hands = [by_rank[group[0]] for group in groups] if op == "send" else busy  # only senders: the receiver of a message is busy copying it
        sent, last = size * wire_factor(op, ranks), max(t for t, *_ in busy)
        if rested and blocks:
            seconds_by_kind = {"rested": (last - (RESTED_CALLS + 1) * rest_s(size)) / RESTED_CALLS}
        elif rested:
            seconds_by_kind = {"rested": statistics.mean(worked for *_, worked in hands) / RESTED_CALLS}
        else:
            seconds_by_kind = {"each": last / CALLS, "hand": statistics.mean(hand for _, hand, _ in hands)}
        for kind, seconds in seconds_by_kind.items():
            points_by_key.setdefault((f"{op}/{ranks}", len(groups), blocks, kind), []).append((sent, max(seconds, LEAST_S)))
    curves = {key: TimeCurve(tuple(sorted(points))) for key, points in points_by_key.items()}

    def minus(curve: TimeCurve, *others: TimeCurve) -> TimeCurve:
        return TimeCurve(tuple((sent, max(seconds - sum(o.seconds(sent) for o in others), LEAST_S)) for sent, seconds in curve.points))

    def transfer_time(pairs: int) -> TimeCurve:
        """The time of a message after its launch: repeated messages and round trips contain both. The launch takes as long as for a single pair: with
        several pairs the sender also waits for a core."""
        row, back, hand = curves["send/2", pairs, False, "each"], curves["send/2", pairs, True, "each"], curves["send/2", 1, False, "hand"]
        return minus(TimeCurve(tuple((sent, max(seconds, back.seconds(sent))) for sent, seconds in row.points)), hand)

    def timing(name: str, blocks: bool) -> CallTiming:
        """A blocking call takes what repeated calls take; the additional time after a wait is its cold launch. For an async call after a wait the
        rank works as long as its thread's CPU time, of which the launch in repeated calls is a part."""
        num_groups = max(number for key, number, *_ in curves if key == name)
        together, rested = (curves[name, num_groups, blocks, kind] for kind in ("each", "rested"))
        alone = curves[name, 1, blocks, "each"]
        if blocks:
            return CallTiming(together, alone, NOTHING, minus(rested, together), crowds[name])
        hand = curves[name, 1 if name == "send/2" else num_groups, blocks, "hand"]
        if name == "send/2":
            together, alone = transfer_time(num_groups), transfer_time(1)
        return CallTiming(together, alone, hand, minus(rested, hand), crowds[name])

    names = {name for name, *_ in curves}
    return CoreNetwork({name: timing(name, False) for name in names}, {name: timing(name, True) for name in names}, core_ids)


def crowd(op: str, groups: Groups, core_ids: tuple[int, ...]) -> int:
    """The number of groups that use the same core when all groups are active."""
    return max(Counter(core for group in groups for core in busy_cores(op, group, core_ids)).values())


def typical(machines: list[CoreNetwork]) -> dict[str, Any]:
    """Median call times over rounds by the bytes that a rank sends, for each kind of call ("beside" is async), operation and kind of time."""
    fields = {"together": "contended", "alone": "uncontended", "hand": "launch_overhead", "rested": "cold_launch_overhead"}

    def median(timings: Sequence[CallTiming], field: str) -> list[tuple[float, float]]:
        curves = [getattr(timing, field).points for timing in timings]
        return [(points[0][0], statistics.median(seconds for _, seconds in points)) for points in zip(*curves, strict=True)]

    def by_name(calls: Sequence[Mapping[str, CallTiming]], kinds: Iterable[str]) -> dict[str, Any]:
        return {name: {kind: median([timings[name] for timings in calls], fields[kind]) for kind in kinds} for name in sorted(calls[0])}

    blocking = by_name([m.blocking for m in machines], ("together", "alone", "rested"))
    return {"beside": by_name([m.async_timings for m in machines], fields), "blocking": blocking}


def rest_s(size: int) -> float:
    return REST_S + size / REST_RATE


def repeated(op: str, groups: Groups, size: int, blocks: bool, rested: bool) -> Schedule:
    """One call after the other, a message there and the next one back; or all at once, and all messages from the first to the second; `rested`
    with a wait before each and after the last. Ranks of no group sleep meanwhile: one that waits for others may take a core."""
    programs = []
    for index in range(2 if op == "send" else 1):
        out = ProgramBuilder()
        for number in range(RESTED_CALLS if rested else CALLS):
            if rested:
                out.compute(f"rest/{number}", rest_s(size))
            if op != "send":
                out.collective(f"call/{number}", op, "probe", size, blocks=blocks)  # type: ignore[arg-type]
            elif index == (number % 2 if blocks else 0):
                out.send(f"call/{number}", "probe", 1 - index, size, blocks=blocks)
            else:
                out.receive(f"call/{number}", "probe", 1 - index, size, blocks=blocks)
        if rested:
            out.compute("rest/last", rest_s(size))
        programs.append(out)
    idle = ProgramBuilder()
    idle.compute("idle", CALLS * (IDLE_S + size / IDLE_RATE))
    program_of_rank = {rank: index % len(programs) for group in groups for index, rank in enumerate(group)}
    return build_schedule(f"{op} of {size}", WORLD, {"probe": groups}, [*programs, idle], lambda rank: program_of_rank.get(rank, len(programs)))


def compare(name: str, schedule: Schedule, machines: list[CoreNetwork], steps: list[float]) -> dict[str, Any]:
    """A proxy's measured steps beside the prediction from each round's times."""
    predicted = [simulate(cores.with_launch_overhead(schedule), cores).step_s for cores in machines]
    errors = [a / b - 1 for a, b in zip(predicted, steps, strict=True)]
    return {
        "proxy": name,
        "measured_s": statistics.median(steps),
        "predicted_s": statistics.median(predicted),
        "off": statistics.median(errors),
        "off_by_round": errors,
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
