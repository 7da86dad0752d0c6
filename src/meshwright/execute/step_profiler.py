"""One step under torch's profiler: a Chrome trace, and the seconds of exposed communication."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.core.backends import BACKENDS

T = TypeVar("T")
Spans = list[tuple[float, float]]
# Prefixes of the backends' calls in a profile, and substrings of their kernels' names.
_CALLS = tuple(f"{name}{mark}" for name in BACKENDS for mark in ":.")  # the call, and the part of it that a work queue runs
_KERNELS = tuple(traits.kernels for traits in BACKENDS.values() if traits.kernels)


def profile_step(step: Callable[[], T], device: torch.device, trace: Path | None) -> tuple[T, dict[str, float]]:
    """Run `step` once; return its result and its seconds of communication, total and exposed. Writes a Chrome trace to `trace`."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # a work queue's thread exists before the profiler starts
    with profile(activities=activities, experimental_config=all_threads) as profiler:
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if trace is not None:
        _export_trace(profiler, trace)
    events = profiler.events() or []
    # User annotations appear on the GPU too, and are not work themselves.
    kernels = [e for e in events if not getattr(e, "is_user_annotation", False)]
    on_gpu = [e for e in kernels if device.type == "cuda" and str(e.device_type).endswith("CUDA")]
    comm, compute = _split_spans(on_gpu or events, gpu=bool(on_gpu))
    return result, {"communication_s": total_length(comm), "exposed_s": total_length(comm) - total_length(intersect_spans(comm, compute))}


def _export_trace(profiler: profile, trace: Path) -> None:
    """Write the trace, or say that it could not be written: a full disk does not stop training. torch writes trace.json.tmp and renames it."""
    reason = "the disk may be full"
    try:
        profiler.export_chrome_trace(str(trace))
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    with contextlib.suppress(OSError):
        trace.with_name(f"{trace.name}.tmp").unlink(missing_ok=True)
        if not trace.exists():
            print(f"meshwright: {trace} could not be written: {reason}", file=sys.stderr, flush=True)


def _split_spans(events: Iterable[Any], *, gpu: bool) -> tuple[Spans, Spans]:
    """(communication, computation) as merged spans of seconds. Computation inside a collective's call, such as a reduction, is part of the call, but
    not what the caller's thread computes while an asynchronous call is under way."""
    comm: Spans = []
    sync_comm: dict[int, Spans] = {}  # by thread
    compute: dict[int, Spans] = {}
    for event in events:
        span = (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        name = event.name.lower()
        if name.startswith(_CALLS) or any(part in name for part in _KERNELS):
            comm.append(span)
            if not event.is_async:
                sync_comm.setdefault(event.thread, []).append(span)
        elif gpu or name.startswith("aten::"):
            compute.setdefault(event.thread, []).append(span)
    if not gpu:
        compute = {thread: subtract_spans(merge_spans(spans), merge_spans(sync_comm.get(thread, []))) for thread, spans in compute.items()}
    return merge_spans(comm), merge_spans(itertools.chain(*compute.values()))


def merge_spans(spans: Iterable[tuple[float, float]]) -> Spans:
    """Merge overlapping spans."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect_spans(a: Spans, b: Spans) -> Spans:
    """Spans in which both lists of merged spans are active."""
    overlaps: Spans = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            overlaps.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def subtract_spans(a: Spans, b: Spans) -> Spans:
    """The parts of the merged spans `a` that are in none of the merged spans `b`."""
    edges = [-math.inf, *(edge for span in b for edge in span), math.inf]
    return intersect_spans(a, list(zip(edges[::2], edges[1::2], strict=True)))


def total_length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
