"""A run's checkpoints: `checkpoints/STEP/`, each visible by one rename, kept or pruned, found whole or named with what is wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshwright.checkpoint.manifest import FILE_NAME, FileRecord, Manifest, read_manifest
from meshwright.checkpoint.tensor_file import TensorFile
from meshwright.core.errors import RequestError

FOLDER_NAME = "checkpoints"
_SAVING, _REMOVING = ".saving-", ".removing-"


def saved_steps(root: Path) -> list[int]:
    """The steps that `root`, a folder called checkpoints, has checkpoints of, in order."""
    try:
        names = [path.name for path in root.iterdir() if path.name.isdecimal() and path.name.isascii() and path.is_dir()]
    except OSError:
        return []
    return sorted(int(name) for name in names if (root / name / FILE_NAME).exists())


def step_folder(root: Path, step: int) -> Path:
    return root / str(step)


def saving_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is written until it is whole."""
    return root / f"{_SAVING}{step}"


def begin_save(root: Path, step: int) -> Path:
    """An empty folder for a new checkpoint; what an interrupted save has left is removed."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_leftovers(root)
    folder = saving_folder(root, step)
    folder.mkdir(mode=0o700)
    return folder


def publish(root: Path, step: int) -> Path:
    """Make a written checkpoint visible. One of the same step, which a run has that went on from an older one, gives way to it."""
    source, target = saving_folder(root, step), step_folder(root, step)
    _flush_folder(source)
    if target.exists():
        aside = root / f"{_REMOVING}{step}"
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    source.rename(target)
    _flush_folder(root)
    remove_leftovers(root)
    return target


def remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        if path.name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(root: Path, step: int) -> None:
    """Make a checkpoint invisible by one rename, then delete it."""
    aside = root / f"{_REMOVING}{step}"
    step_folder(root, step).rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def steps_to_remove(steps: Iterable[int], keep_last: int, keep_every: int = 0, also_keep: Iterable[int] = ()) -> list[int]:
    """Which checkpoints a run removes: all but the last `keep_last`, every `keep_every`-th step, and those named."""
    ordered, kept = sorted(steps), set(also_keep)
    kept |= set(ordered[-keep_last:] if keep_last else ())
    return [step for step in ordered if step not in kept and not (keep_every and step and step % keep_every == 0)]


def problems_of(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> Iterator[str]:
    """What is wrong with a checkpoint's files, a line each; nothing if it is whole. Of `parts` readers each hashes a share of the bytes."""
    shares = _shares(manifest, parts)[part]
    for file, keys in shares.items():
        yield from _problems_of_file(folder, file, keys)


def _shares(manifest: Manifest, parts: int) -> list[dict[FileRecord, set[str]]]:
    """Which pieces of which files each reader hashes: about equal bytes, and every file's header by somebody."""
    shares: list[dict[FileRecord, set[str]]] = [{} for _ in range(parts)]
    load = [0] * parts
    for file in manifest.files:
        shares[min(range(parts), key=load.__getitem__)].setdefault(file, set())
        for piece in file.pieces:
            reader = min(range(parts), key=load.__getitem__)
            shares[reader].setdefault(file, set()).add(piece.key)
            load[reader] += piece.bytes
    return shares


def _problems_of_file(folder: Path, record: FileRecord, keys: set[str]) -> Iterator[str]:
    try:
        with TensorFile(folder / record.name) as file:
            if file.size != record.bytes or file.header_hash() != record.header_hash:
                yield f"{file.path}: it is not the file that was written: {file.size} bytes, {record.bytes} expected"
                return
            for piece in record.pieces:
                entry = file.entries.get(piece.key)
                if entry is None:
                    yield f"{file.path}: it has no '{piece.key}'"
                elif piece.key in keys and file.hash_of(entry) != piece.hash:
                    yield f"{file.path}: the checksum of '{piece.key}' is wrong: its bytes were changed after they were written"
    except RequestError as error:
        yield str(error)
    except OSError as error:
        yield f"{folder / record.name}: {(error.strerror or str(error)).lower()}"


def newest_whole(root: Path) -> tuple[int, Manifest, list[str]]:
    """(step, manifest, what is wrong with newer ones) of the newest checkpoint whose files are all as they were written."""
    problems: list[str] = []
    for step in reversed(saved_steps(root)):
        try:
            manifest = read_manifest(step_folder(root, step))
            wrong = list(problems_of(step_folder(root, step), manifest))
        except RequestError as error:
            wrong = [str(error)]
        if not wrong:
            return step, manifest, problems
        problems += wrong
    found = f"; {problems[0]}" if problems else ""
    raise RequestError(f"{root}: there is no whole checkpoint in it{found}")


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
