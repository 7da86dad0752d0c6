"""What a probe's figures mean: calls that rise with their size, cores that calls keep, and convolutions by the channels that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.core.calibration import Rates, monotone_seconds
from meshwright.core.model import Kernel, LayerProfile, TensorSpec
from meshwright.cost.compute_cost import ComputeCost, conv_kernel_of


def test_no_call_takes_less_than_a_smaller_one() -> None:
    assert monotone_seconds(((1.0, 2.0), (2.0, 4.0), (3.0, 3.0), (4.0, 9.0))) == ((1.0, 2.0), (2.0, 3.5), (3.0, 3.5), (4.0, 9.0))
    assert monotone_seconds(((1.0, 3.0), (2.0, 2.0), (3.0, 1.0))) == ((1.0, 2.0), (2.0, 2.0), (3.0, 2.0))


def test_a_call_keeps_a_core_for_what_was_measured() -> None:
    rates = Rates(2, 1, {}, (), 0.0, core_busy_curves={"gloo/all_reduce": ((10.0, 1.0), (100.0, 4.0))})
    assert rates.core_busy_seconds("gloo/all_reduce", 200.0) == pytest.approx(8.0)
    assert rates.core_busy_seconds("gloo/all_gather", 200.0) is None


def _layer(channels: int) -> LayerProfile:
    kernels = (Kernel("conv2", "forward", 1e9, 1e6), Kernel("conv2", "backward", 1e9, 1e6))  # a first layer: nobody asks for its input's gradient
    weight = TensorSpec("w", (channels, 3, 3, 3))
    return LayerProfile("conv", "conv", weight.numel, 1e9, 1e9, 0.0, 0.0, tensors=(weight,), kernels=kernels)


def test_a_convolution_is_priced_by_the_channels_it_makes() -> None:
    compute = {
        "conv2-forward-channels/fp32": ((4.0, 1e9), (16.0, 4e9)),
        "conv2-forward-channels-alone/fp32": ((4.0, 2e9), (16.0, 8e9)),
        "conv2-weights-channels/fp32": ((4.0, 5e8), (16.0, 2e9)),
    }
    price = ComputeCost(Rates(1, 1, compute, (), 0.0, fixed={"conv2-forward": 0.5}), "fp32")
    assert price.layer_seconds(_layer(16), "forward", {}) == pytest.approx(0.25 + 0.5)
    assert price.layer_seconds(_layer(4), "forward", {}) == pytest.approx(1.0 + 0.5)  # a quarter of them takes as long as all
    assert price.layer_seconds(_layer(16), "forward", {}, single_sample=True) == pytest.approx(0.125)
    assert price.layer_seconds(_layer(16), "backward", {}) == pytest.approx(0.5)
    assert conv_kernel_of(_layer(16), replace(_layer(16).kernels[0], kind="matmul")) is None
