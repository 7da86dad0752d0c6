"""The watch over the ranks of one run: which hang counts, and what is said of a rank that is slow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from meshwright.core.errors import RequestError
from meshwright.launch.hang_detection import SlowRank
from meshwright.launch.progress_watch import ProgressWatch
from meshwright.observe import Recorder, RunFolder
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.run_inputs import PreparedRun


def make_watch(folder: RunFolder, prepared: PreparedRun, log_progress: Callable[[str], None]) -> ProgressWatch:
    """Ranks are compared with each other only where they have equal parts of the batch and wait for each other at the end of a step."""

    def say_slow(slow: SlowRank) -> None:
        line = f"{slow.own_s:.2g} s of its own in a step, {slow.factor:.1f} times the others' {slow.others_s:.2g} s; they wait for it"
        line = f"rank {slow.rank} is slow: {line}"
        log_progress(line)
        with contextlib.suppress(RequestError), Recorder(folder.path, 0) as recorder:
            recorder.event("slow", message=line, slow_rank=slow.rank, factor=slow.factor, own_s=slow.own_s, others_s=slow.others_s)

    plan = prepared.plan
    is_even = plan.world == plan.mesh.data_parallel_size and plan.memory.zero < 3 and not plan.rank_devices and plan.device == "cpu"
    counts = {count for _, count in map(plan.sample_range, range(plan.world))} if is_even else set()
    return ProgressWatch(hang_limit_of(prepared.config), say_slow if len(counts) == 1 and plan.world > 1 else None)


def hang_limit_of(config: RunConfig) -> float | None:
    """Seconds without progress that are a hang; None: by the time of steps; 0: none."""
    return None if config.hang_s == "auto" else 0.0 if config.hang_s == "none" else float(config.hang_s)
