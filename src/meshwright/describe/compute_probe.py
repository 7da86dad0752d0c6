"""Measures one rank's compute while all ranks do the same: rates by kind, size and precision, memory bandwidth, and overheads per call."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.core.calibration import SizeCurve
from meshwright.core.cluster import FP8_MIN_CAPABILITY
from meshwright.describe.op_classification import is_compute_intensive, is_zero_cost
from meshwright.describe.stopwatch import Stopwatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MATMUL_SIZES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
_MEMORY_SIZES = {"cpu": (2**14, 2**17, 2**20, 2**23, 2**26), "cuda": (2**16, 2**20, 2**24, 2**28, 2**30)}
_ATTENTION_LENGTHS = {"cpu": (64, 256, 512), "cuda": (256, 1024, 4096)}
_ELEMENTWISE_SIZES = {"cpu": (2**14, 2**20), "cuda": (2**16, 2**20, 2**26)}
_CONV_SAMPLES = (2, 6)  # sample counts of a convolution: their difference separates the cost per call from the cost per sample
_LONG_CALL_S = 0.03  # a longer call is a sufficient measurement; larger sizes are skipped


def compute_rates(device: torch.device, stopwatch: Stopwatch) -> dict[str, SizeCurve]:
    kind = device.type
    rates: dict[str, SizeCurve] = {}
    for precision, dtype in DTYPES.items():
        if precision == "fp16" and kind == "cpu":
            continue
        rates[f"matmul/{precision}"] = _rate_curve(_MATMUL_SIZES[kind], stopwatch, partial(_matmul, device=device, dtype=dtype))
    if kind == "cuda" and torch.cuda.get_device_capability(device) >= FP8_MIN_CAPABILITY:
        rates["matmul/fp8"] = _rate_curve(_MATMUL_SIZES["cuda"], stopwatch, partial(_matmul_fp8, device=device))
    low = "bf16" if kind == "cuda" else "fp32"
    rates["conv/fp32"] = _rate_curve((8, 32, 64), stopwatch, partial(_conv, device=device))
    attention = partial(_attention, device=device, dtype=DTYPES[low])
    rates[f"attention/{low}"] = _rate_curve(_ATTENTION_LENGTHS[kind], stopwatch, partial(attention, backward=False))
    if kind == "cpu":
        rates[f"attention-backward/{low}"] = _rate_curve(_ATTENTION_LENGTHS["cpu"], stopwatch, partial(attention, backward=True))
        rates["batched/fp32"] = batched_matmul_rates(stopwatch)
    for phase in ("forward", "backward"):
        gelu = partial(_gelu, device=device, backward=phase == "backward")
        rates[f"special-{phase}/fp32"] = _rate_curve(_ELEMENTWISE_SIZES[kind], stopwatch, gelu)
    return rates


def _rate_curve(sizes: tuple[int, ...], stopwatch: Stopwatch, make: Callable[[int], tuple[float, Callable[[], object]]]) -> SizeCurve:
    points = []
    for size in sizes:
        flops, work = make(size)
        seconds = stopwatch(work)
        points.append((flops, flops / seconds))
        if seconds > _LONG_CALL_S:
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


def batched_matmul_rates(stopwatch: Stopwatch) -> SizeCurve:
    """FLOP/s of batched small matmuls on a CPU, by FLOPs per byte read and written: the shape of one matmul decides, not their number."""
    points = []
    for n in (4, 8, 16, 32, 64):
        x = torch.randn(64, n, n)
        points.append((n / 6, 2.0 * 64 * n**3 / stopwatch(partial(torch.bmm, x, x))))
    return tuple(points)


def convolution_rates(stopwatch: Stopwatch) -> tuple[dict[str, SizeCurve], dict[str, float]]:
    """2-d and 3-d convolutions on a CPU: FLOP/s by output channels, which decide more than input channels, and the seconds per call independent of
    the number of samples. A single sample takes another code path, which is often faster; weight gradients alone, as in a first layer, take more
    than half as long as the full backward. Shapes are as in networks: few channels come with many positions."""
    rates: dict[str, list[tuple[float, float]]] = {}
    fixed: dict[str, list[float]] = {}
    for dims, finest in ((2, 32), (3, 16)):
        for c_out, c_in, edge in ((4, 4, finest), (8, 4, finest), (16, 4, finest), (32, 16, finest // 2), (64, 32, finest // 4)):
            flops = 2.0 * edge**dims * c_in * c_out * 3**dims
            make = partial(_convolution, in_channels=c_in, out_channels=c_out, spatial_sizes=[edge] * dims)
            for phase, passes in (("forward", 1), ("backward", 2), ("weights", 1)):
                low_s, high_s = (stopwatch(make(samples, phase=phase)) for samples in _CONV_SAMPLES)
                sample_s = max(high_s - low_s, 0.1 * high_s) / (_CONV_SAMPLES[1] - _CONV_SAMPLES[0])
                rates.setdefault(f"conv{dims}-{phase}-channels/fp32", []).append((c_out, passes * flops / sample_s))
                fixed.setdefault(f"conv{dims}-{phase}", []).append(max(low_s - _CONV_SAMPLES[0] * sample_s, 0.0))
                single_s = stopwatch(make(1, phase=phase))
                rates.setdefault(f"conv{dims}-{phase}-channels-alone/fp32", []).append((c_out, passes * flops / single_s))
    return {key: tuple(points) for key, points in rates.items()}, {key: statistics.median(seconds) for key, seconds in fixed.items()}


def _convolution(samples: int, in_channels: int, out_channels: int, spatial_sizes: list[int], phase: str) -> Callable[[], object]:
    dims = len(spatial_sizes)
    x, out = (torch.randn(samples, channels, *spatial_sizes) for channels in (in_channels, out_channels))
    w = torch.randn(out_channels, in_channels, *[3] * dims)
    stride = padding = dilation = [1] * dims
    options: Any = (stride, padding, dilation, False, [0] * dims, 1)
    if phase == "forward":
        return partial(torch.ops.aten.convolution, x, w, None, *options)
    return partial(torch.ops.aten.convolution_backward, out, x, w, [out_channels], *options, [phase == "backward", True, True])


def _attention(length: int, device: torch.device, dtype: torch.dtype, backward: bool) -> tuple[float, Callable[[], object]]:
    q = torch.randn(4, 4, length, 64, device=device, dtype=dtype)
    flops = 2.0 * 16 * length * length * 64  # 4 per pair of positions and feature, for half of the pairs
    if not backward:
        return flops, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
    return 2.5 * flops, lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, q, q, out, sums, 0.0, True)


def _gelu(elements: int, device: torch.device, backward: bool) -> tuple[float, Callable[[], object]]:
    x = torch.randn(elements, device=device)
    run = partial(torch.ops.aten.gelu_backward, x, x) if backward else partial(F.gelu, x)
    return float(elements), partial(run, approximate="tanh")


def _bare_call_seconds(device: torch.device) -> float:
    small = torch.ones(16, device=device)
    return Stopwatch(device, 0.08)(lambda: [small.add_(1.0) for _ in range(64)]) / 64


def memory_bandwidth(device: torch.device, stopwatch: Stopwatch) -> SizeCurve:
    """Bytes per second of an addition, by size; the call overhead is measured separately."""
    points = []
    call_s = _bare_call_seconds(device)
    for size in _MEMORY_SIZES[device.type]:
        a, b = torch.ones(size // 12, device=device), torch.ones(size // 12, device=device)
        out = torch.empty_like(a)
        seconds = stopwatch(lambda a=a, b=b, out=out: torch.add(a, b, out=out))  # type: ignore[misc]
        if device.type == "cpu":  # on a GPU the call is queued while the previous one runs
            seconds = max(seconds - call_s, seconds * 0.1)
        points.append((float(size), size / seconds))
    return tuple(points)


def op_overhead_seconds(device: torch.device, stopwatch: Stopwatch) -> float:
    """Minimum seconds per operation. On a CPU including what autograd, modules and views add to it in a block."""
    if device.type != "cpu":
        return _bare_call_seconds(device)
    block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    x = torch.ones(2, 4, 8, requires_grad=True)

    def run() -> None:
        block(x).sum().backward()

    with _OpCounter() as counted:
        run()
    return stopwatch(run) / counted.calls


class _OpCounter(TorchDispatchMode):
    """Counts the operations that a trace would count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not is_zero_cost(func)
        return func(*args, **(kwargs or {}))


def optimizer_rates(stopwatch: Stopwatch) -> tuple[SizeCurve, dict[str, float]]:
    """Elements per second of AdamW's fused step, by tensor size, and the fixed seconds per step and per tensor."""

    def seconds(tensors: int, elements: int) -> float:
        params = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(tensors)]
        optimizer = torch.optim.AdamW(params, fused=True)
        for p in params:
            p.grad = torch.ones(elements)
        return stopwatch(optimizer.step)

    few, many = seconds(8, 16), seconds(72, 16)
    tensor_s = max((many - few) / 64, 0.0)
    step_s = max(few - 8 * tensor_s, 0.0)
    points = tuple((float(size), 8 * size / max(seconds(8, size) - few, 8e-12 * size)) for size in (2**14, 2**18))
    return points, {"optimizer": step_s, "tensor": tensor_s}


def recompute_seconds(stopwatch: Stopwatch) -> dict[str, float]:
    """Overhead of recomputation per forward operation, beyond the operation itself: torch packs, unpacks and, for selective checkpointing,
    dispatches each through a policy."""
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(16)))
    x = torch.ones(8, 8, requires_grad=True)

    def policy(_: Any, func: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_compute_intensive(func) else CheckpointPolicy.PREFER_RECOMPUTE

    def run(**options: Any) -> None:
        checkpoint(layers, x, use_reentrant=False, **options).sum().backward()

    plain, forward = stopwatch(lambda: layers(x).sum().backward()), stopwatch(lambda: layers(x))
    full, selective = stopwatch(run), stopwatch(lambda: run(context_fn=partial(create_selective_checkpoint_contexts, policy)))
    operations = 2 * 16
    return {"full": max((full - plain - forward) / operations, 0.0), "selective": max((selective - plain - forward / 2) / operations, 0.0)}


def split_backward_seconds(stopwatch: Stopwatch) -> float:
    """Overhead per module with its own parameters of computing input gradients first and weight gradients later (pipeline schedules with split
    backward): torch searches the graph for the nodes that lead to the weights, and runs them separately. Operations without parameters add next to
    nothing."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # a one-second import that only ranks need

    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(8)))
    x = torch.ones(8, 8, requires_grad=True)

    def run() -> None:
        out = layers(x)
        _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], layers.parameters())
        stage_backward_weight(layers.parameters(), groups)

    plain, split = stopwatch(lambda: layers(x).sum().backward()), stopwatch(run)
    return max((split - plain) / len(layers), 0.0)


def grad_hook_seconds(stopwatch: Stopwatch) -> float:
    """Overhead per parameter gradient of a post-accumulate hook and its bucket lookup."""
    params, flat = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(32)], torch.zeros(32 * 64)

    def run() -> None:
        torch.stack([p.sum() for p in params]).sum().backward()

    def on_grad_accumulated(param: torch.Tensor) -> None:
        if param.grad is not None and param.grad.data_ptr() != flat[64:128].view_as(param).data_ptr():
            arrivals.discard(id(param))

    arrivals: set[int] = set()
    plain = stopwatch(run)
    for p in params:
        p.register_post_accumulate_grad_hook(on_grad_accumulated)
    return max((stopwatch(run) - plain) / len(params), 0.0)
