"""Takes the first plan that verification lets train, of plans in the order in which the planner prefers them, and says what was found."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_seconds
from meshwright.core.sample_coupling import describe_inexactness
from meshwright.core.task import Batch, Loss
from meshwright.core.verification import Verification
from meshwright.execute.birth import Birth
from meshwright.execute.verify import verify
from meshwright.execute.verify_cache import describe_inputs, fingerprint, load_verification, save_verification
from meshwright.execute.verify_reference import first_line, preserve_random_state

Check = Callable[[Plan], Verification]


def choose_verified(plans: Sequence[Plan], check: Check, log: Callable[[str], None]) -> tuple[Plan, list[str]]:
    """The first plan that is not wrong, and lines that say what was found; `log` receives them too. RequestError if all are wrong."""
    lines: list[str] = []
    failed: list[tuple[Plan, Verification]] = []

    def say(line: str) -> None:
        lines.append(line)
        log(line)

    for plan in plans:
        found = check(plan)
        if not found.may_train:
            failed.append((plan, found))
            continue
        for other, why in failed:
            say(f"{other.strategy} was not used: {why.reason}; using {plan.strategy} instead")
        if line := describe_verification(plan, found):
            say(line)
        return plan, lines
    wrong = next(((plan, found) for plan, found in failed if found.verdict == "wrong"), None)
    if wrong is None:  # every plan failed with an error: training reports it with all that is known of it
        say(f"not verified: {failed[0][0].strategy}: {failed[0][1].reason}")
        return failed[0][0], lines
    raise RequestError(f"{wrong[0].strategy} is wrong for this model: {wrong[1].reason}: use another mesh; --set verify=off trains all the same")


def add_lines(lines: Sequence[str], why: str) -> str:
    """The reasons for a plan, with what verification found before them, as sentences."""
    return "\n".join([*(f"{line[0].upper()}{line[1:]}." for line in lines), why])


def describe_verification(plan: Plan, found: Verification) -> str:
    """One line about a plan that will train; "" where nothing needs to be said."""
    if found.verdict == "inexact":  # what the dataflow shows is said with the plan, and says what to set
        return "" if describe_inexactness(plan) else f"{plan.strategy} is not exact for this model: {found.reason}"
    if found.verdict == "not verified":
        return f"not verified: {found.reason}"
    left_out = found.describe_left_out()
    if (found.is_cached and not left_out) or plan.world == 1:
        return ""
    how = f"computes what one device does, in {found.samples} samples{f' ({left_out})' * bool(left_out)}"
    return f"verified {'before' if found.is_cached else f'in {show_seconds(found.seconds)}'}: {plan.strategy} {how}"


def make_collective_check(
    model: nn.Module, optimizer: torch.optim.Optimizer, get_batch: Callable[[], Batch], loss_fn: Loss, seed: int,
    environ: Mapping[str, str] = os.environ, *, birth: Birth | None = None, device: torch.device | None = None,
) -> Check:  # fmt: skip
    """A check that all ranks call together, before a plan is applied. Only rank 0 calls `get_batch`, and only it reads and writes the cache. `birth`
    and `device` are for a model without values."""

    def check(plan: Plan) -> Verification:
        if plan.world == 1:
            return Verification("equal")
        batch, key = None, ""
        message: list[Verification | None] = [None]
        if dist.get_rank() == 0:
            try:
                with preserve_random_state():
                    batch = get_batch()
                key = fingerprint(plan, model, type(optimizer), describe_inputs(batch), loss_fn)
                message = [load_verification(environ, key)]
            except Exception as error:  # the other ranks wait for this one
                message = [Verification("not verified", f"no batch could be taken from the loader ({type(error).__name__}: {first_line(error)})")]
        dist.broadcast_object_list(message, src=0)
        if message[0] is not None:
            return message[0]
        found = verify(plan, model, optimizer, batch, loss_fn, seed=seed, birth=birth, device=device)
        if key:
            save_verification(environ, key, found)
        return found

    return check
