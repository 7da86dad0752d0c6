"""Checks for incompatible features of a plan; each error gives the reason and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import schedule_traits
from meshwright.core.spatial_policy import show_grid

if TYPE_CHECKING:
    from meshwright.core.plan import Plan


def check_compatibility(plan: Plan) -> None:
    mesh = plan.mesh
    if mesh.cp > 1 and not plan.spatial.grid and plan.compile != "none":
        raise RequestError(f"plan: compile={plan.compile} does not go with cp, which rewrites calls in the model's code: use compile=none")
    if mesh.ep > 1:
        _check_expert(plan)
    if plan.tensor.is_sequence_parallel:
        _check_sequence(plan)
    if mesh.pp > 1:
        _check_pipeline(plan)
    if plan.spatial.grid:
        _check_spatial(plan)
    if plan.batch_norm == "sync":
        _check_synced_norms(plan)


def _check_pipeline(plan: Plan) -> None:
    """Check the numbers of stages and micro-batches that a schedule accepts, and what it is incompatible with."""
    pp, count, micro = plan.mesh.pp, len(plan.stages), plan.micro_batches
    schedule, traits = plan.schedule, schedule_traits(plan.schedule)
    if plan.compile == "model":
        raise RequestError("plan: compile=model does not go with pp: use compile=blocks")
    if count and count % pp:
        raise RequestError(f"plan: {count} stages do not divide over pp={pp}: use {max(count // pp, 1) * pp} stages")
    per_rank = traits.stages_per_rank
    if count not in (0, per_rank * pp) and not traits.any_stages_per_rank:
        has, advice = ("one stage", "use interleaved") if per_rank == 1 else (f"{per_rank} stages", f"give {per_rank * pp}")
        raise RequestError(f"plan: schedule={schedule} has {has} a rank, and {count} stages are given for pp={pp}: {advice}")
    if (accepted := traits.accepted_micro_batches(pp, micro)) != micro:
        raise RequestError(f"plan: schedule={schedule} takes micro-batches in rounds of pp={pp}: set micro_batches={accepted}")
    if traits.fills_ranks and micro < pp and not plan.serve:
        raise RequestError(f"plan: schedule={schedule} needs at least pp={pp} micro-batches, {micro} given: set micro_batches={pp}")
    for share in plan.balance.shares:
        if share % micro:
            raise RequestError(f"plan: a pipeline's micro-batches are of one size, and a share of {share} does not divide by {micro}: give multiples")
    if plan.memory.zero == 2 and per_rank > 1:
        raise RequestError(f"plan: zero=2 needs one backward per micro-batch and rank, and schedule={schedule} has several: use 1f1b or zero=1")
    if plan.memory.zero == 2 and any(stage.tied_parameters for stage in plan.stages):
        raise RequestError("plan: zero=2 with pp cannot share a parameter between stages (a tied embedding): use zero=1 or zero=3")
    if plan.memory.zero == 3 and traits.splits_backward:
        raise RequestError(f"plan: schedule={schedule} defers weight gradients, and zero=3 reduces them during backward: use interleaved or zero=1")


def _check_sequence(plan: Plan) -> None:
    """Sequence parallelism needs positions that no other axis shards."""
    for axis in ("cp", "ep"):
        if plan.mesh.degree(axis) > 1:
            raise RequestError(f"plan: sequence=true does not go with {axis} yet (mesh {plan.mesh}): set sequence=false")


def _check_spatial(plan: Plan) -> None:
    mesh, size = plan.mesh, plan.spatial.num_parts
    if size != mesh.cp:
        raise RequestError(f"plan: spatial.grid {show_grid(plan.spatial.grid)} has {size} ranks and mesh {mesh} has cp={mesh.cp}: plan again")
    for axis in ("pp", "tp"):
        if mesh.degree(axis) > 1:
            raise RequestError(f"plan: spatial parallelism does not go with {axis} yet (mesh {mesh}): use dp or shard beside cp={size}")
    if plan.compile == "model":
        raise RequestError("plan: compile=model does not go with cp: ranks exchange halos inside the model; use compile=blocks")


def _check_synced_norms(plan: Plan) -> None:
    """Statistics of a whole batch need all of its samples in one forward pass."""
    if plan.micro_batches > 1:
        parts = f"it has {plan.micro_batches} micro-batches, one after another"
        raise RequestError(f"plan: batchnorm=sync normalises a whole batch at once, and {parts}: set micro_batches=1, or batchnorm=local")
    if plan.spatial.grid and plan.mesh.data_parallel_size > 1:
        raise RequestError(f"plan: batchnorm=sync does not go with spatial parallelism beside data ranks yet (mesh {plan.mesh}): use dp or cp alone")


def _check_expert(plan: Plan) -> None:
    """Check what expert-parallel experts and embedding tables are incompatible with."""
    ep, tables = plan.mesh.ep, plan.expert.tables
    if plan.mesh.pp > 1 and tables:
        raise RequestError(f"plan: mesh {plan.mesh}: a pipeline stage cannot look up rows on other ep ranks yet: use --mesh ep={ep} with dp")
    if plan.memory.zero == 3 and tables:
        raise RequestError(f"plan: zero=3 does not go with table parallelism (mesh {plan.mesh}): use zero=1 or zero=2")
    if plan.compile == "model":
        raise RequestError("plan: compile=model does not go with ep, whose all-to-alls cannot be in a graph: use compile=blocks")
    if any(len(m.experts_per_rank) != ep for m in plan.expert.moe_layers) or not all(0 <= t.ep_rank < ep for t in tables):
        raise RequestError(f"plan: expert is for another number of ranks than ep={ep}: leave expert out and it is chosen again")
    if tables and plan.mesh.degree("tp") > 1:
        raise RequestError(f"plan: mesh {plan.mesh}: table parallelism does not go with tensor parallelism yet: use --mesh ep={ep} with dp")
    units = [unit for unit in plan.memory.units for t in tables if t.module.startswith(f"{unit}.")]
    if plan.memory.recompute == "full" and units:
        raise RequestError(f"plan: recompute=full would repeat the table lookups in the backward of {units[0]}: set recompute=none")
