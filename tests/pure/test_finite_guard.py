"""A step whose loss or gradient is not finite is left out, on the host's path and on the device's, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.core.plan import Plan
from meshwright.execute.finite_guard import Culprit
from meshwright.execute.session import Session

NAN_INPUT, NAN_GRADIENT = "input", "gradient"


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def _train(
    steps: Sequence[str], *, guarded: bool = True, needs_norm: bool = True, on_device: bool = False, clip: float | None = 1.0
) -> tuple[Any, Any]:
    """A session after these steps, '' for a usual one, and their results. Each name of a step has the samples of its position."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    session = Session(Plan("test", 8), model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), clip=clip)
    if guarded:
        session.guard_steps(needs_norm=needs_norm)
        assert session.guard is not None
        session.guard._on_device = on_device
    results = []
    for number, kind in enumerate(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        if kind == NAN_INPUT:
            x[0, 0] = float("nan")
        hook = model[2].bias.register_hook(lambda grad: grad * float("nan")) if kind == NAN_GRADIENT else None
        results.append(session.step({"x": x}, _loss))
        if hook is not None:
            hook.remove()
    return session, results


def _state(session: Session) -> list[torch.Tensor]:
    state = [v for s in session.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return [t.detach().clone() for t in (*session.model.parameters(), *session.model.buffers(), *state)]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", [NAN_INPUT, NAN_GRADIENT])
def test_the_state_is_that_of_a_run_without_the_step(kind: str, on_device: bool, clip: float | None) -> None:
    left_out, results = _train(["", "", kind], on_device=on_device, clip=clip)
    shorter, _ = _train(["", ""], on_device=on_device, clip=clip)
    assert all(map(torch.equal, _state(left_out), _state(shorter)))
    assert results[2].skipped is not on_device  # the device's verdict is read later
    assert not torch.isfinite(results[2].loss if kind == NAN_INPUT else results[2].grad_norm)
    assert left_out.steps_done == 3
    assert getattr(left_out.optimizer, "found_inf", None) is None


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("needs_norm", [False, True])
def test_where_all_is_finite_nothing_changes_bit_by_bit(needs_norm: bool, clip: float | None, on_device: bool) -> None:
    guarded, _ = _train([""] * 5, needs_norm=needs_norm, clip=clip, on_device=on_device)
    plain, _ = _train([""] * 5, guarded=False, clip=clip)
    assert all(map(torch.equal, _state(guarded), _state(plain)))


def test_without_a_norm_the_loss_is_judged() -> None:
    before, _ = _train([""], needs_norm=False, clip=None)
    after, results = _train(["", NAN_INPUT], needs_norm=False, clip=None)
    assert results[1].skipped
    assert all(map(torch.equal, before.model.parameters(), after.model.parameters()))
    _, results = _train(["", NAN_GRADIENT], needs_norm=False, clip=None)
    assert not results[1].skipped


def test_the_parameter_is_named() -> None:
    _, results = _train(["", NAN_GRADIENT])
    assert [r.culprit.parameter() for r in results] == ["", "2.bias"]
    norms = torch.tensor([1.0, float("inf"), float("nan")])
    assert Culprit("", norms, ("a", "b", "c")).parameter() == "b"
    assert Culprit("", norms[:1], ("a",)).parameter() == ""


def test_training_goes_on_after_it() -> None:
    session, results = _train(["", NAN_INPUT, "", ""])
    assert [bool(torch.isfinite(r.loss)) for r in results] == [True, False, True, True]
    assert all(bool(torch.isfinite(t).all()) for t in _state(session))
