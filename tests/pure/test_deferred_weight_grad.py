"""A layer's input gradient travels while its weight's gradient is computed: the same gradients, in that order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.execute.deferred_weight_grad import copy_to_region_overlapped, defer_weight_grad, deferrable_matmul
from meshwright.execute.recompute_runtime import RecomputeCache


class Told:
    """A group of one that says when a sum is launched and when it is waited for."""

    rank, size = 0, 1

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Told:
        self.told.append("launch")
        return self

    def wait(self) -> None:
        self.told.append("wait")


class Products(TorchDispatchMode):
    """Says when matrices are multiplied."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket.__name__ in ("mm", "bmm"):
            self.told.append("product")
        return func(*args, **(kwargs or {}))


def test_the_sum_is_launched_before_the_weights_products_and_awaited_after_them() -> None:
    torch.manual_seed(0)
    told: list[str] = []
    comm: Any = Told(told)
    query, key, below, x = nn.Linear(4, 6), nn.Linear(4, 6, bias=False), nn.Linear(4, 4), torch.randn(3, 4)
    parameters = [p for m in (query, key, below) for p in m.parameters()]
    hidden = below(x).tanh()
    plain = torch.autograd.grad((query(hidden) * key(hidden)).square().sum(), parameters)
    for layer in (query, key):
        defer_weight_grad(layer)
    entered = copy_to_region_overlapped(below(x).tanh(), comm, "enter", None, [query, key], RecomputeCache())
    loss = (query(entered) * key(entered)).square().sum()
    with Products(told):
        loss.backward()
    assert told[:6] == ["product", "product", "launch", "product", "product", "wait"]  # two inputs' gradients, then two weights'
    for parameter, wanted in zip(parameters, plain, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


def test_a_layer_that_was_not_fed_multiplies_as_always() -> None:
    layer, x = nn.Linear(4, 6, bias=False), torch.randn(2, 4)
    product = deferrable_matmul(layer, lambda x: nn.functional.linear(x, layer.weight))
    torch.testing.assert_close(product(x), layer(x))
