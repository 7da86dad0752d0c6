"""Models that are born sharded: a plan is applied to placeholders, and then each piece is filled with its initial values, one tensor at a time.

[Note: born sharded]
A placeholder has its parameter's shape, dtype and device, and the memory of one element. Whatever cuts parameters (tensor and expert parallelism,
stages, ZeRO's flat buffers) cuts placeholders the same way and allocates what this rank keeps. The values come from a folder of weights, of which a
rank reads its own boxes, or from the constructor, which was recorded (`describe/deferred_init.py`): replaying it gives every rank the values of one
process that builds the model with the same seed, and the rank keeps its boxes of each. Nothing is broadcast: ranks compare hashes instead.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.box import Box, whole_box
from meshwright.core.errors import RequestError
from meshwright.describe.deferred_init import InitialValues
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.exchange import broadcast_data, gather_data
from meshwright.execute.placeholders import replace_meta_tensors
from meshwright.execute.state_digest import replica_differences
from meshwright.execute.state_pieces import layout_of, parameter_pieces
from meshwright.execute.stored_tensors import open_weights
from meshwright.execute.weights import LoadedWeights, load_weights

_SAMPLED = 64  # elements at each end of a tensor that ranks compare
_NOISE = 0.02  # standard deviation of values that only verification sees

Parts = list[tuple[Box, Tensor]]


@dataclass
class Birth:
    """Where a model without values gets them: from a folder of weights, as far as it has them, and from its constructor. `values` is None where
    neither constructor nor `reset_parameters` gives any."""

    values: InitialValues | None
    weights: Path | None = None
    is_restored: bool = False  # a checkpoint gives the model's state its values afterwards: the constructor gives only what is no state
    loaded: LoadedWeights | None = None
    fingerprint: str = field(default="", repr=False)  # of the values that were replayed

    @torch.no_grad()
    def fill(self, applied: AppliedPlan) -> None:
        """Give every parameter, buffer and tensor attribute of this rank its initial values."""
        loaded: set[str] = {*applied.whole.parameters, *applied.whole.buffers} if self.is_restored or self.weights is not None else set()
        if self.weights is not None:
            self.loaded = load_weights(applied, self.weights)
            loaded -= {*self.loaded.missing}
        loaded |= {alias for name in loaded for alias in applied.whole.aliases.get(name, ())}
        if self.values is not None:
            self._replay(applied, self.values, loaded)
        if applied.optimizer_offload is not None:
            applied.optimizer_offload.refresh_copies()

    def _replay(self, applied: AppliedPlan, values: InitialValues, loaded: set[str]) -> None:
        targets = dict[str, Parts]()
        for piece in parameter_pieces(applied):
            targets.setdefault(piece.name, []).append((piece.box, piece.view))
        for name, buffer in applied.model.named_buffers():
            targets[name] = list(_parts_of_buffer(applied, name, buffer))
        sample = hashlib.blake2b(digest_size=16)
        for names, tensor in values.replay((lambda name: name not in loaded) if loaded else None):
            _add_sample(sample, names, tensor)
            found = next((name for name in names if name in targets and name not in loaded), None)
            for box, view in targets.get(found, ()) if found is not None else ():
                view.copy_(tensor[box.slices()])
            for name in names:
                _fill_attribute(applied, name, tensor)
        self.fingerprint = sample.hexdigest()

    def share_random_state(self, applied: AppliedPlan) -> None:
        """Begin the replay in the state of the first rank's generator, whatever seeds the ranks' scripts have set. Collective."""
        if self.values is not None:
            recording = self.values.recording
            state = broadcast_data(applied.groups.world, recording.first_state.tolist(), applied.plan.device, "state/generator")
            recording.first_state = torch.tensor(state, dtype=torch.uint8)

    def check_replicas(self, applied: AppliedPlan) -> None:
        """Ranks must have replayed the same values, whether they share a piece or not. Collective."""
        if len({*gather_data(applied.groups.world, self.fingerprint, applied.plan.device, "state/birth")}) > 1:
            raise RequestError(_different_values("some tensor"))
        if not self.is_restored:  # what a checkpoint will fill has no values yet
            check_replicas(applied)


def check_replicas(applied: AppliedPlan) -> None:
    """Ranks that hold the same piece must have built the same values. Collective."""
    if applied.plan.world > 1 and (differences := replica_differences(applied)):
        raise RequestError(_different_values(differences[0].partition("/")[2].partition("[")[0]))


def _different_values(name: str) -> str:
    why = "its constructor draws numbers that the seed does not decide (of another library, or of the time)"
    return f"ranks have built different values of {name}: {why}: seed them in the factory"


def lacking_weights(model: nn.Module, folder: Path) -> list[str]:
    """Parameters and persistent buffers of the model that a folder lacks under their own names, or has in another shape."""
    state = model.state_dict(keep_vars=True)
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in state.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    weights = open_weights(folder)
    weights.close()
    found = weights.tensors
    has = lambda name, tensor: name in found and found[name].shape == tuple(tensor.shape)  # noqa: E731
    return [names[0] for names in by_tensor.values() if not any(has(name, state[name]) for name in names)]


@torch.no_grad()
def copy_with_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, birth: Birth, device: torch.device, keeps: Callable[[str], bool]
) -> tuple[nn.Module, torch.optim.Optimizer]:  # fmt: skip
    """A copy of a model without values, and of its optimizer, in which the tensors of the names that `keeps` chooses have their initial values, for
    verification. Weights in a folder are not read: noise stands for what no constructor gives."""
    copied, stepper = copy.deepcopy((model, optimizer))
    generator = torch.Generator().manual_seed(0)

    def make(name: str, tensor: Tensor) -> Tensor | None:
        if not keeps(name):
            return None
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if undefined is None or name in undefined:
            made.copy_(torch.randn(tensor.shape, generator=generator) * _NOISE)
        return made

    undefined = {*birth.values.undefined()} if birth.values is not None else None
    replace_meta_tensors(copied, make, stepper)
    targets = dict([*copied.named_parameters(), *copied.named_buffers()])
    for names, tensor in birth.values.replay(lambda name: keeps(name) and name not in undefined) if birth.values is not None else ():  # type: ignore[operator]
        found = next((name for name in names if name in targets and not targets[name].is_meta), None)
        if found is not None:
            targets[found].copy_(tensor)
        for name in names:
            _fill_meta_attribute(copied, name, tensor, device)
    return copied, stepper


def _add_sample(sample: Any, names: tuple[str, ...], tensor: Tensor) -> None:
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()[: 2 * _SAMPLED]
    ends = torch.cat([flat[:_SAMPLED], flat[-_SAMPLED:]]).contiguous()
    sample.update(" ".join(names).encode())
    sample.update(ends.view(torch.uint8).numpy().tobytes() if ends.numel() else b"")


def _parts_of_buffer(applied: AppliedPlan, name: str, buffer: Tensor) -> Iterator[tuple[Box, Tensor]]:
    layout = layout_of(applied, name)
    for inside, outside in layout.boxes(whole_box(layout.local_shape)) if buffer.numel() else ():
        yield outside, buffer[inside.slices()]


def _fill_attribute(applied: AppliedPlan, name: str, tensor: Tensor) -> None:
    _fill_meta_attribute(applied.model, name, tensor, torch.device(applied.plan.device))


def _fill_meta_attribute(model: nn.Module, name: str, tensor: Tensor, device: torch.device) -> None:
    """A tensor that is an attribute of a module, and neither parameter nor buffer."""
    prefix, _, key = name.rpartition(".")
    try:
        module: nn.Module = model.get_submodule(prefix)
    except AttributeError:
        return
    held: Any = vars(module).get(key)
    if isinstance(held, Tensor) and held.is_meta:
        vars(module)[key] = tensor.to(device).clone()
