"""Saving and loading a training state: Meshwright's checkpoints beside torch's distributed ones (DCP) and `torch.save`, in turns in one process.

The state is that of a model of linear layers with AdamW, in float32. For each way: how long a step has to wait, how long until the checkpoint is on
the disk, how long loading takes; and what the disk itself reaches with `dd` and a flush.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.execute.save_state import CheckpointSaver
from meshwright.execute.session import Session
from meshwright.execute.session_state import describe_session, restore_session

WIDTH = 2048
Timed = dict[str, float]


class Bench:
    """One model with its state, and every way to save it."""

    def __init__(self, gigabytes: float, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder
        layers = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
        with torch.device(device):
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.session = Session(Plan("bench", 8, Mesh(), device=device), self.model, self.optimizer)
        self._train()
        self.bytes = 3 * sum(p.nbytes for p in self.model.parameters())
        self.saver = CheckpointSaver(self.session.applied, folder / "ours", {}, lambda steps: steps[:-1])
        pinned = device == "cuda"
        self.dcp_stager: Any = DefaultStager(StagingOptions(pinned, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=pinned))

    def _train(self) -> None:
        x = torch.randn(8, WIDTH, device=self.device)
        self.session.step(x, lambda model, batch: model(batch).square().mean())

    def _sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _timed(self, function: Callable[[], Any]) -> float:
        self._sync()
        started = time.perf_counter()
        function()
        self._sync()
        return time.perf_counter() - started

    def ours(self) -> Timed:
        self._train()  # another step: checkpoints are called after it
        state = describe_session(self.session, {})
        stall = self._timed(lambda: self.saver.save(state))
        saved = stall + self._timed(self.saver.wait)
        assert not any(report.error for report in self.saver.take_reports())
        return {"stall_s": stall, "save_s": saved, "load_s": self._timed(lambda: restore_session(self.session, self.folder / "ours"))}

    def dcp_async(self) -> Timed:
        path, state = self._fresh("dcp-async"), self._state()
        response: list[Any] = []

        def save() -> None:
            response.append(dcp.async_save(state, checkpoint_id=path, async_stager=self.dcp_stager))

        try:
            stall = self._timed(save)
        except KeyError:  # torch 2.11's stager does not pin what it shares: the older one does
            self.dcp_stager = BlockingAsyncStager(cache_staged_state_dict=True)
            stall = self._timed(save)
        saved = stall + self._timed(lambda: getattr(response[0], "upload_completion", response[0]).result())
        return {"stall_s": stall, "save_s": saved, "load_s": self._dcp_load(path)}

    def dcp_sync(self) -> Timed:
        path, state = self._fresh("dcp"), self._state()
        saved = self._timed(lambda: dcp.save(state, checkpoint_id=path))
        return {"stall_s": saved, "save_s": saved, "load_s": self._dcp_load(path)}

    def torch_save(self) -> Timed:
        path = self._fresh("torch") / "state.pt"
        path.parent.mkdir()

        def save() -> None:
            with path.open("wb") as file:
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

        def load() -> None:
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

        saved = self._timed(save)
        return {"stall_s": saved, "save_s": saved, "load_s": self._timed(load)}

    def _state(self) -> dict[str, Any]:
        """The same tensors, by name: DCP's stager cannot copy everything that an optimizer's own state dict holds."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        states = {f"{names[id(p)]}/{key}": value for p, state in self.optimizer.state.items() for key, value in state.items()}
        return {**{name: p.detach() for name, p in self.model.named_parameters()}, **states}

    def _dcp_load(self, path: Path) -> float:
        return self._timed(lambda: dcp.load(self._state(), checkpoint_id=path))

    def _fresh(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name

    def disk_rate(self) -> float:
        """Bytes a second that `dd` writes and flushes."""
        megabytes = max(64, min(self.bytes // 2**20, 2048))
        path = self.folder / "dd"
        seconds = self._timed(
            lambda: subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={megabytes}", "conv=fsync"], check=True, capture_output=True)
        )
        path.unlink()
        return megabytes * 2**20 / seconds


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the state.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the first, which is shown apart.")] = 3,
    only: Annotated[str | None, typer.Option(help="Some of the ways, with commas between them.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to write; a temporary folder unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Example: python bench/checkpoint.py --gigabytes 0.5 --rounds 2"""
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    home = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=folder))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method=f"file://{home / 'store'}", rank=0, world_size=1)
    bench = Bench(gigabytes, device, home)
    ways = {"Meshwright": bench.ours, "DCP async": bench.dcp_async, "DCP": bench.dcp_sync, "torch.save": bench.torch_save}
    ways = {name: way for name, way in ways.items() if only is None or name in only.split(",")}
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    try:
        for index in range(rounds + 1):
            for name in [n for n in (*list(ways)[index % len(ways) :], *list(ways)[: index % len(ways)]) if n not in failed]:
                try:
                    found[name].append(ways[name]())
                except Exception as error:  # a peer that does not run here leaves the others
                    failed[name] = f"{type(error).__name__}: {error}"
                gc.collect()
        rate = bench.disk_rate()
    finally:
        dist.destroy_process_group()
        shutil.rmtree(home, ignore_errors=True)
    result = {
        "device": device,
        "bytes": bench.bytes,
        "disk_bytes_per_s": rate,
        "ways": {name: _summary(times) for name, times in found.items() if name not in failed},
        "failed": failed,
    }
    print(json.dumps(result)) if as_json else _show(result)


def _summary(times: list[Timed]) -> dict[str, float]:
    later = times[1:]
    return {"first_stall_s": times[0]["stall_s"], **{key: statistics.median(t[key] for t in later) for key in ("stall_s", "save_s", "load_s")}}


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['bytes'] / 1e9:.1f} GB on {result['device']}; the disk writes {result['disk_bytes_per_s'] / 1e9:.2f} GB/s")
    for column in ("", "a step waits, first", "then", "until saved", "GB/s", "load", "GB/s"):
        table.add_column(column)
    for name, row in result["ways"].items():
        rates = (result["bytes"] / row[key] / 1e9 for key in ("save_s", "load_s"))
        save, load = (f"{rate:.2f}" for rate in rates)
        table.add_row(name, *(f"{row[key]:.3f} s" for key in ("first_stall_s", "stall_s", "save_s")), save, f"{row['load_s']:.3f} s", load)
    Console().print(table)
    for name, reason in result["failed"].items():
        Console().print(f"{name} failed: {reason}", markup=False)


if __name__ == "__main__":
    typer.run(main)
