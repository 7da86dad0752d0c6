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
    if mesh.cp > 1 and not plan.spatial.grid:
        _check_context(plan)
    if mesh.ep > 1:
        _check_expert(plan)
    if plan.tensor.is_sequence_parallel:
        _check_sequence(plan)
    if mesh.pp > 1:
        _check_pipeline(plan)
    if plan.spatial.grid:
        _check_spatial(plan)


def _check_pipeline(plan: Plan) -> None:
    """Check the numbers of stages and micro-batches that a schedule accepts, and what it is incompatible with."""
    pp, count, micro = plan.mesh.pp, len(plan.stages), plan.micro_batches
    schedule, traits = plan.schedule, schedule_traits(plan.schedule)
    if plan.compile == "model":
        raise RequestError("plan: compile=model does not go with pp: use compile=blocks")
    if count and count % pp:
        raise RequestError(f"plan: {count} stages do not divide over pp={pp}: use {max(count // pp, 1) * pp} stages")
    each = count // pp if count else traits.stages_per_rank
    if each != traits.stages_per_rank and not traits.any_stages_per_rank:
        own = traits.stages_per_rank
        has, better = ("one stage", "use interleaved") if own == 1 else (f"{own} stages", f"give {own * pp}")
        raise RequestError(f"plan: schedule={schedule} has {has} a rank, and {count} stages are given for pp={pp}: {better}")
    if (accepted := traits.accepted_micro_batches(pp, micro)) != micro:
        raise RequestError(f"plan: schedule={schedule} takes micro-batches in rounds of pp={pp}: set micro_batches={accepted}")
    if traits.fills_ranks and micro < pp:
        raise RequestError(f"plan: schedule={schedule} needs at least pp={pp} micro-batches, {micro} given: set micro_batches={pp}")
    for share in plan.balance.shares:
        if share % micro:
            raise RequestError(f"plan: a pipeline's micro-batches are of one size, and a share of {share} does not make {micro}: give multiples")
    if plan.memory.zero == 2 and traits.stages_per_rank > 1:
        raise RequestError(f"plan: zero=2 reduces after each backward of all that a rank holds, and schedule={schedule} has two: use 1f1b or zero=1")
    if plan.memory.zero == 2 and any(stage.tied_parameters for stage in plan.stages):
        raise RequestError("plan: zero=2 with pp cannot share a parameter between stages (a tied embedding): use zero=1 or zero=3")
    if plan.memory.zero == 3 and traits.splits_backward:
        raise RequestError(f"plan: schedule={schedule} cuts backward in two, and zero=3 reduces in the middle of it: use interleaved or zero=1")


def _check_context(plan: Plan) -> None:
    if plan.compile != "none":
        raise RequestError(f"plan: compile={plan.compile} does not go with cp, which works on the model's own calls: use compile=none")


def _check_sequence(plan: Plan) -> None:
    """Sequence parallelism needs positions that no other axis shards."""
    for axis in ("cp", "ep"):
        if plan.mesh.degree(axis) > 1:
            raise RequestError(f"plan: sequence=true does not go with {axis} yet (mesh {plan.mesh}): set sequence=false")


def _check_spatial(plan: Plan) -> None:
    mesh, ways = plan.mesh, plan.spatial.num_parts
    if ways != mesh.cp:
        raise RequestError(f"plan: spatial.grid {show_grid(plan.spatial.grid)} has {ways} ranks and mesh {mesh} has cp={mesh.cp}: plan again")
    for axis in ("pp", "tp"):
        if mesh.degree(axis) > 1:
            raise RequestError(f"plan: blocks of positions do not go with {axis} yet (mesh {mesh}): use dp or shard beside cp={ways}")
    if plan.compile == "model":
        raise RequestError("plan: compile=model does not go with cp: ranks exchange halos inside the model; use compile=blocks")


def _check_expert(plan: Plan) -> None:
    """Check what expert-parallel experts and embedding tables are incompatible with."""
    ep, owners = plan.mesh.ep, plan.expert
    if plan.mesh.pp > 1 and owners.tables:
        raise RequestError(f"plan: mesh {plan.mesh}: a pipeline stage cannot look up rows on other ep ranks yet: use --mesh ep={ep} with dp")
    if plan.memory.zero == 3 and owners.tables:
        raise RequestError(f"plan: zero=3 would gather tables that others own, in mesh {plan.mesh}: use zero=1 or zero=2")
    if plan.compile == "model":
        raise RequestError("plan: compile=model does not go with ep, whose exchanges no one graph can hold: use compile=blocks")
    if any(len(m.experts_per_rank) != ep for m in owners.moe_layers) or not all(0 <= t.ep_rank < ep for t in owners.tables):
        raise RequestError(f"plan: expert is made for another number of ranks than ep={ep}: leave expert out and it is chosen again")
    if owners.tables and plan.mesh.degree("tp") > 1:
        raise RequestError(f"plan: mesh {plan.mesh}: table parallelism does not go with tensor parallelism yet: use --mesh ep={ep} with dp")
    around = [u for u in plan.memory.units for t in owners.tables if t.module.startswith(f"{u}.")]
    if plan.memory.recompute == "full" and around:
        raise RequestError(f"plan: recompute=full would look tables up again in the backward of {around[0]}: set recompute=none")
