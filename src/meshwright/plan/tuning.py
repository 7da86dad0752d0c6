"""Tuning of a chosen plan: the size of its gradient buckets and whether gradients are compressed, by the estimate of each option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.core.calibration import Rates
from meshwright.core.compression_policy import Compression
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.plan.search_space import Constraints

BUCKET_SIZES = (2**20, 4 * 2**20, 25 * 2**20, 100 * 2**20, 400 * 2**20)
Price = Callable[[Plan], Estimate]
_MIN_GAIN = 0.01  # relative: predictions are not more precise


def tune(plan: Plan, base: Estimate, constraints: Constraints, rates: Rates, price: Price) -> tuple[Plan, Estimate, tuple[str, ...]]:
    """The plan with tuned compression and bucket size, its estimate, and notes on what was chosen and why. What the user has fixed, plans without
    gradient buckets, and a backend that was not measured although others were stay as they are."""
    measured = [line for name, line in rates.collectives.items() if name in (f"{plan.backend}/all_reduce", f"{plan.backend}/reduce_scatter")]
    if plan.mesh.group_size("data") == 1 or plan.memory.zero == 3 or bool(rates.collectives) > bool(measured) or not base.fits:
        return plan, base, ()
    notes: list[str] = []
    if constraints.allow and constraints.compression is None:
        plan, base, note = _tune_compression(plan, base, constraints.allow, price)
        notes.append(note)
    if constraints.bucket_bytes is None:
        plan, base, note = _tune_buckets(plan, base, measured[0].alpha_s if measured else None, price)
        notes += [note] if note else []
    return plan, base, tuple(notes)


def _tune_compression(plan: Plan, base: Estimate, allowed: tuple[Compression, ...], price: Price) -> tuple[Plan, Estimate, str]:
    tried: dict[str, tuple[Plan, Estimate]] = {"none": (plan, base)}
    errors = []
    for kind in allowed:
        try:
            other = replace(plan, sync=replace(plan.sync, compression=kind))
            tried[kind] = other, price(other)
        except RequestError as error:
            errors.append(str(error).removeprefix("plan: "))
    times = ", ".join(f"{kind} {show_seconds(estimate.step_s)}" for kind, (_, estimate) in tried.items())
    best = min((k for k in tried if tried[k][1].fits), key=lambda k: tried[k][1].step_s)
    chosen = best if tried[best][1].step_s < (1 - _MIN_GAIN) * base.step_s else "none"
    exact = "" if chosen == "none" else " The run is then not exact."
    return *tried[chosen], f"Compression of gradients: {chosen} (predicted: {times}).{exact}" + "".join(f" Not {reason}." for reason in errors)


def _tune_buckets(plan: Plan, base: Estimate, call_s: float | None, price: Price) -> tuple[Plan, Estimate, str]:
    default = plan.sync.bucket_bytes
    tried: dict[int, tuple[Plan, Estimate]] = {default: (plan, base)}
    for size in BUCKET_SIZES:
        if size != default:
            other = replace(plan, sync=replace(plan.sync, bucket_bytes=size, first_bucket_bytes=min(plan.sync.first_bucket_bytes, size)))
            tried[size] = other, price(other)
    if len({estimate.step_s for _, estimate in tried.values()}) == 1:
        return plan, base, ""  # all gradients fit into one bucket of any of these sizes
    best = min((s for s in tried if tried[s][1].fits), key=lambda s: (tried[s][1].step_s, -s))  # among equals, the fewest calls
    chosen = best if tried[best][1].step_s < (1 - _MIN_GAIN) * base.step_s else default
    times = ", ".join(f"{show_bytes(size)} {show_seconds(tried[size][1].step_s)}" for size in sorted(tried))
    call = f"a call costs {show_seconds(call_s)}" if call_s is not None else "each bucket is one call"
    why = f"{call}, and the last bucket is reduced after backward"
    return *tried[chosen], f"Gradient buckets: {show_bytes(chosen)} ({why}; predicted: {times})."
