"""One rank's session, on one device: what it does to gradients before the optimizer sees them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.execute.flat_buffer import norm_parts
from meshwright.execute.reentrant_checkpoints import no_reentrant_checkpoints
from meshwright.execute.session import Session
from meshwright.execute.sharded_gradients import _power_sum


def _losses(fused: bool, clip: float | None) -> list[float]:
    torch.manual_seed(0)
    network = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05, fused=fused)
    session = Session(Plan("test", 6), network, optimizer, clip=clip)
    batch = {"x": torch.randn(6, 8), "y": torch.randn(6, 4)}
    return [float(session.step(batch, lambda m, b: F.mse_loss(m(b["x"]), b["y"])).loss) for _ in range(6)]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_fused_optimizer_clips_as_any_other_does(clip: float | None) -> None:
    assert _losses(True, clip) == pytest.approx(_losses(False, clip), rel=1e-6)


@pytest.mark.parametrize(("mesh", "zero"), [(Mesh(tp=(2,)), 0), (Mesh(shard=2), 3), (Mesh(pp=2), 0), (Mesh(dp=2), 0), (Mesh(), 0)], ids=str)
def test_reentrant_checkpoints_are_refused_where_the_model_is_cut(mesh: Mesh, zero: int) -> None:
    plan, network, x = Plan("test", 8, mesh, micro_batches=2, memory=MemoryPolicy(zero=zero)), nn.Linear(8, 4), torch.randn(6, 8, requires_grad=True)
    is_cut = zero == 3 or mesh.dp == 1 < mesh.size
    with no_reentrant_checkpoints(plan), pytest.raises(RequestError, match="use_reentrant=False") if is_cut else nullcontext():
        checkpoint(network, x, use_reentrant=True)
    checkpoint(network, x, use_reentrant=True).sum().backward()
    assert x.grad is not None


def test_clipping_changes_the_curve() -> None:
    """AdamW hides a constant factor, not one that changes from step to step."""
    assert _losses(True, 0.05) != pytest.approx(_losses(True, None), rel=1e-6)


def test_a_compiled_loss_keeps_the_model_out_of_its_graphs_and_copies_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by block, the loss has graphs of its own, units have theirs, and a deep copy of the model does not call the original."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    plain, batch = copy.deepcopy(network), {"x": torch.randn(6, 8), "y": torch.randn(6, 4)}
    sessions = [
        Session(Plan("test", 6, compile=mode), model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
        for mode, model in (("blocks", network), ("none", plain))
    ]
    curves = [[float(session.step(batch, _squared_error).loss) for _ in range(4)] for session in sessions]
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
    assert any("mse_loss" in name for graph in graphs for name in graph)
    assert not any("linear" in name for graph in graphs for name in graph)
    other = copy.deepcopy(network)
    with torch.no_grad():
        other[1].weight.zero_()
        other[1].bias.zero_()
    assert not other(batch["x"]).any()
    assert network(batch["x"]).any()


def _squared_error(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def test_the_norm_of_a_flat_buffer_is_as_exact_as_that_of_its_parameters() -> None:
    """torch's own norm of so many elements in fp32 is a thousandth off on CPUs."""
    grad = torch.randn(8_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
    assert float(torch.stack(torch._foreach_norm(norm_parts(grad))).norm()) == pytest.approx(exact, rel=1e-6)
    assert float(_power_sum([(grad, 2)], 2.0)) == pytest.approx(exact**2 / 2, rel=1e-5)
    assert float(_power_sum([(grad, 2)], float("inf"))) == float(grad.abs().max())
