"""Tuning of a chosen plan: the size of its gradient buckets and whether gradients are compressed, by the estimate of each option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.core.calibration import Rates
from meshwright.core.compression_policy import Compression
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.plan.search_space import Constraints

BUCKET_SIZES = (2**20, 4 * 2**20, 25 * 2**20, 100 * 2**20, 400 * 2**20)
_MIN_GAIN = 0.01  # relative: predictions are not more precise


@dataclass(frozen=True)
class TunedPlan:
    """A plan, its estimate, and notes on what was chosen and why."""

    plan: Plan
    estimate: Estimate
    notes: tuple[str, ...] = ()


def tune(plan: Plan, base_estimate: Estimate, constraints: Constraints, rates: Rates, price: Callable[[Plan], Estimate]) -> TunedPlan:
    """Tune compression and bucket size, except what the user has fixed, plans without gradient buckets, and a backend that was not measured
    although others were."""
    measured = [line for name, line in rates.collectives.items() if name in (f"{plan.backend}/all_reduce", f"{plan.backend}/reduce_scatter")]
    if plan.mesh.group_size("data") == 1 or plan.memory.zero == 3 or bool(rates.collectives) > bool(measured) or not base_estimate.fits:
        return TunedPlan(plan, base_estimate)
    said: list[str] = []
    if constraints.allow and constraints.compression is None:
        plan, base_estimate, why = _tune_compression(plan, base_estimate, constraints.allow, price)
        said.append(why)
    if constraints.bucket_bytes is None:
        plan, base_estimate, why = _tune_buckets(plan, base_estimate, measured[0].alpha_s if measured else None, price)
        said += [why] if why else []
    return TunedPlan(plan, base_estimate, tuple(said))


def _tune_compression(
    plan: Plan, base_estimate: Estimate, allowed: tuple[Compression, ...], price: Callable[[Plan], Estimate]
) -> tuple[Plan, Estimate, str]:  # fmt: skip
    tried: dict[str, tuple[Plan, Estimate]] = {"none": (plan, base_estimate)}
    refused = []
    for kind in allowed:
        try:
            other = replace(plan, sync=replace(plan.sync, compression=kind))
            tried[kind] = other, price(other)
        except RequestError as error:
            refused.append(str(error).removeprefix("plan: "))
    times = ", ".join(f"{kind} {show_seconds(estimate.step_s)}" for kind, (_, estimate) in tried.items())
    best = min((k for k in tried if tried[k][1].fits), key=lambda k: tried[k][1].step_s)
    chosen = best if tried[best][1].step_s < (1 - _MIN_GAIN) * base_estimate.step_s else "none"
    exact = "" if chosen == "none" else " The run is then not exact."
    return *tried[chosen], f"Compression of gradients: {chosen} (predicted: {times}).{exact}" + "".join(f" Not {reason}." for reason in refused)


def _tune_buckets(plan: Plan, base_estimate: Estimate, call_s: float | None, price: Callable[[Plan], Estimate]) -> tuple[Plan, Estimate, str]:
    usual = plan.sync.bucket_bytes
    tried: dict[int, tuple[Plan, Estimate]] = {usual: (plan, base_estimate)}
    for size in BUCKET_SIZES:
        if size != usual:
            other = replace(plan, sync=replace(plan.sync, bucket_bytes=size, first_bucket_bytes=min(plan.sync.first_bucket_bytes, size)))
            tried[size] = other, price(other)
    if len({estimate.step_s for _, estimate in tried.values()}) == 1:
        return plan, base_estimate, ""  # all gradients fit into one bucket of any of these sizes
    best = min((s for s in tried if tried[s][1].fits), key=lambda s: (tried[s][1].step_s, -s))  # among equals, the fewest calls
    chosen = best if tried[best][1].step_s < (1 - _MIN_GAIN) * base_estimate.step_s else usual
    times = ", ".join(f"{show_bytes(size)} {show_seconds(tried[size][1].step_s)}" for size in sorted(tried))
    call = f"a call costs {show_seconds(call_s)}" if call_s is not None else "each is a call"
    why = f"{call}, and what the last bucket holds travels after backward"
    return *tried[chosen], f"Gradient buckets: {show_bytes(chosen)} ({why}; predicted: {times})."
