"""Weights of torch's distributed checkpoints and of `torch.save` become safetensors; nothing in them is executed."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.core.errors import RequestError
from meshwright.execute.stored_tensors import open_weights
from meshwright.orchestrate.checkpoint_import import import_weights

safetensors = pytest.importorskip("safetensors.torch")
MODEL = {"a.weight": torch.arange(12.0).view(4, 3), "a.bias": torch.ones(2, dtype=torch.bfloat16), "count": torch.tensor(3)}


class Call:
    """A pickle that runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def write_dcp(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in safetensors.load_file(file).items()}


def assert_is_model(folder: Path) -> None:
    found = read(folder)
    assert sorted(found) == sorted(MODEL) and all(torch.equal(found[name], tensor) for name, tensor in MODEL.items())


@pytest.mark.parametrize("state", [{"model": MODEL, "optimizer": {"a": torch.zeros(3)}, "step": 7}, {"app": {"model": MODEL}}, MODEL], ids=str)
def test_a_distributed_checkpoint(tmp_path: Path, state: dict[str, Any]) -> None:
    import_weights(write_dcp(tmp_path / "dcp", state), tmp_path / "weights")
    assert_is_model(tmp_path / "weights")


def test_a_key_that_is_named(tmp_path: Path) -> None:
    source = write_dcp(tmp_path / "dcp", {"model": {"x": torch.zeros(1)}, "ema": MODEL})
    import_weights(source, tmp_path / "weights", key="ema")
    assert_is_model(tmp_path / "weights")
    with pytest.raises(RequestError, match="no tensors below teacher: give --key with one of ema, model"):
        import_weights(source, tmp_path / "other", key="teacher")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "state", [MODEL, {"model": MODEL, "epoch": 3}, {"state_dict": MODEL, "args": {"lr": 0.1}}], ids=["flat", "model", "state_dict"]
)
def test_a_file_of_torch_save(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save(state, tmp_path / "file.pt")
    import_weights(tmp_path / "file.pt", tmp_path / "weights")
    assert_is_model(tmp_path / "weights")


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    torch.save({"model": MODEL, "args": Call(mark)}, tmp_path / "file.pt")
    with pytest.raises(RequestError, match="--trust"):
        import_weights(tmp_path / "file.pt", tmp_path / "weights")
    dcp = write_dcp(tmp_path / "dcp", {"model": MODEL})
    (dcp / ".metadata").write_bytes(pickle.dumps(Call(mark)))
    with pytest.raises(RequestError, match=r"it names posix.system, which no distributed checkpoint needs; --trust"):
        import_weights(dcp, tmp_path / "weights")
    chunk = write_dcp(tmp_path / "chunk", {"model": MODEL})
    (file,) = chunk.glob("*.distcp")
    torch.save(Call(mark), tmp_path / "evil.pt")
    evil = (tmp_path / "evil.pt").read_bytes()
    file.write_bytes((evil + file.read_bytes())[: file.stat().st_size])
    with pytest.raises(RequestError):
        import_weights(chunk, tmp_path / "weights")
    assert not mark.exists() and not (tmp_path / "weights").exists()
    import_weights(tmp_path / "file.pt", tmp_path / "weights", trust=True)
    assert mark.exists()
    assert_is_model(tmp_path / "weights")


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "missing.distcp"])
def test_files_outside_of_the_folder_are_not_read(tmp_path: Path, path: str) -> None:
    dcp = write_dcp(tmp_path / "dcp", {"model": MODEL})
    metadata = pickle.loads((dcp / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    (dcp / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RequestError, match=r"no file of the folder|is not in the folder"):
        import_weights(dcp, tmp_path / "weights")


def test_sizes_that_lie_are_refused(tmp_path: Path) -> None:
    dcp = write_dcp(tmp_path / "dcp", {"model": MODEL})
    good = (dcp / ".metadata").read_bytes()
    for change in ("size", "chunk", "length"):
        metadata = pickle.loads(good)
        entry = metadata.state_dict_metadata["model.a.weight"]
        if change == "size":
            entry.size = torch.Size([2**30, 2**30])
        elif change == "chunk":
            entry.chunks[0].sizes = entry.size = torch.Size([2**20, 2**20])
        else:
            next(info for index, info in metadata.storage_data.items() if index.fqn == "model.a.weight").length = 2**60
        (dcp / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(RequestError, match=r"a\.weight"):
            import_weights(dcp, tmp_path / "weights")


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    """200 flips and cuts: a refusal, or a folder; never another error."""
    generator = random.Random(3)
    source = write_dcp(tmp_path / "dcp", {"model": MODEL})
    torch.save(MODEL, tmp_path / "file.pt")
    files = [source / ".metadata", *source.glob("*.distcp"), tmp_path / "file.pt"]
    for draw in range(200):
        file = generator.choice(files)
        before = bytearray(file.read_bytes())
        changed = bytearray(before)
        at = generator.randrange(len(changed))
        changed[at] ^= 1 << generator.randrange(8)
        file.write_bytes(changed if draw % 2 else changed[:at])
        with contextlib.suppress(RequestError):
            import_weights(tmp_path / "file.pt" if file.suffix == ".pt" else source, tmp_path / f"weights-{draw}")
        file.write_bytes(before)


def test_what_is_exported_comes_back(tmp_path: Path) -> None:
    import_weights(write_dcp(tmp_path / "dcp", {"model": MODEL}), tmp_path / "weights")
    weights = open_weights(tmp_path / "weights")
    assert sorted(weights.tensors) == sorted(MODEL)
    weights.close()
