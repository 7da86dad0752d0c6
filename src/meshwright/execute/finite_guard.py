"""Leaves out an optimizer step whose loss or gradient is not finite, and says where the first such gradient was.

[Note: leaving a step out]
On CPUs the loss and the gradient norm are read before the optimizer steps. A GPU runs behind the host, which would have to wait for it in every step
to do the same; so a fused optimizer is handed the answer on the device (`found_inf`, which fp16's gradient scaling uses) and leaves the update out
there, while the host reads the loss later. Other optimizers on GPUs make the host wait. Where all is finite the update is the same bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from meshwright.execute.apply import AppliedPlan, persistent_buffers


class FiniteGuard:
    """Judges the steps of one rank's session. The verdict is the same on every rank: it comes from the global loss and gradient norm."""

    def __init__(self, applied: AppliedPlan, *, needs_norm: bool, on_device: bool) -> None:
        """`needs_norm`: the gradient is judged also where nothing else needs its norm, and buffers are put back when a step is left out.
        `on_device`: the optimizer takes `found_inf` from the device."""
        self.needs_norm = needs_norm
        self._applied, self._optimizer, self._on_device = applied, applied.optimizer, on_device
        self._names = {id(p): name for name, p in applied.model.named_parameters()}
        named = dict(applied.model.named_buffers())
        self._buffers = [named[name] for name in persistent_buffers(applied.model)] if needs_norm else []
        self._kept: list[Tensor] = []
        self._culprit = ""  # the first parameter, in the order of backward, whose own gradient was not finite; known on CPUs at once
        self._device_norms: list[Tensor] = []
        self._device_names: list[str] = []
        self._innocent: set[str] = set()  # parameters whose own gradient was seen to be finite
        if applied.gradient_sync is not None:
            applied.gradient_sync.watch_own_gradients(self._look_at_own)

    def begin_step(self) -> None:
        self._culprit = ""
        self._device_norms, self._device_names, self._innocent = [], [], set[str]()
        self._kept = [b.clone() for b in self._buffers]

    def _look_at_own(self, params: Sequence[nn.Parameter], views: Sequence[Tensor], flat: Tensor) -> None:
        """Look at this rank's gradients just before they are reduced."""
        if flat.device.type != "cpu":
            self._device_norms += torch._foreach_norm(list(views))
            self._device_names += [self._names.get(id(p), "?") for p in params]
        elif not self._culprit and not _is_finite(flat):
            self._culprit = next((self._names.get(id(p), "?") for p, view in zip(params, views, strict=True) if not _is_finite(view)), "")

    def look_at_tied(self, name: str, gradient: Tensor) -> None:
        """Look at a gradient just before it is summed over pipeline stages. One that is finite now is never this rank's fault."""
        if gradient.device.type == "cpu" and _is_finite(gradient):
            self._innocent.add(name)
        elif gradient.device.type == "cpu" and not self._culprit:
            self._culprit = name

    def leaves_out(self, loss: Tensor, norm: Tensor | None) -> bool:
        """Whether the optimizer must not step; on the device path the optimizer itself is told, and the answer is False."""
        finite = torch.isfinite(loss) if norm is None else torch.isfinite(loss) & torch.isfinite(norm)
        if self._on_device:
            self._optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(torch.where(finite, buffer, kept))
            return False
        if bool(finite):
            return False
        for buffer, kept in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(kept)
        if self._applied.gradient_sync is not None:
            for _, residual in self._applied.gradient_sync.residuals(create=False):
                residual.nan_to_num_(0.0, 0.0, 0.0)
        elif not self._culprit:
            self._culprit = next((name for name, grad in self._own_gradients() if not _is_finite(grad)), "")
        return True

    def _own_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that are not reduced, about in the order in which backward reaches them."""
        named = reversed(list(self._applied.model.named_parameters()))
        return ((name, p.grad) for name, p in named if p.grad is not None and name not in self._innocent)

    def culprit(self) -> Culprit:
        """What is known of this step's own gradients, once the device has come so far."""
        return Culprit(self._culprit, torch.stack(self._device_norms) if self._device_norms else None, tuple(self._device_names))


class Culprit:
    """Which of a rank's own gradients was the first that was not finite, before they were reduced. Reading it waits for the device."""

    def __init__(self, name: str, norms: Tensor | None, names: tuple[str, ...]) -> None:
        self._name, self._norms, self._names = name, norms, names

    def parameter(self) -> str:
        """Its name; empty if all were finite, or if nothing is known."""
        if self._norms is None:
            return self._name
        finite = torch.isfinite(self._norms).tolist()
        return next((name for name, is_finite in zip(self._names, finite, strict=True) if not is_finite), "")


def _is_finite(tensor: Tensor) -> bool:
    """By a norm: one pass, without a temporary tensor."""
    if not tensor.numel():
        return True
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bool(torch.isfinite(torch.linalg.vector_norm(real, dtype=torch.float32 if real.element_size() < 4 else None)))
