"""Made-up models, machines and measurements for tests: small enough to compute by hand, and free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings

from meshwright.core.calibration import AlphaBetaModel, Calibration, Rates
from meshwright.core.cluster import Cluster, Device, Link, Node
from meshwright.core.mesh import Mesh
from meshwright.core.model import Kernel, LayerProfile, ModelProfile, TensorSpec
from meshwright.core.plan import MemoryPolicy, Plan

settings.register_profile("pure", deadline=None)  # the machine may be busy
settings.load_profile("pure")

Shapes = Sequence[tuple[int, ...]]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def layer(name: str, shapes: Shapes = ((8, 8),), *, flops: float = 1e6, moved: float = 1e3, saved: float = 1e3, block: str = "") -> LayerProfile:
    """A layer whose costs are for one sample; its output is a tenth of what it saves."""
    tensors = tuple(TensorSpec(f"{name}.{i}", shape) for i, shape in enumerate(shapes))
    kernels = (Kernel("matmul", "forward", flops, moved), Kernel("matmul", "backward", 2 * flops, 2 * moved))
    return LayerProfile(
        name=name,
        kind="Layer",
        parameters=sum(t.numel for t in tensors),
        flops_forward=flops,
        flops_backward=2 * flops,
        activation_bytes=saved,
        output_bytes=saved / 10,
        transient_bytes=saved / 100,
        tensors=tensors,
        kernels=kernels,
        block=block,
    )


def model(layers: Sequence[LayerProfile], *, tokens: int | None = None) -> ModelProfile:
    """Costs are proportional to the batch: the profile at one sample is its own slope."""
    return ModelProfile("made-up", tuple(layers), 1, tuple(layers), tokens_per_sample=tokens)


def blocks(count: int, shapes: Shapes = ((64, 64), (64,)), **costs: float) -> ModelProfile:
    """`count` equal blocks."""
    return model([layer(f"blocks.{i}", shapes, block="blocks.0", **costs) for i in range(count)])


def plan(profile: ModelProfile, *, batch: int = 64, dp: int = 1, shard: int = 1, zero: int = 0, micro: int = 1, recompute: str = "none") -> Plan:
    units = tuple(x.name for x in profile.layers if x.block)
    return Plan(profile.name, batch, Mesh(dp=dp, shard=shard), micro, memory=MemoryPolicy(zero, units, recompute))  # type: ignore[arg-type]


def cluster(devices: int, memory: float = 80e9, *, kind: str = "cuda", link: Link | None = None) -> Cluster:
    made = tuple(Device(kind, "made-up", i, int(memory)) for i in range(devices))  # type: ignore[arg-type]
    return Cluster("made-up", (Node("node", made, 8, int(memory) * devices, link=link or Link("link", 1e-5, 1e10)),))


def rates(ranks: int, *, flops: float = 1e12, memory: float = 1e11, network: float = 1e10, alpha: float = 1e-5, overlap: float = 0.0) -> Rates:
    lines = {f"{backend}/{op}": AlphaBetaModel(alpha, network) for backend in ("gloo", "nccl") for op in OPERATIONS}
    return Rates(ranks, 1, {"matmul/fp32": ((1.0, flops),)}, ((1.0, memory),), 0.0, lines if ranks > 1 else {}, overlap)


def card_rates(ranks: int, name: str, speed: float) -> Rates:
    """Of a card by its name; calls cost all cards the same, and hold them."""
    lines = {f"nccl/{op}": AlphaBetaModel(1e-5, 1e10) for op in ("all_reduce", "all_gather", "reduce_scatter", "send")} if ranks > 1 else {}
    return Rates(ranks, 1, {"matmul/fp32": ((1e3, speed), (1e12, speed))}, ((1e3, speed), (1e9, speed)), 1e-8, lines, device=name)


def unlike(*devices: tuple[float, int]) -> tuple[Cluster, Calibration]:
    """A node with cards of these speeds and sizes."""
    found = tuple(Device("cuda", f"card {speed:g}", i, size) for i, (speed, size) in enumerate(devices))
    known = {f"card {speed:g}": speed * 1e9 for speed, _ in devices}
    every = [("", min(known.values())), *known.items()]
    layouts = tuple(card_rates(n, name, speed) for n in (1, len(devices)) for name, speed in every)
    return Cluster("test", (Node("here", found, 8, 2**38),)), Calibration("test", "cards", "now", layouts)


def calibration(devices: int, **speeds: float) -> Calibration:
    layouts = tuple(rates(n, **speeds) for n in sorted({1, devices}))
    return Calibration("made-up", "made-up", "2026-01-01T00:00:00+00:00", layouts)
