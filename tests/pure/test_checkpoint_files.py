"""Checkpoint files: read by the safetensors library, whatever is changed in them is found and named, and nothing in them leads elsewhere."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import checkpoint_folder
from meshwright.checkpoint.checkpoint_folder import newest_whole, problems_of, publish, saved_steps, steps_to_remove
from meshwright.checkpoint.manifest import FILE_NAME, FileRecord, Manifest, PieceRecord, TensorRecord, file_name, read_manifest, write_manifest
from meshwright.checkpoint.tensor_file import TensorFile, TensorSpec, write_tensor_file
from meshwright.checkpoint.weights_folder import WeightsFolder
from meshwright.core.box import Box
from meshwright.core.errors import RequestError


def bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


TENSORS = {"a": torch.randn(6, 8), "b": torch.arange(10), "c": torch.randn(3, dtype=torch.bfloat16), "d": torch.tensor(2.5), "e": torch.empty(0, 4)}
NAMES = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16"}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Any:
    specs = [TensorSpec(key, NAMES[t.dtype], tuple(t.shape)) for key, t in tensors.items()]
    return write_tensor_file(path, specs, ([bytes_of(t)] for t in tensors.values()), {"format": "pt"})


def save(root: Path, step: int, seed: int = 0) -> Path:
    """A checkpoint of two files with two tensors, each in halves."""
    folder = checkpoint_folder.begin_save(root, step)
    values = {key: torch.randn(8, 4, generator=torch.Generator().manual_seed(seed + i)) for i, key in enumerate(("parameter/x", "optimizer/m/x"))}
    files = []
    for rank in range(2):
        half = {f"{key}[{4 * rank}:{4 * rank + 4},0:4]": t[4 * rank : 4 * rank + 4] for key, t in values.items()}
        written = write(folder / file_name(rank), half)
        pieces = tuple(
            PieceRecord(key, key.partition("[")[0], (4 * rank, 0), (4, 4), 64, digest)
            for key, digest in zip(half, written.tensor_hashes, strict=True)
        )
        files.append(FileRecord(file_name(rank), written.bytes, written.header_hash, pieces))
    tensors = {key: TensorRecord("F32", (8, 4)) for key in values}
    write_manifest(folder, Manifest(step, 0.0, "m", 2, {}, {"any": 1}, tensors, tuple(files), {"data": None}, ({}, {})))
    return publish(root, step)


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", TENSORS)
    for key, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(tensor, TENSORS[key]) and tensor.dtype == TENSORS[key].dtype


def test_boxes_are_read_from_what_the_library_writes_and_nothing_else(tmp_path: Path) -> None:
    whole = torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096)
    save_file({"w": whole, "other": torch.ones(100)}, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        before = file.bytes_read
        box = Box((3, 1024), (50, 2048))
        into = torch.empty(box.size)
        file.read_box(file.entries["w"], box, into.view(-1).view(torch.uint8).numpy())
        assert torch.equal(into, whole[box.slices()])
        assert file.bytes_read - before == into.nbytes
        narrow = Box((0, 5), (64, 3))  # runs of 12 bytes
        into = torch.empty(narrow.size)
        file.read_box(file.entries["w"], narrow, into.view(-1).view(torch.uint8).numpy())
        assert torch.equal(into, whole[narrow.slices()])


def test_a_checkpoint_appears_at_once_and_old_ones_go(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / ".saving-50").mkdir()
    assert saved_steps(tmp_path) == [10, 20, 30, 40]
    assert steps_to_remove([10, 20, 30, 40], 2) == [10, 20]
    assert steps_to_remove([10, 20, 30, 40], 1, keep_every=20, also_keep=[10]) == [30]
    assert newest_whole(tmp_path)[0] == 40
    save(tmp_path, 40, seed=9)  # a run that went on from an older one comes to the same step
    assert newest_whole(tmp_path)[0] == 40 and not list(tmp_path.glob(".*"))


def test_every_bit_flip_truncation_and_swap_is_found_and_named(tmp_path: Path) -> None:
    draws = random.Random(0)
    good = save(tmp_path / "good", 1)
    for draw in range(400):
        root = tmp_path / "bad"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "good", root)
        victim = root / "1" / draws.choice([FILE_NAME, file_name(0), file_name(1)])
        kind = draws.choice(["flip", "flip", "flip", "cut", "longer", "missing", "swap"])
        data = bytearray(victim.read_bytes())
        if kind == "flip":
            data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
            victim.write_bytes(data)
        elif kind == "cut":
            victim.write_bytes(data[: draws.randrange(len(data))])
        elif kind == "longer":
            victim.write_bytes(data + b"\0")
        elif kind == "missing":
            victim.unlink()
        else:
            victim = root / "1" / file_name(0)
            victim.write_bytes((good / file_name(1)).read_bytes())
        with pytest.raises(RequestError) as found:
            newest_whole(root)
        assert victim.name in str(found.value) or (kind == "missing" and victim.name == FILE_NAME), (draw, kind, str(found.value))


def test_readers_share_the_hashing(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    manifest = read_manifest(folder)
    data = bytearray((folder / file_name(1)).read_bytes())
    data[-1] ^= 1
    (folder / file_name(1)).write_bytes(data)
    found = [list(problems_of(folder, manifest, part, 3)) for part in range(3)]
    assert sum(map(bool, found)) == 1 and "optimizer/m/x[4:8,0:4]" in next(lines[0] for lines in found if lines)


def malicious(tmp_path: Path) -> dict[str, Path]:
    """Folders that try to be believed, by what they try."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        made[name] = tmp_path / name
        save(tmp_path / name, 1)
        return tmp_path / name / "1"

    def rewritten(name: str, change: Any) -> None:
        """A manifest whose checksum is right."""
        path = folder(name)
        manifest = read_manifest(path)
        (path / FILE_NAME).unlink()
        write_manifest(path, change(manifest))

    from dataclasses import replace

    rename = lambda text: lambda m: replace(m, files=(replace(m.files[0], name=text), m.files[1]))  # noqa: E731
    for index, text in enumerate(["../secret", "/etc/passwd", "a/../../b", "", "rank-00001.safetensors", "x" * 5000]):
        rewritten(f"name-{index}", rename(text))
    piece = lambda **new: lambda m: replace(m, files=(replace(m.files[0], pieces=(replace(m.files[0].pieces[0], **new),)), m.files[1]))  # noqa: E731
    for index, new in enumerate([{"start": (2**60, 0)}, {"size": (2**60, 4)}, {"start": (-1, 0)}, {"size": (4,)}, {"tensor": "parameter/none"}]):
        rewritten(f"piece-{index}", piece(**new))
    link = folder("link") / file_name(0)
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    manifest = folder("manifest-link") / FILE_NAME
    manifest.rename(tmp_path / "elsewhere.json")
    manifest.symlink_to(tmp_path / "elsewhere.json")
    fifo = folder("fifo") / file_name(0)
    fifo.unlink()
    os.mkfifo(fifo)
    (folder("pickle") / file_name(0)).write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/executed'\ntR.")
    deep = folder("deep") / FILE_NAME
    deep.write_text("[" * 200_000)
    (folder("newer") / FILE_NAME).write_text(json.dumps({"checksum": "", "format": 99}))
    headers = {
        "huge": (2**62).to_bytes(8, "little"),
        "huge-tensor": header({"t": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}}),
        "overflow": header({"t": {"dtype": "F32", "shape": [2**61, 2**61], "data_offsets": [0, 0]}}),
        "negative": header({"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}),
        "gap": header({"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8),
        "overlap": header({k: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for k in "ab"}, 8),
        "twice": b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        "deep-header": b"[" * 300_000,
        "number": b"7" * 64,
        "dtype": header({"t": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 8]}}, 8),
        "bools": header({"t": {"dtype": "U8", "shape": [True], "data_offsets": [0, True]}}, 1),
        "empty": b"",
    }
    for name, content in headers.items():
        text = content if name in ("huge", "empty") or content[8:9] == b"{" else len(content).to_bytes(8, "little") + content
        (folder(f"header-{name}") / file_name(0)).write_bytes(text)
    return made


def header(data: Any, extra: int = 0) -> bytes:
    text = json.dumps(data).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * extra


def test_folders_that_lie_are_refused_and_lead_nowhere(tmp_path: Path) -> None:
    folders = malicious(tmp_path)
    assert len(folders) >= 25
    opened: list[str] = []
    watching = [True]

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching[0]:
            return
        if event in ("os.system", "subprocess.Popen", "pickle.find_class", "marshal.loads", "os.exec"):
            opened.append(f"{event} {arguments}")
        if event == "open" and isinstance(arguments[0], str) and not str(arguments[0]).startswith(str(tmp_path)):
            opened.append(str(arguments[0]))

    sys.addaudithook(audit)
    try:
        for name, root in folders.items():
            opened.clear()
            with pytest.raises(RequestError) as found:
                newest_whole(root)
            assert "\n" not in str(found.value) and len(str(found.value)) < 1000, name
            assert opened == [], name
    finally:
        watching[0] = False


def test_an_index_that_names_other_folders_is_refused(tmp_path: Path) -> None:
    for name in ("../x.safetensors", "/x.safetensors", "a/b.safetensors", "x.bin"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(RequestError, match="names no files of tensors beside it"):
            WeightsFolder(tmp_path)
