"""One rank's session, on one device: what it does to gradients before the optimizer sees them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.core.plan import Plan
from meshwright.execute.session import Session


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


def test_clipping_changes_the_curve() -> None:
    """AdamW hides a constant factor, not one that changes from step to step."""
    assert _losses(True, 0.05) != pytest.approx(_losses(True, None), rel=1e-6)
