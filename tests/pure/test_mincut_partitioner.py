"""What a compiler keeps for backward: by reasoning, and as torch's own compiler does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import zoo
from meshwright.core.model import ModelProfile
from meshwright.describe.profile_tracer import trace_module

WIDTH, ROWS = 32, 64


class Around(nn.Module):
    """A layer between two products, so that what enters and leaves it is no parameter's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.layer(self.before(x)))
        return out


class Gated(nn.Module):
    """What is kept: the input, the gate, what it opens, and their product, which the last layer reads. Not the sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Widened(nn.Module):
    """A norm in double precision of what comes in single."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.double(), (WIDTH,)).float()


class Elementwise(nn.Module):
    def __init__(self, random: bool) -> None:
        super().__init__()
        self.random = random

    def forward(self, x: Tensor) -> Tensor:
        return (F.dropout(x, 0.5) if self.random else x).sin().exp().tanh()


def profile_of(layer: nn.Module) -> ModelProfile:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found: Tensor = model(batch["x"]).square().mean()
        return found

    return trace_module(Around(layer), loss, {"x": torch.zeros(ROWS, WIDTH)}, name="made-up").at_batch(ROWS)


@pytest.mark.parametrize(("layer", "eager", "compiled"), [
    (Gated(), 5, 4),
    (Widened(), 2 + 2 * 8 / (4 * WIDTH), 1),  # and two numbers of each row
    (Elementwise(random=False), 3, 2),  # the input, and the output, which the next layer reads
    (Elementwise(random=True), 4, 3),  # what is dropped is drawn once
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_element_wise_work_makes_is_not_kept(layer: nn.Module, eager: float, compiled: float) -> None:
    """In tensors of one float for each feature of each row."""
    found = next(x for x in profile_of(layer).layers if x.name == "layer")
    one = ROWS * WIDTH * 4
    assert found.activation_bytes / one == pytest.approx(eager, rel=0.01)
    assert (found.activation_bytes - found.compiler_recomputed_bytes) / one == pytest.approx(compiled, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_torchs_compiler_keeps_as_much(name: str, precision: str) -> None:
    """Blocks go through the part of torch's compiler that decides what is kept; the kernels are torch's own."""
    task = zoo.load(name, seq=64)
    torch.manual_seed(0)
    model = task.build()
    batch = {key: torch.randint(0, 16, (4, *field.shape)) for key, field in task.fields.items()}
    profile = trace_module(model, task.loss, batch, name=name, precision=precision).at_batch(4)
    blocks = [layer for layer in profile.layers if layer.block]
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager_decomp_partition", dynamic=False)
    constants = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *batch.values())}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in constants:
            kept[storage._cdata] = storage
        return tensor

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            task.loss(model, batch)

    step()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        step()
    expected = sum(x.activation_bytes - (x.compiler_recomputed_bytes if x in blocks else 0.0) for x in profile.layers)
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(expected, rel=0.03)
    assert name != "llama-tiny" or sum(x.compiler_recomputed_bytes for x in blocks) > 0.05 * expected
