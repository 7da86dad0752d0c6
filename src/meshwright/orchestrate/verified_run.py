"""Verifies a run that is planned and not launched yet, on ranks of its own: a rank that fails ends them all, and training's ranks start afresh."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data
from meshwright.core.verification import Verification
from meshwright.describe.fake_tensors import cached_fake_model
from meshwright.execute.verify_cache import fingerprint, load_verification, save_verification
from meshwright.launch import RankFailure, WorkerPool
from meshwright.orchestrate.orchestrator import Orchestrator
from meshwright.orchestrate.plan_verification import add_lines, choose_verified
from meshwright.orchestrate.run_inputs import PreparedRun


def verify_run(orchestrator: Orchestrator, prepared: PreparedRun) -> PreparedRun:
    """The run with the first of its plans that computes what one device does. A given plan, or a mesh that leaves no other, is refused if it is
    wrong."""
    if not prepared.config.verify or prepared.plan.world == 1 or not prepared.estimate.fits:
        return prepared
    chosen, lines = choose_verified(prepared.alternatives, lambda plan: verify_plan(orchestrator, prepared, plan), orchestrator.log_progress)
    orchestrator.phases.mark("verify")
    return with_verified_plan(prepared, chosen, lines)


def with_verified_plan(prepared: PreparedRun, chosen: Plan, lines: list[str]) -> PreparedRun:
    """The run with the plan that was chosen, and what verification found at the beginning of its reasons."""
    why = add_lines(lines, prepared.why)
    if prepared.ranking is None:
        return replace(prepared, why=why)
    scored = next(s for s in prepared.ranking.scored if s.plan == chosen)
    return replace(prepared, plan=scored.plan, estimate=scored.estimate, why=why)


def verify_plan(orchestrator: Orchestrator, prepared: PreparedRun, plan: Plan, *, again: bool = False) -> Verification:
    """Verify one plan, unless it was verified before; `again` verifies it in any case."""
    if plan.world == 1:
        return Verification("equal")
    task, config = prepared.task, prepared.config
    inputs = f"{task.fields} {config.data or task.data}"
    key = fingerprint(plan, cached_fake_model(task)[0], config.optimizer, inputs, task.loss)
    if not again and (known := load_verification(orchestrator.environ, key)) is not None:
        return known
    orchestrator.log_progress(f"verifying {plan.strategy}")
    target, kwargs = "meshwright.orchestrate.rank_entrypoints:verify_rank", {"job": config.model_dump(mode="json"), "plan": to_data(plan)}
    try:
        with tempfile.TemporaryDirectory() as logs:
            with WorkerPool(orchestrator.fork_server(plan.threads or None), plan.world, logs=Path(logs)) as workers:
                found: Verification = workers.call(target, kwargs)[0]
    except RankFailure as failure:
        return Verification("failed", f"under it {failure}")
    save_verification(orchestrator.environ, key, found)
    return found
