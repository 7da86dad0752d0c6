"""fp8: the three products against what their rounded operands give, which layers take part, and who is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.pure.fake_inputs import blocks, calibration, cluster
from torch import nn

from meshwright.core.calibration import Rates
from meshwright.core.errors import RequestError
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.workload import Workload
from meshwright.cost.compute_cost import ComputeCost
from meshwright.execute.fp8 import BACKWARD_DTYPE, FORWARD_DTYPE, Fp8Matmul, convert_to_fp8, to_fp8
from meshwright.plan import Constraints, check_precision, rank_plans

torch.manual_seed(0)


def rounded(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    low, scale = to_fp8(x, kind)
    return low.double() * scale.double()


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e6])
@pytest.mark.parametrize("kind", [FORWARD_DTYPE, BACKWARD_DTYPE])
def test_a_scale_brings_any_magnitude_into_range(kind: torch.dtype, size: float) -> None:
    x = size * torch.randn(64, 32)
    low, scale = to_fp8(x, kind)
    assert low.float().abs().max() == torch.finfo(kind).max
    step = torch.finfo(kind).eps
    assert (low.float() * scale).sub(x).abs().max() <= step * x.abs().max()
    assert torch.isfinite(to_fp8(torch.zeros(16, 16), kind)[0].float()).all()


@pytest.mark.parametrize("turned", [False, True])
def test_products_are_those_of_the_rounded_operands(turned: bool) -> None:
    x, matrix, grad = torch.randn(32, 48, requires_grad=True), torch.randn(48, 64) if turned else torch.randn(64, 48), torch.randn(32, 64)
    matrix.requires_grad_()
    weight = matrix.t() if turned else matrix
    out = Fp8Matmul.apply(x, weight)
    out.backward(grad)
    x8, w8, g8 = rounded(x.detach(), FORWARD_DTYPE), rounded(weight.detach(), FORWARD_DTYPE), rounded(grad, BACKWARD_DTYPE)
    for_weight = g8.t() @ x8
    for found, wanted in ((out, x8 @ w8.t()), (x.grad, g8 @ w8), (matrix.grad, for_weight.t() if turned else for_weight)):
        assert found is not None
        torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-5, atol=1e-4)


class Turned(nn.Module):
    """Like transformers' Conv1D."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


Turned.__name__ = "Conv1D"


def test_layers_inside_units_take_part_where_their_sizes_allow_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 64), nn.GELU(), Turned(32, 64), nn.Linear(32, 24), nn.Linear(24, 32)), nn.Linear(32, 16))
    x = torch.randn(2, 8, 32)
    wanted = model(x)
    found = convert_to_fp8(model, ["0", "1"], torch.float32)
    assert found.converted == ("0.0", "0.2")
    assert set(found.skipped) == {"0.3", "0.4", "1"} and "24 is no multiple of 16" in found.skipped["0.3"]
    assert model(x).sub(wanted).norm() / wanted.norm() < 0.1
    assert not torch.equal(model(x), wanted)
    assert torch.equal(model(x[:1, :5]), nn.Sequential(*(_plain(m) for m in model))(x[:1, :5]))  # five rows are no multiple of 16


def _plain(module: nn.Module) -> nn.Module:
    for part in module.modules():
        vars(part).pop("forward", None)
    return module


def test_it_is_refused_where_there_is_none() -> None:
    with pytest.raises(RequestError, match=r"precision=fp8 needs a GPU .* use bf16"):
        Plan("m", 8, memory=MemoryPolicy(precision="fp8"))
    with pytest.raises(RequestError, match=r"precision=fp8 needs GPUs .* this machine has made-up: use bf16"):
        rank_plans(blocks(2), cluster(1), Workload(8, precision="fp8"), calibration(1), Constraints())
    check_precision("bf16", cluster(1))


def test_only_units_are_priced_in_fp8() -> None:
    rates = Rates(1, 1, {"matmul/bf16": ((1.0, 1e12),), "matmul/fp8": ((1.0, 2e12),)}, ((1.0, 1e15),), 0.0)
    layer = blocks(1).layers[0]
    inside, outside = (ComputeCost(rates, "fp8", fp8_layers=frozenset(names)).layer_seconds(layer, "forward", {}) for names in (("blocks.0",), ()))
    assert outside == pytest.approx(2 * inside, rel=1e-3)
    old = replace(rates, compute={"matmul/bf16": ((1.0, 1e12),)})
    assert (old.compute_rate("matmul", "fp8", 1.0), rates.compute_rate("attention", "fp8", 1.0)) == (1e12, 1e12)


def test_devices_that_have_it_are_found() -> None:
    known: Any = cluster(1)
    node = replace(known.nodes[0], devices=tuple(replace(d, fp8=True) for d in known.devices))
    best = rank_plans(blocks(2), replace(known, nodes=(node,)), Workload(8, precision="fp8"), calibration(1), Constraints()).best
    assert best.plan.memory.precision == "fp8"
