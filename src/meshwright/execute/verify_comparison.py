"""Compares what one device and a plan computed, with tolerances that the precision's rounding explains.

[Note: tolerances]
A gradient may differ by a fraction of its own norm, or of a hundredth of the largest gradient's norm where its own is smaller: a gradient that is
zero in exact arithmetic (an attention's key bias) is rounding noise on both sides. The optimizer's step is compared for the plan's own gradients,
because the first step of Adam is about the sign of each element, which noise decides where the gradient is almost zero. A model may amplify
rounding (deep untrained networks, routers, ReLUs near zero): before a difference counts, the plain run is repeated with parameters changed by one
unit of rounding, and what that changes is added to the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.core.plan import Plan
from meshwright.core.verification import Comparison, Quantity
from meshwright.execute.verify_reference import Reference, SampleNorms

_TOLERANCES = {"fp64": 1e-7, "fp32": 1e-3, "tf32": 1e-2, "fp16": 5e-2, "bf16": 0.15, "fp8": 0.4}  # relative to a tensor's norm
_ROUNDING = {"fp64": 1.1e-16, "fp32": 6e-8, "tf32": 4.9e-4, "fp16": 4.9e-4, "bf16": 3.9e-3, "fp8": 6.3e-2}  # one unit, relative
_SMALL_GRADIENT = 1e-2  # of the largest gradient's norm: smaller gradients are compared as if they had this norm
_STEP_TOLERANCE = 1e-2  # of an update, given the same gradients
_AMPLIFIED_ROUNDING = 4.0  # units by which a plan's order of sums may differ


@dataclass(frozen=True)
class PlanResult:
    """What one step under the plan computed, on the CPU of rank 0."""

    loss: float
    gradients: Mapping[str, Tensor]
    gradient_norm: float
    parameters: Mapping[str, Tensor]  # after the optimizer's step
    outputs: Sequence[tuple[str, SampleNorms, int]]  # module, norms, index of the first sample; from several ranks


@dataclass(frozen=True)
class Tolerance:
    """Relative tolerances; `noise` is what one unit of rounding changes on one device, by the quantity's name."""

    precision: str
    noise: Mapping[tuple[Quantity, str], float] = field(default_factory=dict)

    @property
    def rounding(self) -> float:
        return _ROUNDING[self.precision]

    def of(self, quantity: Quantity, name: str = "") -> float:
        return max(_TOLERANCES[self.precision], _AMPLIFIED_ROUNDING * self.noise.get((quantity, name), 0.0))


def tolerance_of(plan: Plan) -> Tolerance:
    is_tf32 = plan.memory.precision == "fp32" and plan.device == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return Tolerance("tf32" if is_tf32 else plan.memory.precision)


def compare(reference: Reference, found: PlanResult, tolerance: Tolerance, classes: Mapping[str, str]) -> list[Comparison]:
    """The loss, the outputs that are whole on a rank in the order of forward, the gradient norm, and the gradients."""
    rows = [_compare_numbers("loss", reference.loss, found.loss, tolerance)]
    order = {name: i for i, name in enumerate(reference.outputs)}
    for name, output, first in sorted((o for o in found.outputs if o[0] in order), key=lambda o: order[o[0]]):
        whole = reference.outputs[name]
        if whole.numel == output.numel and first + len(output.norms) <= len(whole.norms):
            expected = whole.norms[first : first + len(output.norms)]
            rows.append(_compare_tensors("output", name, expected, output.norms, 0.0, tolerance.of("output", name), classes))
    rows.append(_compare_numbers("gradient norm", reference.gradient_norm(found.gradients), found.gradient_norm, tolerance))
    largest = max((_norm(g) for g in reference.gradients.values() if g is not None), default=0.0)
    for name, gradient in found.gradients.items():
        plain = reference.gradients.get(name)
        expected = torch.zeros_like(gradient) if plain is None else plain
        floor = _SMALL_GRADIENT * largest
        rows.append(_compare_tensors("gradient", name, expected, gradient, floor, tolerance.of("gradient", name), classes))
    return rows


def compare_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, reference: Reference, found: PlanResult, classes: Mapping[str, str]
) -> list[Comparison]:
    """Step a fresh copy of the model with the plan's gradients, and compare the parameters with those that the plan's own step has made."""
    initial = {}
    for name, param in model.named_parameters():
        if reference.gradients.get(name) is not None and name in found.gradients:
            param.grad = found.gradients[name].to(param)
            param.data.copy_(reference.changed.get(name, param.data))
            initial[name] = param.detach().cpu().clone()
    optimizer.step()
    rows = []
    for name, param in model.named_parameters():
        if name not in initial or name not in found.parameters:
            continue
        start = initial[name]
        expected, stepped = param.detach().cpu() - start, found.parameters[name] - start
        floor = _AMPLIFIED_ROUNDING * torch.finfo(param.dtype).eps / _STEP_TOLERANCE * _norm(start)
        rows.append(_compare_tensors("step", name, expected, stepped, floor, _STEP_TOLERANCE, classes))
    return rows


def first_difference(rows: list[Comparison], order: list[str]) -> Comparison | None:
    """The comparison that says most about where a plan goes wrong: the first output in forward that differs; or else the gradient that backward
    reaches first, whose module is the last in `order`; or else anything that differs."""
    different = [row for row in rows if not row.is_equal]
    outputs = [row for row in different if row.quantity == "output"]
    position = {name: i for i, name in enumerate(order)}
    gradients = [row for row in different if row.quantity == "gradient"]
    latest = max(gradients, key=lambda row: position.get(row.name.rpartition(".")[0], -1), default=None)
    return outputs[0] if outputs else latest or next(iter(different), None)


def measure_noise(reference: Reference, perturbed: Reference) -> dict[tuple[Quantity, str], float]:
    """The relative changes between two plain runs whose parameters differ by rounding."""
    outputs = [(name, output, 0) for name, output in perturbed.outputs.items()]
    gradients = {name: g for name, g in perturbed.gradients.items() if g is not None}
    rows = compare(reference, PlanResult(perturbed.loss, gradients, perturbed.gradient_norm(gradients), {}, outputs), Tolerance("fp32"), {})
    return {(row.quantity, row.name): row.difference for row in rows}


def _compare_numbers(quantity: Quantity, expected: float, found: float, tolerance: Tolerance) -> Comparison:
    difference = abs(found - expected) / max(abs(expected), 1e-12)
    return Comparison(quantity, "", expected, found, difference, tolerance.of(quantity))


def _compare_tensors(
    quantity: Quantity, name: str, expected: Tensor, found: Tensor, floor: float, tolerance: float, classes: Mapping[str, str]
) -> Comparison:  # fmt: skip
    module = name if quantity == "output" else name.rpartition(".")[0]
    if expected.shape != found.shape:
        return Comparison(quantity, name, _norm(expected), _norm(found), float("inf"), tolerance, classes.get(module, ""))
    scale = max(_norm(expected), floor, 1e-30)
    return Comparison(quantity, name, _norm(expected), _norm(found), _norm(found - expected) / scale, tolerance, classes.get(module, ""))


def _norm(tensor: Tensor) -> float:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) if tensor.numel() else 0.0
