"""Micro-benchmarks: what one rank reaches while all ranks work at once. It is handed a Comm and gives back Rates."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from meshwright.core.calibration import Line, Points, Rates
from meshwright.core.cluster import FP8_SINCE
from meshwright.core.comm import Comm
from meshwright.core.schedule import wire_factor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
_BYTES = {"cpu": (2**14, 2**17, 2**20, 2**23, 2**26), "cuda": (2**16, 2**20, 2**24, 2**28, 2**30)}
_LENGTHS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096)}
_ELEMENTS = {"cpu": (2**14, 2**20), "cuda": (2**16, 2**20, 2**26)}
_MESSAGES = {"cpu": (2**12, 2**18, 2**21, 2**24), "cuda": (2**12, 2**18, 2**22, 2**26, 2**28)}
_SLOW_S = 0.08  # a call that takes longer than this tells enough by itself; larger ones are left out


class Stopwatch:
    """Seconds of a call, with the device waited for, within a small budget: the lower quartile, since what disturbs only adds."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s

    def __call__(self, work: Callable[[], object], least: int = 3) -> float:
        self._once(work)
        # A GPU runs behind: queue several calls and wait once, or the waiting would be measured.
        batch = 1 if self.device.type == "cpu" else max(2, min(100, int(0.002 / max(self._once(work), 1e-6))))
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < least or (time.perf_counter() - begun < self.budget_s and len(times) < 200):
            times.append(self._once(lambda: [work() for _ in range(batch)]) / batch)
        return sorted(times)[len(times) // 4]

    def _once(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(
    comm: Comm, device: torch.device, *, backend: str, threads: int, held: Callable[[], int], say: Callable[[str], None], quick: bool = True,
    mixed: bool = False,
) -> Rates:  # fmt: skip
    """All rates of this rank; `held` reads the memory it holds. Every rank calls it at the same time; collectives keep them in step.
    Ranks on `mixed` devices all use a CPU's sizes of messages."""
    sizes, kind = ("cpu", device.type) if mixed else (device.type, "")
    watch = Stopwatch(device, 0.04 if quick else 0.4)
    comm.barrier()
    say("arithmetic")
    compute = _compute_rates(device, watch)
    comm.barrier()
    say("memory bandwidth")
    small = torch.ones(16, device=device)
    call_s = Stopwatch(device, 0.02)(lambda: [small.add_(1.0) for _ in range(64)]) / 64
    memory = _bandwidth(device, watch, call_s)
    comm.barrier()
    lines: dict[str, Line] = {}
    overlap = 0.0
    if comm.size > 1:
        say("collectives")
        lines = {f"{backend}/{op}": line for op, line in _collectives(comm, device, watch, sizes).items()}
        overlap = _overlap(comm, device, watch, sizes)
    host = _host(device, comm) if device.type == "cuda" else {}
    say("framework")
    return Rates(comm.size, threads, compute, memory, call_s, lines, overlap, _settled(device, held), kind, device.type == "cuda", host)


def slowest(all_rates: list[Rates]) -> Rates:
    """What a step waits for: at each point the slowest rank's figure."""
    first = all_rates[0]
    if len(all_rates) == 1:
        return first

    def least(points: list[Points]) -> Points:
        return tuple((column[0][0], min(rate for _, rate in column)) for column in zip(*points, strict=False))

    keys = set.intersection(*(set(r.compute) for r in all_rates))
    lines = {
        name: Line(max(r.collectives[name].alpha_s for r in all_rates), min(r.collectives[name].bytes_per_s for r in all_rates))
        for name in first.collectives
    }
    return Rates(
        first.ranks,
        first.threads,
        {key: least([r.compute[key] for r in all_rates]) for key in sorted(keys)},
        least([r.memory for r in all_rates]),
        max(r.call_s for r in all_rates),
        lines,
        min(r.overlap for r in all_rates),
        max(r.base_bytes for r in all_rates),
        first.device,
        first.queued,
        {key: min(r.host.get(key, 0.0) for r in all_rates) for key in first.host},
    )


def host_copies(device: torch.device) -> Mapping[str, float]:
    """Bytes a second between pinned host memory and the device; nothing to measure on a CPU."""
    if device.type != "cuda":
        return {}
    size = 2**28
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    watch = Stopwatch(device, 0.2)
    return {"host_to_device": size / watch(lambda: there.copy_(host)), "device_to_host": size / watch(lambda: host.copy_(there))}


def _host(device: torch.device, comm: Comm) -> dict[str, float]:
    """What an optimizer in host memory would reach, while all ranks do the same: the link each way, and its own pass."""
    elements = 2**24
    there = torch.zeros(elements, device=device)
    copy = torch.nn.Parameter(torch.zeros(elements, pin_memory=True))
    copy.grad = torch.ones_like(copy)
    optimizer = torch.optim.AdamW([copy], fused=True)
    watch = Stopwatch(device, 0.1)
    comm.barrier()
    link = watch(lambda: (there.copy_(copy.detach(), non_blocking=True), copy.grad.copy_(there, non_blocking=True)))  # type: ignore[union-attr]
    comm.barrier()
    step = watch(optimizer.step)
    return {"link": 2 * 4 * elements / link, "step": 7 * 4 * elements / step}


def _compute_rates(device: torch.device, watch: Stopwatch) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for precision, dtype in DTYPES.items():
        if precision == "fp16" and device.type == "cpu":
            continue
        found[f"matmul/{precision}"] = _curve(_SIZES[device.type], watch, partial(_matmul, device=device, dtype=dtype))
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_SINCE:
        found["matmul/fp8"] = _curve(_SIZES["cuda"], watch, partial(_matmul_fp8, device=device))
    found["conv/fp32"] = _curve((8, 32, 64), watch, partial(_conv, device=device, dtype=torch.float32))
    low = "bf16" if device.type == "cuda" else "fp32"
    found[f"attention/{low}"] = _curve(_LENGTHS[device.type], watch, partial(_attention, device=device, dtype=DTYPES[low]))
    for phase in ("forward", "backward"):
        found[f"special-{phase}/fp32"] = _curve(_ELEMENTS[device.type], watch, partial(_special, device=device, backward=phase == "backward"))
    return found


def _curve(sizes: tuple[int, ...], watch: Stopwatch, make: Callable[[int], tuple[float, Callable[[], object]]]) -> Points:
    points = []
    for size in sizes:
        flops, work = make(size)
        seconds = watch(work)
        points.append((flops, flops / seconds))
        if seconds > _SLOW_S:
            break
    return tuple(points)


def _matmul(n: int, device: torch.device, dtype: torch.dtype) -> tuple[float, Callable[[], object]]:
    a, b = torch.randn(n, n, device=device).to(dtype), torch.randn(n, n, device=device).to(dtype)
    return 2.0 * n**3, lambda: torch.mm(a, b)


def _matmul_fp8(n: int, device: torch.device) -> tuple[float, Callable[[], object]]:
    a = torch.randn(n, n, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return 2.0 * n**3, lambda: torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _conv(channels: int, device: torch.device, dtype: torch.dtype) -> tuple[float, Callable[[], object]]:
    x, w = torch.randn(8, channels, 16, 16, device=device, dtype=dtype), torch.randn(channels, channels, 3, 3, device=device, dtype=dtype)
    return 2.0 * 8 * 16 * 16 * channels * channels * 9, lambda: F.conv2d(x, w, padding=1)


def _attention(length: int, device: torch.device, dtype: torch.dtype) -> tuple[float, Callable[[], object]]:
    q = torch.randn(4, 4, length, 64, device=device, dtype=dtype)
    return 4.0 * 16 * length * length * 64, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)


def _special(elements: int, device: torch.device, backward: bool) -> tuple[float, Callable[[], object]]:
    x = torch.randn(elements, device=device)
    if backward:
        return float(elements), lambda: torch.ops.aten.gelu_backward(x, x, approximate="tanh")
    return float(elements), lambda: F.gelu(x, approximate="tanh")


def _settled(device: torch.device, held: Callable[[], int]) -> int:
    """Memory after everything a step uses has been used once: libraries load their parts, and keep them, on first use."""
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for _ in range(2):
        F.cross_entropy(layer(torch.randn(2, 8, 32, device=device)).flatten(0, 1), torch.zeros(16, dtype=torch.long, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    del layer, optimizer
    gc.collect()
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps freed memory until it is asked to give it back
            ctypes.CDLL(None).malloc_trim(0)
    return held()


def _bandwidth(device: torch.device, watch: Stopwatch, call_s: float) -> Points:
    """Bytes a second of an addition, by size; the time of the bare call is counted apart."""
    points = []
    for size in _BYTES[device.type]:
        a, b = torch.ones(size // 12, device=device), torch.ones(size // 12, device=device)
        out = torch.empty_like(a)
        seconds = watch(lambda a=a, b=b, out=out: torch.add(a, b, out=out))  # type: ignore[misc]
        if device.type == "cpu":  # on a GPU the call is queued while the one before still runs
            seconds = max(seconds - call_s, seconds * 0.1)
        points.append((float(size), size / seconds))
    return tuple(points)


def _collectives(comm: Comm, device: torch.device, watch: Stopwatch, kind: str) -> dict[str, Line]:
    found = {}
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        samples = []
        for size in _MESSAGES[kind]:
            whole = torch.ones(size // 4 // comm.size * comm.size, device=device)
            part = torch.ones(whole.numel() // comm.size, device=device)
            # The same number of calls on every rank, or they would wait for each other for ever.
            seconds = statistics.median(watch._once(lambda w=whole, p=part, o=op: _collective(comm, o, w, p).wait()) for _ in range(7))  # type: ignore[misc]
            samples.append((size * wire_factor(op, comm.size), seconds))
        found[op] = fit_line(samples)
    return found


def _collective(comm: Comm, op: str, whole: torch.Tensor, part: torch.Tensor):  # type: ignore[no-untyped-def]
    if op == "all_reduce":
        return comm.all_reduce(whole, "probe")
    return comm.all_gather(whole, part, "probe") if op == "all_gather" else comm.reduce_scatter(part, whole, "probe")


def fit_line(samples: list[tuple[float, float]]) -> Line:
    """α–β by least squares on relative error, so that small messages count as much as large ones."""
    weights = [1.0 / (t * t) for _, t in samples]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, samples, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, samples, strict=True)) / total
    above = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, samples, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, samples, strict=True))
    slope = above / below if below else 0.0
    if slope <= 0:  # noise larger than the effect: take the largest message alone
        size, seconds = samples[-1]
        return Line(min(t for _, t in samples), size / seconds)
    return Line(max(mean_t - slope * mean_x, min(t for _, t in samples) * 0.1), 1.0 / slope)


def _overlap(comm: Comm, device: torch.device, watch: Stopwatch, kind: str) -> float:
    """Run a collective beside arithmetic of about the same length: how much of it disappears?"""
    whole = torch.ones(2**20 if kind == "cpu" else 2**26, device=device)
    n = 256 if device.type == "cpu" else 2048
    a = torch.randn(n, n, device=device)

    def times(work: Callable[[], object]) -> float:
        comm.barrier()
        return statistics.median(watch._once(work) for _ in range(5))

    alone = times(lambda: comm.all_reduce(whole, "probe").wait())
    one = times(lambda: torch.mm(a, a))
    count = min(max(int(alone / max(one, 1e-7)), 1), 1000)  # each rank's own: one may compute far quicker than another

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, a)

    def both() -> None:
        work = comm.all_reduce(whole, "probe")
        compute()
        work.wait()

    busy = times(compute)
    together = times(both)
    return min(max((alone + busy - together) / min(alone, busy), 0.0), 1.0)
