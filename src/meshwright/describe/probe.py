"""Micro-benchmarks: what one rank reaches while all ranks work at once. It is handed a Comm and gives back Rates.

[Note: crowded cores]
Where there are more ranks than cores, a short call is done within a slice of time that its rank has a core to itself, and a long one is not: by the
clock on the wall their rates would differ for no reason of their own. So work on a CPU is timed by the time that a rank had a core, with all ranks at
work, and how many ranks share a core is measured once, as the time on the wall over that time. Who prices a plan multiplies where all ranks
compute at once, and does not where some of them wait and leave their core to others, as in a pipeline.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.core.calibration import Line, Points, Rates
from meshwright.core.cluster import FP8_SINCE
from meshwright.core.comm import Comm, Messages, Pending
from meshwright.core.schedule import wire_factor
from meshwright.describe.operations import is_dear, is_free

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
_BYTES = {"cpu": (2**14, 2**17, 2**20, 2**23, 2**26), "cuda": (2**16, 2**20, 2**24, 2**28, 2**30)}
_LENGTHS = {"cpu": (64, 256, 512), "cuda": (256, 1024, 4096)}
_ELEMENTS = {"cpu": (2**14, 2**20), "cuda": (2**16, 2**20, 2**26)}
_MESSAGES = {"cpu": (2**12, 2**17, 2**20, 2**22, 2**24), "cuda": (2**12, 2**18, 2**22, 2**26, 2**28)}
_CALLS = 8  # of one operation and size
_WORK_S = 0.001  # between two of them: ranks of a step come to a call from some work, and not all at once
_CROWD_S = 0.1  # of work, while all ranks are at it
_SLOW_S = 0.03  # a call that takes longer than this tells enough by itself; larger ones are left out


class Stopwatch:
    """Seconds of a call, with the device waited for, within a small budget: the lower quartile, since what disturbs only adds. A rank of one
    thread on a CPU is timed by the time that it had a core (see [Note: crowded cores])."""

    def __init__(self, device: torch.device, budget_s: float, threads: int = 0) -> None:
        self.device, self.budget_s = device, budget_s
        self.clock = time.thread_time if device.type == "cpu" and threads == 1 else time.perf_counter

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
        start = self.clock()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.clock() - start


def measure(
    comm: Comm, device: torch.device, *, backend: str, threads: int, held: Callable[[], int], say: Callable[[str], None], quick: bool = True,
    mixed: bool = False, pair: Comm | None = None,
) -> Rates:  # fmt: skip
    """All rates of this rank; `held` reads the memory it holds. Every rank calls it at the same time; collectives keep them in step.
    Ranks on `mixed` devices all use a CPU's sizes of messages. `pair` joins every rank with one other."""
    sizes, kind = ("cpu", device.type) if mixed else (device.type, "")
    watch = Stopwatch(device, 0.04 if quick else 0.4, threads)
    comm.barrier()
    say("arithmetic")
    compute = _compute_rates(device, watch)
    comm.barrier()
    say("memory bandwidth")
    call_s = call_seconds(device, watch)
    memory = _bandwidth(device, watch)
    fixed: dict[str, float] = {}
    if device.type == "cpu":
        compute["optimizer/fp32"], fixed = optimizer_rates(watch)
        fixed |= recompute_seconds(watch) | {"hook": hook_seconds(watch)}
    crowding = _crowding(comm, watch)
    curves: dict[str, Points] = {}
    overlap = 0.0
    if comm.size > 1:
        say("collectives")
        curves = meeting_seconds(comm, pair, device, backend, sizes)
        overlap = _overlap(comm, device, sizes)
    lines = {name: fit_line(list(points)) for name, points in curves.items()}
    comm.barrier()
    host = _host(device) if device.type == "cuda" else {}
    say("framework")
    base = _settled(device, held)
    queued = device.type == "cuda"
    return Rates(
        comm.size, threads, compute, memory, call_s, lines, overlap, base, kind, queued, host, curves, crowding=crowding, fixed=fixed
    )  # fmt: skip


def slowest(all_rates: list[Rates]) -> Rates:
    """What a step waits for: at each point the slowest rank's figure."""
    first = all_rates[0]
    if len(all_rates) == 1:
        return first

    def least(points: list[Points]) -> Points:
        return tuple((column[0][0], min(rate for _, rate in column)) for column in zip(*points, strict=False))

    keys = set.intersection(*(set(r.compute) for r in all_rates))
    # Ranks leave a collective together: who came late waited less, and the mean is what it took beyond the mean rank's work before it.
    curves = {name: _mean_points([r.curves[name] for r in all_rates]) for name in first.curves}
    lines = {name: fit_line(list(points)) for name, points in curves.items()}
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
        curves,
        crowding=statistics.harmonic_mean([r.crowding for r in all_rates]),  # what they had of the cores together
        fixed={key: max(r.fixed[key] for r in all_rates) for key in first.fixed},
    )


def _mean_points(every: list[Points]) -> Points:
    return tuple((column[0][0], statistics.fmean(seconds for _, seconds in column)) for column in zip(*every, strict=True))


def host_copies(device: torch.device) -> Mapping[str, float]:
    """Bytes a second between pinned host memory and the device; nothing to measure on a CPU."""
    if device.type != "cuda":
        return {}
    size = 2**28
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    watch = Stopwatch(device, 0.2)
    return {"host_to_device": size / watch(lambda: there.copy_(host)), "device_to_host": size / watch(lambda: host.copy_(there))}


def _host(device: torch.device) -> dict[str, float]:
    """What an optimizer in host memory would reach, while all ranks do the same: the link each way, and its own pass."""
    elements = 2**24
    there = torch.zeros(elements, device=device)
    copy = torch.nn.Parameter(torch.zeros(elements, pin_memory=True))
    copy.grad = torch.ones_like(copy)
    optimizer = torch.optim.AdamW([copy], fused=True)
    watch = Stopwatch(device, 0.1)
    link = watch(lambda: (there.copy_(copy.detach(), non_blocking=True), copy.grad.copy_(there, non_blocking=True)))  # type: ignore[union-attr]
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
    low = "bf16" if device.type == "cuda" else "fp32"
    found["conv/fp32"] = _curve((8, 32, 64), watch, partial(_conv, device=device))
    found[f"attention/{low}"] = _curve(_LENGTHS[device.type], watch, partial(_attention, device=device, dtype=DTYPES[low], backward=False))
    if device.type == "cpu":
        found[f"attention-backward/{low}"] = _curve(_LENGTHS["cpu"], watch, partial(_attention, device=device, dtype=DTYPES[low], backward=True))
        found |= by_reuse(watch)
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


def _conv(channels: int, device: torch.device) -> tuple[float, Callable[[], object]]:
    x, w = torch.randn(8, channels, 16, 16, device=device), torch.randn(channels, channels, 3, 3, device=device)
    return 2.0 * 8 * 16 * 16 * channels * channels * 9, lambda: F.conv2d(x, w, padding=1)


def by_reuse(watch: Stopwatch) -> dict[str, Points]:
    """FLOP/s on a CPU by FLOPs for each byte that goes in and out: of convolutions over images and volumes, which a CPU takes sample after
    sample, and of products of many small matrices. What one of them is decides how well it does, and not how many there are."""
    found: dict[str, list[tuple[float, float]]] = {}
    for dims, edges in ((2, (32, 32, 16, 16, 8)), (3, (16, 16, 8, 8, 4))):
        for channels, edge in zip((4, 8, 16, 32, 64), edges, strict=True):
            for samples, mark in ((2, ""), (1, "-alone")):  # of one sample torch computes otherwise, in less than half the time
                x, w = torch.randn(samples, channels, *[edge] * dims), torch.randn(channels, channels, *[3] * dims)
                how: Any = ([1] * dims, [1] * dims, [1] * dims, False, [0] * dims, 1)
                forward = partial(torch.ops.aten.convolution, x, w, None, *how)
                backward = partial(torch.ops.aten.convolution_backward, x, x, w, [channels], *how, [True, True, True])
                flops, one = 2.0 * x.numel() * channels * 3**dims, 4.0 * x.numel()
                found.setdefault(f"conv{dims}-forward{mark}/fp32", []).append((flops / (2 * one), flops / watch(forward)))
                found.setdefault(f"conv{dims}-backward{mark}/fp32", []).append((2 * flops / (3 * one), 2 * flops / watch(backward)))
    for n in (4, 8, 16, 32, 64):
        x = torch.randn(64, n, n)
        found.setdefault("batched/fp32", []).append((n / 6, 2.0 * 64 * n**3 / watch(partial(torch.bmm, x, x))))
    return {key: tuple(sorted(points)) for key, points in found.items()}


def _attention(length: int, device: torch.device, dtype: torch.dtype, backward: bool) -> tuple[float, Callable[[], object]]:
    q = torch.randn(4, 4, length, 64, device=device, dtype=dtype)
    flops = 2.0 * 16 * length * length * 64  # of every pair 4 for each feature, and half of the pairs
    if not backward:
        return flops, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
    return 2.5 * flops, lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, q, q, out, sums, 0.0, True)


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


def _bare_call(device: torch.device) -> float:
    small = torch.ones(16, device=device)
    return Stopwatch(device, 0.02)(lambda: [small.add_(1.0) for _ in range(64)]) / 64


def _bandwidth(device: torch.device, watch: Stopwatch) -> Points:
    """Bytes a second of an addition, by size; the time of the bare call is counted apart."""
    points = []
    call_s = _bare_call(device)
    for size in _BYTES[device.type]:
        a, b = torch.ones(size // 12, device=device), torch.ones(size // 12, device=device)
        out = torch.empty_like(a)
        seconds = watch(lambda a=a, b=b, out=out: torch.add(a, b, out=out))  # type: ignore[misc]
        if device.type == "cpu":  # on a GPU the call is queued while the one before still runs
            seconds = max(seconds - call_s, seconds * 0.1)
        points.append((float(size), size / seconds))
    return tuple(points)


def call_seconds(device: torch.device, watch: Stopwatch) -> float:
    """What an operation takes however small it is. On a CPU with what autograd, modules and views add to it in a block."""
    if device.type != "cpu":
        return _bare_call(device)
    block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    x = torch.ones(2, 4, 8, requires_grad=True)

    def run() -> None:
        block(x).sum().backward()

    with _Counted() as counted:
        run()
    return watch(run) / counted.calls


class _Counted(TorchDispatchMode):
    """How many operations run that a trace would count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not is_free(func)
        return func(*args, **(kwargs or {}))


def optimizer_rates(watch: Stopwatch) -> tuple[Points, dict[str, float]]:
    """Elements a second of AdamW's fused step, by the size of a tensor, and the seconds that a step and each tensor take however small."""

    def seconds(tensors: int, elements: int) -> float:
        params = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(tensors)]
        optimizer = torch.optim.AdamW(params, fused=True)
        for p in params:
            p.grad = torch.ones(elements)
        return watch(optimizer.step)

    few, many = seconds(8, 16), seconds(72, 16)
    each = max((many - few) / 64, 0.0)
    step = max(few - 8 * each, 0.0)
    points = tuple((float(size), 8 * size / max(seconds(8, size) - few, 8e-12 * size)) for size in (2**14, 2**18))
    return points, {"optimizer": step, "tensor": each}


def recompute_seconds(watch: Stopwatch) -> dict[str, float]:
    """What computing again adds to each operation of a forward, beyond the operation: torch packs, unpacks and, to keep some, looks at each."""
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(16)))
    x = torch.ones(8, 8, requires_grad=True)

    def policy(_: Any, func: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_dear(func) else CheckpointPolicy.PREFER_RECOMPUTE

    def run(**how: Any) -> None:
        checkpoint(layers, x, use_reentrant=False, **how).sum().backward()

    plain, forward = watch(lambda: layers(x).sum().backward()), watch(lambda: layers(x))
    full, some = watch(run), watch(lambda: run(context_fn=partial(create_selective_checkpoint_contexts, policy)))
    operations = 2 * 16
    return {"full": max((full - plain - forward) / operations, 0.0), "selective": max((some - plain - forward / 2) / operations, 0.0)}


def hook_seconds(watch: Stopwatch) -> float:
    """What it adds to a parameter's gradient that somebody is told of it and has a place for it."""
    params, flat = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(32)], torch.zeros(32 * 64)

    def run() -> None:
        torch.stack([p.sum() for p in params]).sum().backward()

    def arrived(param: torch.Tensor) -> None:
        if param.grad is not None and param.grad.data_ptr() != flat[64:128].view_as(param).data_ptr():
            arrivals.discard(id(param))

    arrivals: set[int] = set()
    plain = watch(run)
    for p in params:
        p.register_post_accumulate_grad_hook(arrived)
    return max((watch(run) - plain) / len(params), 0.0)


def _crowding(comm: Comm, watch: Stopwatch) -> float:
    """Ranks for each core, by what the clock on the wall says of work that had its own clock, while all ranks are at work."""
    if watch.clock is time.perf_counter:
        return 1.0
    a = torch.randn(128, 128)
    found = []
    for _ in range(3):
        comm.barrier()
        begun, worked = time.perf_counter(), time.thread_time()
        while time.perf_counter() - begun < _CROWD_S:
            torch.mm(a, a)
        found.append((time.perf_counter() - begun) / (time.thread_time() - worked))
    return max(statistics.median(found), 1.0)


def meeting_seconds(comm: Comm, pair: Comm | None, device: torch.device, backend: str, kind: str) -> dict[str, Points]:
    """Every operation among all ranks by what a rank must send; among the two of each pair, and messages between them, while all pairs are at it."""
    found = {f"{backend}/{op}": points for op, points in _collectives(comm, device, kind).items()}
    if pair is not None and pair.size == 2:
        if comm.size > 2:
            found |= {f"{backend}/{op}/2": points for op, points in _collectives(pair, device, kind).items()}
        found[f"{backend}/send"] = _messages(pair, device, kind)
    return found


def _collectives(comm: Comm, device: torch.device, kind: str) -> dict[str, Points]:
    found = {}
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        points = []
        for size in _MESSAGES[kind]:
            whole = torch.ones(size // 4 // comm.size * comm.size, device=device)
            part = torch.ones(whole.numel() // comm.size, device=device)
            call = partial(_collective, comm, op, whole, part)
            points.append((size * wire_factor(op, comm.size), _between_work(call, device)))
        found[op] = tuple(points)
    return found


def _between_work(call: Callable[[], Pending], device: torch.device) -> float:
    """Seconds of a call that ranks come to from some work, as in a step: the mean, with what they wait for each other. The same number of calls
    on every rank, or they would wait for each other for ever."""
    a = torch.randn(64, 64, device=device)
    total = 0.0
    for number in range(_CALLS + 2):
        begun = time.thread_time()
        while device.type == "cpu" and time.thread_time() - begun < _WORK_S:
            torch.mm(a, a)
        begun = time.perf_counter()
        call().wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        total += time.perf_counter() - begun if number > 1 else 0.0
    return total / _CALLS


def _messages(pair: Comm, device: torch.device, kind: str) -> Points:
    """There and back: half of it is a message."""
    points = []
    for size in _MESSAGES[kind]:
        message = [(1 - pair.rank, torch.ones(size // 4, device=device))]

        def there_and_back(message: Messages = message) -> Pending:
            sends = pair.rank == 0
            pair.exchange(message if sends else [], [] if sends else message, "probe").wait()
            return pair.exchange([] if sends else message, message if sends else [], "probe")

        points.append((float(size), _between_work(there_and_back, device) / 2))
    return tuple(points)


def _collective(comm: Comm, op: str, whole: torch.Tensor, part: torch.Tensor) -> Pending:
    if op == "all_reduce":
        return comm.all_reduce(whole, "probe")
    if op == "all_to_all":
        rows = [part.numel()] * comm.size
        return comm.all_to_all(torch.empty_like(whole), whole, "probe", rows, rows)
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


def _overlap(comm: Comm, device: torch.device, kind: str) -> float:
    """Run a collective beside arithmetic of about the same length: how much of it disappears?"""
    whole = torch.ones(2**20 if kind == "cpu" else 2**26, device=device)
    n = 256 if device.type == "cpu" else 2048
    a = torch.randn(n, n, device=device)
    watch = Stopwatch(device, 0.0)  # by the wall: ranks that share a core hide nothing

    def times(work: Callable[[], object]) -> float:
        comm.barrier()
        return statistics.fmean(watch._once(work) for _ in range(7))

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
