"""How engines are compared: all of them in one process group, one step each a round, in a balanced order.

A ratio is taken within a round, against the step of the block's first engine in that round, so that a machine that slows down or is
shared slows both sides; the median over rounds counts. A second copy of the first engine is timed too: how far its ratio is from 1 is
the noise. The processor time of all ranks is put into a ratio as well: other work on the machine disturbs it less than the clock.
All engines of a block must reach the same losses.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exposed import Waits
from meshwright.core.errors import RunError
from meshwright.launch import ForkServer, Rendezvous, WorkerPool, join_process_group, leave_process_group

HERE = Path(__file__).parent
WARM_UP = 3  # rounds: first steps allocate, DDP rebuilds its buckets after the first
LOSS_TOLERANCE = 1e-4

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Engine:
    """One way to train. The first engine of a block is what the others of that block are divided by; the second is the first again."""

    name: str
    block: str
    step: Callable[[Batch], Tensor]  # forward, backward, synchronise, optimizer step; the loss, of this rank or of all ranks
    ours: bool = False  # all its communication goes through Meshwright, so the time spent waiting for it can be measured


@dataclass(frozen=True)
class Trial:
    """What is to be timed on one rank: engines, and batch `number` for all of them."""

    engines: list[Engine]
    data: Callable[[int], Batch]


def run(maker: str, arguments: dict[str, Any], rounds: int, world: int) -> list[list[dict[str, Any]]]:
    """What each rank measured, engine by engine; `maker` is the 'module:function' that makes a rank's `Trial`."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    fork_server = ForkServer(1, {**os.environ, "PYTHONPATH": path})
    try:
        with WorkerPool(fork_server, world) as workers:
            return workers.call("rounds:measure", {"maker": maker, "arguments": arguments, "rounds": rounds})
    finally:
        fork_server.close()


# -- in a worker --


def measure(rank: int, world: int, init_method: str, maker: str, arguments: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """What `timed` says of this rank's trial, in a process group of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    join_process_group(Rendezvous(rank, world, init_method))
    module, _, function = maker.partition(":")
    waits = Waits()
    measurements = timed(getattr(importlib.import_module(module), function)(rank, world, **arguments), waits, rounds)
    leave_process_group()
    return measurements


def timed(trial: Trial, waits: Waits, rounds: int) -> list[dict[str, Any]]:
    """Seconds and losses of every engine on this rank, one entry a round; the warm-up has losses only."""
    engines = trial.engines
    rows: list[dict[str, Any]] = [
        {"engine": e.name, "block": e.block, "ours": e.ours, "seconds": [], "cpu_seconds": [], "waited": [], "losses": []} for e in engines
    ]
    gc.collect()
    gc.freeze()  # else a collection walks through all that the peers imported, in whichever engine's step it happens
    first_start = time.perf_counter()
    for number in range(WARM_UP + rounds):
        batch = trial.data(number)
        for index in order(len(engines), number):
            dist.barrier()
            waits.seconds = 0.0
            start, cpu_start = time.perf_counter(), time.process_time()
            loss = float(engines[index].step(batch))
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            rows[index]["losses"].append(loss)
            if number >= WARM_UP:
                rows[index]["seconds"].append(seconds)
                rows[index]["cpu_seconds"].append(cpu_seconds)
                rows[index]["waited"].append(waits.seconds)
        if dist.get_rank() == 0:
            done, total = number + 1, WARM_UP + rounds
            remaining_s = (time.perf_counter() - first_start) / done * (total - done)
            say(f"round {done} of {total}, {WARM_UP} of them to warm up; {remaining_s / 60:.1f} min left", over=done < total)
    return rows


def order(count: int, number: int) -> list[int]:
    """Rotates from round to round so that, over `count` rounds, each engine takes each position once and follows each other engine once.

    Without the latter a raw engine that always comes after a sharded one, which leaves the allocator in another state, looks 3% slower.
    """
    zigzag = [-(i // 2) if i % 2 == 0 else (i + 1) // 2 for i in range(count)]  # 0, 1, -1, 2, -2, …: all steps between neighbours differ
    indices = [(offset + number) % count for offset in zigzag]
    return indices[::-1] if count % 2 and number // count % 2 else indices  # an odd count is balanced only together with its mirror image


def say(text: str, over: bool = False) -> None:
    """Progress on stderr; in a terminal the next line is written over this one."""
    terminal = sys.stderr.isatty()
    print(("\r\033[K" if terminal else "") + text, file=sys.stderr, end="" if over and terminal else "\n", flush=True)


# -- evaluation --


def summarise(ranks: list[list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], float]:
    """A block for each kind of plan, every engine in it against the block's first; and how far apart losses were."""
    blocks: dict[str, list[dict[str, Any]]] = {}
    for per_rank in zip(*ranks, strict=True):
        rows = blocks.setdefault(per_rank[0]["block"], [])
        rows.append(_row(per_rank, raw=rows[0] if rows else None))
    return [{"block": name, "noise": _noise(rows[1]), "engines": rows} for name, rows in blocks.items()], check_losses(ranks)


def _row(per_rank: tuple[dict[str, Any], ...], raw: dict[str, Any] | None) -> dict[str, Any]:
    """One engine: a step lasts until the slowest rank is done; processor time is all ranks' together, waiting is the mean rank's."""
    seconds = [max(times) for times in zip(*(row["seconds"] for row in per_rank), strict=True)]
    cpu = [sum(times) for times in zip(*(row["cpu_seconds"] for row in per_rank), strict=True)]
    waited = [statistics.fmean(times) for times in zip(*(row["waited"] for row in per_rank), strict=True)]
    low, ratio, high = statistics.quantiles(ratios(seconds, raw["seconds"] if raw else seconds), n=4)
    return {
        "engine": per_rank[0]["engine"],
        "step_s": statistics.median(seconds),
        "exposed_s": statistics.median(waited) if per_rank[0]["ours"] else None,
        "ratio": ratio,
        "ratio_iqr": [low, high],
        "cpu_ratio": statistics.median(ratios(cpu, raw["cpu_seconds"] if raw else cpu)),
        "seconds": seconds,
        "cpu_seconds": cpu,
    }


def _noise(again: dict[str, Any]) -> float:
    """From the raw engine's second copy: how far its ratio is from 1, or the standard error of such a median if that is larger."""
    low, high = again["ratio_iqr"]
    sigma = (high - low) / 1.349  # of a normal distribution with these quartiles
    return max(abs(again["ratio"] - 1), 1.253 * sigma / math.sqrt(len(again["seconds"])))


def ratios(ours: list[float], raw: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(ours, raw, strict=True)]


def check_losses(ranks: list[list[dict[str, Any]]]) -> float:
    """The largest relative difference between two engines' mean losses in one round; RunError when they did not train the same."""
    curves = {}
    for per_rank in zip(*ranks, strict=True):
        name = f"{per_rank[0]['engine']} ({per_rank[0]['block']})"
        curves[name] = [statistics.fmean(losses) for losses in zip(*(row["losses"] for row in per_rank), strict=True)]
    first, expected = next(iter(curves.items()))
    worst = 0.0
    for name, curve in curves.items():
        for number, (loss, reference) in enumerate(zip(curve, expected, strict=True)):
            error = abs(loss - reference) / abs(reference)
            if not error <= LOSS_TOLERANCE:
                raise RunError(f"{name} has loss {loss:.6f} at step {number}, {first} has {reference:.6f}: the engines do not train the same")
            worst = max(worst, error)
    return worst


def machine() -> dict[str, Any]:
    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
