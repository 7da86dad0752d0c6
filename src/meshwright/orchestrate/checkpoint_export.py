"""A checkpoint as other software reads it: a Hugging Face folder, one file for `torch.load`, or torch's distributed checkpoint. Needs no run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright import zoo
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.tensor_file import TensorSpec
from meshwright.checkpoint.weights_folder import write_weights
from meshwright.core.box import whole_box
from meshwright.core.errors import RequestError
from meshwright.describe.fake_tensors import cached_fake_model
from meshwright.execute.state_dtypes import DTYPES, NAMES, as_bytes, chunks_of
from meshwright.execute.state_pieces import BUFFER, OPTIMIZER, PARAMETER
from meshwright.execute.stored_tensors import StoredTensors
from meshwright.zoo.weight_layouts import WeightLayout, weight_layout

FORMATS = ("hf", "torch", "dcp")


def export_checkpoint(source: Path, manifest: Manifest, folder: Path, to: str) -> None:
    """Write a checkpoint's weights (hf), or weights and optimizer state (torch, dcp), into a new folder."""
    with StoredTensors(source, manifest) as stored:
        if to == "hf":
            _export_weights(stored, manifest, folder)
            return
        state = _nested(stored, manifest)
    folder.mkdir(parents=True)
    if to == "torch":
        torch.save(state, folder / "state.pt")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no ranks
            save(state, checkpoint_id=folder, no_dist=True)


def _export_weights(stored: StoredTensors, manifest: Manifest, folder: Path) -> None:
    layout = _layout(manifest)
    keys = [key for key in manifest.tensors if key.startswith((f"{PARAMETER}/", f"{BUFFER}/"))]

    def tensors() -> Iterator[Tensor]:
        for key in keys:
            yield layout.to_folder(_name(key), _whole(stored, key))

    specs = []
    for key in keys:
        record = manifest.tensors[key]
        specs.append(TensorSpec(layout.rename(_name(key)), record.dtype, layout.shape_in_folder(_name(key), record.shape)))
    write_weights(folder, specs, ((as_bytes(part) for part in chunks_of(tensor)) for tensor in tensors()), extras=layout.write_extras)


def _layout(manifest: Manifest) -> WeightLayout:
    """The layout of the model that the run names; a script's model keeps its own names."""
    name = (manifest.state or {}).get("config", {}).get("model")
    if name is None:
        return WeightLayout()
    try:
        task = zoo.load(name)
        source = Path(name.removeprefix("hf:"))
        return weight_layout(cached_fake_model(task)[0], source if name.startswith("hf:") and source.is_dir() else None)
    except RequestError:
        return WeightLayout()


def _nested(stored: StoredTensors, manifest: Manifest) -> dict[str, Any]:
    """{"model": {NAME: tensor}, "optimizer": {NAME: {KEY: tensor}}, "step": number}."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}, "step": manifest.step}
    for key in manifest.tensors:
        kind, name = key.partition("/")[0], _name(key)
        if kind in (PARAMETER, BUFFER):
            state["model"][name] = _whole(stored, key)
        elif kind == OPTIMIZER:
            state["optimizer"].setdefault(name, {})[key.split("/")[1]] = _whole(stored, key)
    return state


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _whole(stored: StoredTensors, key: str) -> Tensor:
    record = stored.tensors[key]
    whole = torch.empty(record.shape, dtype=DTYPES[record.dtype])
    assert NAMES[whole.dtype] == record.dtype
    if whole.numel():
        stored.fill(key, whole_box(record.shape), whole)
    return whole
