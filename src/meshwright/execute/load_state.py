"""Loads a checkpoint into a model to which any plan was applied: each piece is filled from the stored pieces that overlap it, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import checkpoint_folder
from meshwright.checkpoint.manifest import Manifest, TensorRecord, read_manifest
from meshwright.core.errors import RequestError
from meshwright.core.serialization import to_data
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.exchange import broadcast_data, gather_data
from meshwright.execute.state_dtypes import DTYPES
from meshwright.execute.state_pieces import (
    BUFFER,
    OPTIMIZER,
    PARAMETER,
    buffer_pieces,
    parameter_pieces,
    residual_pieces,
    stepped_names,
    stepped_pieces,
)
from meshwright.execute.stored_tensors import StoredTensors

_SCALAR_STATES = {"step", "eta", "mu", "mu_product"}  # of torch's optimizers: one number a parameter, whatever its shape


def open_newest(applied: AppliedPlan, root: Path, step: int | None = None) -> tuple[Path, Manifest, list[str]]:
    """(folder, manifest, what is wrong with newer ones) of the newest whole checkpoint in `root`, or of the one of `step`. Every rank hashes a share
    of the files. Collective."""
    world, device = applied.groups.world, applied.plan.device
    steps = broadcast_data(world, checkpoint_folder.saved_steps(root) if world.rank == 0 else None, device, "state/steps")
    if step is not None:
        if step not in steps:
            raise RequestError(f"{root}: there is no checkpoint of step {step}; there are {', '.join(map(str, steps)) or 'none'}")
        steps = [step]
    problems: list[str] = []
    for candidate in reversed(steps):
        folder = checkpoint_folder.step_folder(root, candidate)
        manifest, wrong = read_whole(applied, folder)
        if manifest is not None:
            return folder, manifest, problems
        problems += wrong
    raise RequestError(f"{root}: there is no whole checkpoint in it{f'; {problems[0]}' if problems else ''}")


def read_whole(applied: AppliedPlan, folder: Path) -> tuple[Manifest | None, list[str]]:
    """(the manifest of a checkpoint, or None if something is wrong with it, what that is). Every rank hashes a share of the files. Collective."""
    world, wrong, manifest = applied.groups.world, list[str](), None
    try:
        manifest = read_manifest(folder)
        wrong = list(checkpoint_folder.problems_of(folder, manifest, world.rank, world.size))
    except RequestError as error:
        wrong = [str(error)]
    everywhere = [line for lines in gather_data(world, wrong, applied.plan.device, "state/problems") for line in lines]
    return None if everywhere else manifest, list(dict.fromkeys(everywhere))


def load_tensors(applied: AppliedPlan, folder: Path, manifest: Manifest, *, optimizer: bool = True) -> None:
    """Fill parameters, buffers and, unless told otherwise, the optimizer's state from a checkpoint of any plan."""
    check_same_model(applied, manifest, str(folder))
    if optimizer:
        make_optimizer_state(applied, manifest)
    is_same_plan = manifest.plan == to_data(applied.plan)
    with torch.no_grad(), StoredTensors(folder, manifest) as stored:
        states = stepped_pieces(applied, applied.optimizer_state, OPTIMIZER) if optimizer else ()
        residuals = residual_pieces(applied, create=True) if optimizer and is_same_plan else ()
        for piece in itertools.chain(parameter_pieces(applied), buffer_pieces(applied), states, residuals):
            if piece.tensor in manifest.tensors or piece.kind in (PARAMETER, BUFFER):
                stored.fill(piece.tensor, piece.box, piece.view)
    if applied.optimizer_offload is not None:
        applied.optimizer_offload.refresh_copies()


def check_same_model(applied: AppliedPlan, manifest: Manifest, where: str) -> None:
    """Refuse a checkpoint of another model: the line names the first parameter or buffer that differs."""
    kinds = (f"{PARAMETER}/", f"{BUFFER}/")
    stored = {key: record.shape for key, record in manifest.tensors.items() if key.startswith(kinds)}
    model = [*(f"{PARAMETER}/{name}" for name in applied.whole.parameters), *(f"{BUFFER}/{name}" for name in applied.whole.buffers)]
    for key in (*(k for k in model if k not in stored), *sorted(set(stored) - set(model))):
        kind, _, name = key.partition("/")
        has = "the checkpoint has" if key in stored else "the model has"
        raise RequestError(f"{where}: it is of another model: {has} the {kind} {name}, and {'the model' if key in stored else 'it'} has not")
    for key, shape in stored.items():
        kind, _, name = key.partition("/")
        if applied.whole.shapes[name] != shape:
            raise RequestError(f"{where}: it is of another model: {name} has the shape {shape} in it, and {applied.whole.shapes[name]} here")


def make_optimizer_state(applied: AppliedPlan, manifest: Manifest) -> None:
    """Give the optimizer state of the kinds that the checkpoint has, to be filled; memory that it has already is used again."""
    stored: dict[str, dict[str, TensorRecord]] = {}
    for key, record in manifest.tensors.items():
        kind, _, name = key.rpartition("/")
        if kind.startswith(f"{OPTIMIZER}/"):
            stored.setdefault(name, {})[kind.partition("/")[2]] = record
    groups = {id(p): group for group in applied.optimizer.param_groups for p in group["params"]}
    numbers = {key: value for rank in manifest.rank_states for key, value in rank.get("numbers", {}).items()}
    for param, names in stepped_names(applied):
        names = sorted(names, key=lambda name: not applied.whole.shapes[name])
        kinds = {key: (name, record) for name in reversed(names) for key, record in stored.get(name, {}).items()}
        if not kinds:
            continue
        stepped = param if applied.optimizer_offload is None else applied.optimizer_offload.host_copy(param)
        before, state = applied.optimizer.state.get(stepped, {}), dict[str, Any]()
        applied.optimizer.state[stepped] = state
        for key, (name, record) in kinds.items():
            dtype, whole = DTYPES[record.dtype], applied.whole.shapes[name]
            shape, device = stepped.shape if record.shape == whole else torch.Size(record.shape), stepped.device
            if not record.shape and (whole or key in _SCALAR_STATES):
                on_device = groups[id(stepped)].get("fused") or groups[id(stepped)].get("capturable")
                shape, device = torch.Size(), stepped.device if on_device else torch.device("cpu")
            known = before.get(key)
            is_alike = isinstance(known, Tensor) and (known.shape, known.dtype, known.device) == (shape, dtype, device)
            state[key] = known if is_alike else torch.zeros(shape, dtype=dtype, device=device)
        state.update({key.rpartition("/")[2]: value for key, value in numbers.items() if key.rpartition("/")[0] == names[0]})
