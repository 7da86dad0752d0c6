"""Saves a run's state while it trains: a step waits for a copy into host memory, threads write it, and one rename makes the checkpoint visible.

[Note: a save]
All ranks meet once: the first rank makes the folder and looks at the disk. Then each rank copies the pieces that it is to write, and a thread of its
own writes them to one file, and beside it what the manifest needs to know. The first rank's thread waits for all of these, writes the manifest, and
renames the folder. Nothing is sent between ranks by threads: training goes on, and its collectives have an order. The folder of checkpoints must be
one that all ranks see.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import checkpoint_folder
from meshwright.checkpoint.manifest import FileRecord, Manifest, PieceRecord, TensorRecord, file_name, write_manifest
from meshwright.checkpoint.tensor_file import TensorSpec, write_tensor_file
from meshwright.core.errors import RunError
from meshwright.core.quantities import show_bytes
from meshwright.core.serialization import from_data, to_data
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.averaged_buffers import average_buffers
from meshwright.execute.exchange import broadcast_data
from meshwright.execute.state_dtypes import NAMES, as_bytes, chunks_of
from meshwright.execute.state_pieces import StateCatalog, StatePiece, current_catalog, residual_pieces, state_pieces

_SPARE_BYTES = 2**20  # of the disk, beside the state: manifest and folders
_STAGING_FRACTION = 0.5  # of the host's free memory; a larger state is written while training waits
_POLL_S = 0.02
_ALIGNMENT = 64


@dataclass(frozen=True)
class SaveReport:
    """How a save went: seconds that training waited, seconds until it was visible, its bytes, and why it failed, if it did."""

    step: int
    stalled_s: float
    seconds: float
    bytes: int
    error: str = ""


@dataclass(frozen=True)
class SaveState:
    """What a checkpoint holds beside tensors: of the run, the same on all ranks, and of this rank."""

    step: int
    run: Mapping[str, Any]
    rank: Mapping[str, Any]


class Staging:
    """Host memory for the copy that a save is written from, and the thread that writes it. Savers of one run share it: one writes at a time."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.thread: threading.Thread | None = None

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None


class CheckpointSaver:
    """Writes checkpoints of one run into `root`. `versions` names the software; `steps_to_remove` says which to remove after a save; `noun` is what
    messages call a save."""

    def __init__(
        self, applied: AppliedPlan, root: Path, versions: Mapping[str, str], steps_to_remove: Callable[[Sequence[int]], list[int]],
        *, staging: Staging | None = None, noun: str = "checkpoint",
    ) -> None:  # fmt: skip
        self.applied, self.root, self.noun = applied, root, noun
        self.staging = staging if staging is not None else Staging()
        self._versions, self._steps_to_remove = dict(versions), steps_to_remove
        self._reports: list[SaveReport] = []

    def save(self, state: SaveState, *, wait: bool = False) -> None:
        """Save the state as it is now. Collective. What fails is a report, not an error: training goes on."""
        started = time.monotonic()
        self.wait()
        average_buffers(self.applied)
        pieces = [*state_pieces(self.applied), *residual_pieces(self.applied)]
        catalog = current_catalog(self.applied, pieces)
        world = self.applied.groups.world
        error = self._prepare_folder(state.step, catalog) if world.rank == 0 else ""
        error = broadcast_data(world, error, self.applied.plan.device, "state/save")
        if error:
            self._reports.append(SaveReport(state.step, time.monotonic() - started, 0.0, 0, error))
            return
        owned = sorted(catalog.owned(pieces), key=lambda piece: -piece.view.element_size())
        staged = self._stage(owned, catalog)
        stalled = time.monotonic() - started
        job = _SaveJob(self, state, owned, staged, catalog, started, stalled)
        if staged is None or wait:
            job.run()
        else:
            self.staging.thread = threading.Thread(target=job.run, name=self.noun, daemon=True)
            self.staging.thread.start()

    def wait(self) -> None:
        """Wait until this rank's part of the last save is on the disk, and on the first rank the whole."""
        self.staging.wait()

    @property
    def is_writing(self) -> bool:
        """Whether a save of this or of a saver that shares its staging is being written."""
        return self.staging.thread is not None and self.staging.thread.is_alive()

    def take_reports(self) -> list[SaveReport]:
        """Saves that have ended since the last call. On ranks other than the first they say how this rank's part went."""
        reports, self._reports = self._reports, []
        return reports

    def _prepare_folder(self, step: int, catalog: StateCatalog) -> str:
        needed = _SPARE_BYTES + sum(entry.box.numel * getattr(torch, entry.dtype).itemsize for entry in catalog.entries)
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            checkpoint_folder.remove_leftovers(self.root)
            free = shutil.disk_usage(self.root).free
            if free < needed:
                return f"the {self.noun} of step {step} needs {show_bytes(needed)}, and {show_bytes(free)} are free in {self.root}"
            checkpoint_folder.begin_save(self.root, step)
        except OSError as error:
            return f"the {self.noun} of step {step} cannot be written to {self.root}: {(error.strerror or str(error)).lower()}"
        return ""

    def _stage(self, owned: Sequence[StatePiece], catalog: StateCatalog) -> list[Tensor] | None:
        """Copies of the pieces in host memory that the next save uses again; None where they are too large for it."""
        offsets, total = [], 0
        for piece in owned:
            offsets.append(total)
            total += -(-piece.view.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self.staging.buffer
        if buffer is None or buffer.numel() < total:
            self.staging.buffer = buffer = None
            if total > _free_host_memory() * _STAGING_FRACTION / catalog.ranks_on_host:
                return None
            self.staging.buffer = buffer = torch.empty(total, dtype=torch.uint8, pin_memory=self.applied.plan.device == "cuda")
        copies = []
        for piece, offset in zip(owned, offsets, strict=True):
            view = piece.view
            copies.append(buffer[offset : offset + view.nbytes].view(view.dtype).view(view.shape))
            copies[-1].copy_(view, non_blocking=True)
        if self.applied.plan.device == "cuda":
            torch.cuda.current_stream().synchronize()
        return copies


class _SaveJob:
    """One save's writing, in a thread."""

    def __init__(
        self, saver: CheckpointSaver, state: SaveState, owned: Sequence[StatePiece], staged: Sequence[Tensor] | None, catalog: StateCatalog,
        started: float, stalled: float,
    ) -> None:  # fmt: skip
        self.saver, self.state, self.owned, self.staged, self.catalog, self.started, self.stalled = (
            saver, state, owned, staged, catalog, started, stalled,
        )  # fmt: skip
        self.rank, self.world = saver.applied.groups.world.rank, saver.applied.groups.world.size
        self.folder = checkpoint_folder.saving_folder(saver.root, state.step)

    def run(self) -> None:
        error, written, seconds = "", 0, 0.0
        try:
            written = self._write_own()
            if self.rank == 0:
                written = self._finish()
            seconds = time.monotonic() - self.started
        except Exception as failure:  # in a thread: what is not reported is lost
            error = f"the {self.saver.noun} of step {self.state.step} was not written: {getattr(failure, 'strerror', None) or failure}".rstrip(".")
            if self.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
        if self.rank == 0 and not error:
            self._remove_older()
        if self.staged is None:
            self.stalled = time.monotonic() - self.started
        self.saver._reports.append(SaveReport(self.state.step, self.stalled, seconds, written, error))

    def _write_own(self) -> int:
        path = self.folder / file_name(self.rank)
        specs = [TensorSpec(piece.id, NAMES[piece.view.dtype], tuple(piece.view.shape)) for piece in self.owned]
        tensors: Sequence[Tensor] = self.staged if self.staged is not None else [piece.view for piece in self.owned]
        try:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            parts = ((as_bytes(part) for part in chunks_of(tensor)) for tensor in tensors)
            written = write_tensor_file(path, specs, parts, {"format": "pt"})
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()  # a full disk then has room for the line that says so
            self._write_note({"error": f"rank {self.rank}: {error.strerror}"})
            raise
        pieces = tuple(
            PieceRecord(piece.id, piece.tensor, piece.box.start, piece.box.size, spec.nbytes, digest)
            for piece, spec, digest in zip(self.owned, specs, written.tensor_hashes, strict=True)
        )
        record = FileRecord(path.name, written.bytes, written.header_hash, pieces)
        self._write_note({"file": to_data(record), "state": self.state.rank})
        return written.bytes

    def _write_note(self, data: Any) -> None:
        """What the first rank is to know of this rank's file, visible at once."""
        note = self._note_path(self.rank)
        partial = note.with_suffix(".partial")
        partial.write_text(json.dumps(data))
        partial.rename(note)

    def _note_path(self, rank: int) -> Path:
        return self.folder / f"{file_name(rank)}.json"

    def _finish(self) -> int:
        """On the first rank: wait for all files, write the manifest, and make the checkpoint visible."""
        notes = [self._wait_for_note(rank) for rank in range(self.world)]
        files = tuple(from_data(FileRecord, note["file"], f"the note of {file_name(rank)}") for rank, note in enumerate(notes))
        dtypes = {(e.kind, e.name): TensorRecord(NAMES[getattr(torch, e.dtype)], e.shape) for e in self.catalog.entries}
        plan = self.saver.applied.plan
        manifest = Manifest(
            self.state.step, time.time(), plan.model, self.world, self.saver._versions, to_data(plan),
            {f"{kind}/{name}": record for (kind, name), record in dtypes.items()}, files, dict(self.state.run),
            tuple(note["state"] for note in notes),
        )  # fmt: skip
        for rank in range(self.world):
            self._note_path(rank).unlink()
        write_manifest(self.folder, manifest)
        checkpoint_folder.publish(self.saver.root, self.state.step)
        return manifest.bytes

    def _remove_older(self) -> None:
        with contextlib.suppress(OSError):  # the next save tries again
            for step in self.saver._steps_to_remove(checkpoint_folder.saved_steps(self.saver.root)):
                checkpoint_folder.remove_checkpoint(self.saver.root, step)

    def _wait_for_note(self, rank: int) -> Any:
        path, limit_s = self._note_path(rank), self.saver.applied.plan.sync.timeout_s
        while not path.exists():
            if not self.folder.exists():
                raise RunError("its folder was removed while it was written")
            progress = self._last_change(rank)
            if time.time() - progress > limit_s:
                hint = f"checkpoints need a folder that all ranks see, and {self.saver.root} may not be one"
                raise RunError(f"nothing came from rank {rank} for {limit_s:.0f} s: {hint}")
            time.sleep(_POLL_S)
        note = json.loads(path.read_text())
        if "error" in note:
            raise RunError(note["error"])
        return note

    def _last_change(self, rank: int) -> float:
        """When a rank's file last grew; before it is there, when the folder was made."""
        for path in (self.folder / file_name(rank), self.folder):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime
        return 0.0


def _free_host_memory() -> int:
    """Bytes that this host can give without swapping, as the kernel estimates them."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
