"""Checks that a plan runs when it is created; each error gives the reason and what to change. Incompatible features: plan_compatibility.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.core.compression_policy import check_compression
from meshwright.core.errors import RequestError
from meshwright.core.plan_compatibility import check_compatibility
from meshwright.core.rank_devices import check_rank_devices
from meshwright.core.recompute_policy import check_recompute, check_recompute_modes
from meshwright.core.routes import check_routes
from meshwright.core.serve_policy import check_serve
from meshwright.core.shares import check_state_fractions

if TYPE_CHECKING:
    from meshwright.core.plan import Plan

VERSION = 2  # of the format of plan.json; version 1 is read too (format_version_1.py)
MAX_MICRO_BATCHES = 10**6
MAX_TIMEOUT_S = 1e9  # about thirty years
_MAX_THREADS = 2**16
OFFLOADS = ("none", "optimizer")


def check_plan(plan: Plan) -> None:
    mesh, zero = plan.mesh, plan.memory.zero
    if not 1 <= plan.version <= VERSION:
        raise RequestError(f"plan version {plan.version} is newer than this Meshwright, which reads up to version {VERSION}: upgrade it")
    if not 1 <= plan.micro_batches <= MAX_MICRO_BATCHES:
        raise RequestError(f"plan: micro_batches={plan.micro_batches} must be from 1 to {MAX_MICRO_BATCHES:,}")
    if zero and mesh.shard == 1 and mesh.size > 1:
        raise RequestError(f"plan: zero={zero} shards over the shard axis, and mesh {mesh} has none: use --mesh shard={mesh.size}")
    if not zero and mesh.shard > 1:
        raise RequestError(f"plan: mesh {mesh} has a shard axis but zero=0: set zero=1, 2 or 3, or use --mesh dp={mesh.data_parallel_size}")
    _check_memory(plan)
    if plan.device_order and len(plan.device_order) != plan.world:
        raise RequestError(f"plan: device_order has {len(plan.device_order)} entries for mesh {mesh} of {plan.world} ranks: give {plan.world}")
    if not 0 <= plan.threads <= _MAX_THREADS:
        raise RequestError(f"plan: threads={plan.threads} must be 0 (the environment's setting) to {_MAX_THREADS:,}")
    _check_sync(plan)
    check_serve(plan.serve)
    check_compatibility(plan)
    check_state_fractions(plan.balance.state_fractions, mesh, zero)
    if plan.balance.shares:
        _check_shares(plan)
    else:
        _check_batch(plan)


def _check_memory(plan: Plan) -> None:
    memory, mesh = plan.memory, plan.mesh
    if memory.zero not in (0, 1, 2, 3):
        raise RequestError(f"plan: memory.zero={memory.zero} must be 0, 1, 2 or 3")
    check_recompute_modes(memory.recompute, memory.layers, memory.units)
    check_recompute(memory.recompute_modes.values(), mesh.degree("tp"), plan.compile, plan.schedule if mesh.pp > 1 else "")
    if "selective" in memory.recompute_modes.values() and plan.spatial.grid:
        raise RequestError(f"plan: recompute=selective would repeat the halo exchanges over cp in mesh {mesh}: set recompute=full or none")
    if memory.precision == "fp8" and plan.device == "cpu":
        raise RequestError("plan: precision=fp8 needs a GPU of compute capability 8.9 or newer, and this plan is for CPUs: use bf16")
    if memory.offload not in OFFLOADS:
        raise RequestError(f"plan: memory.offload={memory.offload} must be {' or '.join(OFFLOADS)}")


def _check_sync(plan: Plan) -> None:
    sync, precision = plan.sync, plan.memory.precision
    if min(sync.bucket_bytes, sync.first_bucket_bytes) < 1:
        raise RequestError(f"plan: sync.bucket_bytes={sync.bucket_bytes} must be positive")
    if not 0 < sync.timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(f"plan: sync.timeout_s={sync.timeout_s} must be a positive number of seconds, at most {MAX_TIMEOUT_S:.0e}")
    check_routes(sync.routes, plan.backend, sync.ranks_per_node, plan.world)
    check_compression(sync.compression, sync.compression_rank, plan.mesh, plan.memory.zero, precision)
    if plan.rank_devices and sync.routes:
        raise RequestError("plan: sync.routes are for ranks on devices of one kind, and rank_devices lists several: leave sync.routes out")
    if plan.rank_devices:
        check_rank_devices(plan.rank_devices, plan.mesh, plan.backend, precision)


def _check_shares(plan: Plan) -> None:
    shares, width = plan.balance.shares, plan.mesh.data_parallel_size
    if len(shares) != width:
        raise RequestError(f"plan: balance.shares has {len(shares)} entries for {width} data ranks: give {width}")
    if sum(shares) != plan.global_batch:
        raise RequestError(f"plan: balance.shares sum to {sum(shares)}, not to global_batch={plan.global_batch}: change one of them")
    if min(shares) < 1:
        raise RequestError(f"plan: a share of {min(shares)} samples is empty: give every data rank at least one")
    if (least := min(shares)) < plan.micro_batches:
        raise RequestError(f"plan: a share of {least} samples cannot make {plan.micro_batches} micro-batches: set micro_batches={least}")


def _check_batch(plan: Plan) -> None:
    batch, width = plan.global_batch, plan.mesh.data_parallel_size
    step = width * plan.micro_batches
    if batch < 1 or batch % step:
        valid = dict.fromkeys((max(batch // step, 1) * step, (max(batch, 0) // step + 1) * step))
        parts = f"{width} data ranks × {plan.micro_batches} micro-batches = {step}"
        raise RequestError(f"global batch {batch} does not divide into {parts}: change --global-batch to {' or '.join(map(str, valid))}")
