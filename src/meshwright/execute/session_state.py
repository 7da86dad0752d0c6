"""A session's state: what there is beside tensors (steps done, loss scale, optimizer settings, random generators), and saving and loading it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import Manifest
from meshwright.core.errors import RequestError
from meshwright.core.serialization import to_data
from meshwright.execute.averaged_buffers import own_buffers, set_buffers
from meshwright.execute.load_state import load_tensors, open_newest, read_whole
from meshwright.execute.random_state import random_state, set_random_state, state_from_text, state_to_text
from meshwright.execute.save_state import SaveState
from meshwright.execute.session import Session
from meshwright.execute.state_dtypes import DTYPES, NAMES
from meshwright.execute.state_pieces import optimizer_numbers

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # of an optimizer: they decide where its state is, not what it computes
# Keys of what JSON has not: infinities and NaN, counters, and mappings whose keys are numbers.
_FLOAT, _COUNTER, _ITEMS = ".float", ".counter", ".items"


def describe_session(session: Session, run: Mapping[str, Any], step: int | None = None) -> SaveState:
    """The session's state, and plain data of the run that goes with it. `step` is the checkpoint's; the session's own unless given."""
    optimizer, scaler = session.optimizer, session.loss_scaler
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    own = {
        "seed": session.seed,
        "steps_done": session.steps_done,
        "optimizer": type(optimizer).__name__,
        "param_groups": [{key: to_plain(value, f"the optimizer's {key}") for key, value in group.items()} for group in groups],
        "loss_scale": [scaler.value, scaler.good_steps] if scaler is not None else None,
    }
    rank = {"random": random_state(), "numbers": optimizer_numbers(session.applied)}
    plain = {key: to_plain(value, key) for key, value in run.items()}
    return SaveState(session.steps_done if step is None else step, {"session": own, **plain}, rank)


@contextmanager
def unaveraged(session: Session, state: SaveState) -> Iterator[SaveState]:
    """The state with this rank's own buffers, which a save averages: a run that goes on from it is, to the last bit, one that was never saved. They
    are what they were when the block ends. Collective."""
    own = own_buffers(session.applied)
    texts = {name: _tensor_to_text(buffer) for name, buffer in own.items()}
    yield replace(state, rank={**state.rank, "buffers": texts}) if own else state
    set_buffers(session.applied, own)


def _tensor_to_text(tensor: Tensor) -> tuple[str, str, list[int]]:
    return state_to_text(tensor.cpu().contiguous().view(-1).view(torch.uint8)), NAMES[tensor.dtype], list(tensor.shape)


def _tensor_from_text(text: str, dtype: str, shape: list[int]) -> Tensor:
    return state_from_text(text).view(DTYPES[dtype]).view(shape)


def restore_session(session: Session, root: Path, step: int | None = None) -> tuple[Manifest, list[str]]:
    """Load the newest whole checkpoint in `root`, or the one of `step`, whatever plan and number of ranks wrote it. Returns its manifest, and what
    was wrong with newer ones. Collective."""
    folder, manifest, problems = open_newest(session.applied, root, step)
    _load_session(session, folder, manifest)
    return manifest, problems


def restore_first_whole(session: Session, folders: Sequence[Path]) -> tuple[int, Manifest | None, list[str]]:
    """Load the first of these checkpoints that is whole. Returns its index and manifest, and what was wrong with those before it; without any,
    their number and None. Collective."""
    problems: list[str] = []
    for index, folder in enumerate(folders):
        manifest, wrong = read_whole(session.applied, folder)
        if manifest is not None:
            _load_session(session, folder, manifest)
            return index, manifest, problems
        problems += wrong
    return len(folders), None, problems


def _load_session(session: Session, folder: Path, manifest: Manifest) -> None:
    own, kind = from_plain(manifest.state["session"]), type(session.optimizer).__name__
    if own["optimizer"] != kind:
        raise RequestError(f"{folder}: it was saved with {own['optimizer']}, and the optimizer is {kind} now: use {own['optimizer']}")
    groups = session.optimizer.param_groups
    if len(groups) != len(own["param_groups"]):
        raise RequestError(f"{folder}: its optimizer has {len(own['param_groups'])} groups of parameters, and {len(groups)} now")
    load_tensors(session.applied, folder, manifest)
    for group, settings in zip(groups, own["param_groups"], strict=True):
        kept = {key: value for key, value in settings.items() if key not in _IMPLEMENTATION}
        group.update({key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in kept.items()})
    if session.loss_scaler is not None and own["loss_scale"] is not None:
        session.loss_scaler.value, session.loss_scaler.good_steps = own["loss_scale"]
    session.steps_done = own["steps_done"]
    rank, is_same_plan = session.applied.groups.rank, manifest.plan == to_data(session.applied.plan)
    set_random_state(manifest.rank_states[rank if is_same_plan else 0]["random"])
    if is_same_plan:
        buffers = manifest.rank_states[rank].get("buffers", {})
        set_buffers(session.applied, {name: _tensor_from_text(*text) for name, text in buffers.items()})


def from_plain(value: Any) -> Any:
    """The opposite of `to_plain`, but for tuples, which come back as lists."""
    if isinstance(value, Mapping):
        if _COUNTER in value:
            return Counter(dict(value[_COUNTER]))
        if _ITEMS in value:
            return {key: from_plain(item) for key, item in value[_ITEMS]}
        return float(value[_FLOAT]) if _FLOAT in value else {key: from_plain(item) for key, item in value.items()}
    return [from_plain(item) for item in value] if isinstance(value, list) else value


def to_plain(value: Any, what: str) -> Any:
    """The value as JSON has it, or an error that names it."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Counter):  # of a schedule with milestones
        return {_COUNTER: [[key, count] for key, count in value.items()]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_plain(item, f"{what}.{key}") for key, item in value.items()}
    if isinstance(value, Mapping) and all(isinstance(key, int) for key in value):
        return {_ITEMS: [[key, to_plain(item, f"{what}.{key}")] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, what) for item in value]
    if hasattr(value, "item") and getattr(value, "numel", lambda: 0)() == 1:
        return value.item()
    raise RequestError(f"{what} is a {type(value).__name__}, which cannot be saved: a checkpoint holds numbers, texts, lists and tensors")
