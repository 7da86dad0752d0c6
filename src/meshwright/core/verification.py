"""The result of verifying a plan: what one device and the plan computed from the same samples, and the verdict on the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["equal", "inexact", "wrong", "failed", "not verified"]  # failed: the model raised an error under the plan
Quantity = Literal["loss", "output", "gradient", "gradient norm", "step"]


@dataclass(frozen=True)
class Comparison:
    """One quantity on one device and under the plan: a number, or the norm of a tensor. `name` is that of a parameter, or of a module (an output)."""

    quantity: Quantity
    name: str
    on_one_device: float
    under_the_plan: float
    difference: float  # relative: the norm of the difference over the norm on one device
    tolerance: float  # the largest relative difference that rounding explains
    module_class: str = ""  # of the module that the parameter belongs to, or whose output it is

    @property
    def is_equal(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN

    def describe(self) -> str:
        """Both values in words."""
        values = f"{_show(self.under_the_plan)}, on one device {_show(self.on_one_device)}"
        if self.quantity in ("loss", "gradient norm"):
            return f"the {self.quantity} is {values}"
        what = {"output": "output", "gradient": "gradient", "step": "optimizer's step"}[self.quantity]
        off = f", {self.difference:.0%} off" if math.isfinite(self.difference) and self.difference < 10 else ""
        return f"the {what} of {self.name or 'the model'}{f' ({self.module_class})' * bool(self.module_class)} has norm {values}{off}"


@dataclass(frozen=True)
class Verification:
    """What verifying one plan has found. `reason` says in one line why the verdict is not "equal"."""

    verdict: Verdict
    reason: str = ""
    comparisons: tuple[Comparison, ...] = ()
    samples: int = 0  # of the batch that both have run
    seconds: float = 0.0
    is_cached: bool = False  # an earlier run has verified the same plan for the same model
    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # blocks that were left out, by the equal one that was verified for them

    @property
    def may_train(self) -> bool:
        return self.verdict not in ("wrong", "failed")

    def describe_left_out(self) -> str:
        """Which blocks stood for which; "" if the model was whole."""
        parts = [f"{kept} stood for {_show_names(names)}" for kept, names in self.stands_for.items()]
        return f"the whole model does not fit beside itself: {'; '.join(parts)}" if parts else ""

    def largest(self, quantity: Quantity) -> Comparison | None:
        """The comparison of this quantity that is farthest beyond its tolerance, or closest to it."""
        found = [c for c in self.comparisons if c.quantity == quantity]
        return max(found, key=lambda c: c.difference / c.tolerance if math.isfinite(c.difference) else math.inf, default=None)


def _show_names(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)} equal blocks)"


def _show(value: float) -> str:
    return f"{value:.5g}"
