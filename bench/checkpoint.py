"""Saving and loading a training state: Meshwright's checkpoints beside torch's distributed ones (DCP) and `torch.save`, in turns in one job.

The state is that of a model of linear layers with AdamW, in float32. For each way: how long a step has to wait, how long until the checkpoint is on
the disk, how long loading takes; and what the disk itself reaches with `dd` and a flush. With several ranks the state is replicated (dp) or sharded
(ZeRO-3; DCP then saves what FSDP2 holds), and each time is that of the slowest rank.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
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
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.execute.save_state import CheckpointSaver, SaveReport
from meshwright.execute.session import Session
from meshwright.execute.session_state import describe_session, restore_session

WIDTH = 2048
FOLDER = "MESHWRIGHT_BENCH_FOLDER"  # of the ranks
Timed = dict[str, float]


def linear_layers(gigabytes: float, device: torch.device) -> nn.Sequential:
    """Layers whose parameters and two AdamW states have so many gigabytes."""
    torch.manual_seed(0)
    with device:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH))))))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def dcp_stager(device: torch.device) -> Any:
    """What copies the state for DCP's asynchronous saves: into memory that the next save uses again, pinned on a GPU. In torch 2.11 the default one
    works once, and fails with a KeyError then."""
    on_gpu = device.type == "cuda"
    stager = DefaultStager(StagingOptions(on_gpu, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=on_gpu))
    try:
        for _ in range(2):
            stager.stage({"x": torch.zeros(8, device=device)})
    except KeyError:
        return BlockingAsyncStager(cache_staged_state_dict=on_gpu)  # its cache is always pinned
    return stager


class Bench:
    """One model with its state, and every way to save it."""

    def __init__(self, gigabytes: float, mesh: Mesh, folder: Path) -> None:
        self.rank, self.world, self.folder, self.mesh = dist.get_rank(), dist.get_world_size(), folder, mesh
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
        model = linear_layers(gigabytes, self.device)
        self.bytes = 3 * sum(p.nbytes for p in model.parameters())
        memory = MemoryPolicy(3 if mesh.shard > 1 else 0, tuple(str(i) for i in range(len(model))), precision="fp32")
        plan = Plan("bench", 8 * self.world, mesh, memory=memory, device=self.device.type)
        self.session = Session(plan, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        self._train()
        self.saver = CheckpointSaver(self.session.applied, folder / "ours", {}, lambda steps: steps[:-1])
        self.dcp_group = dist.new_group(
            backend="gloo"
        )  # its collectives run in a thread, and those of one group must come in the same order everywhere
        self.dcp_stager = dcp_stager(self.device)
        self.peer, self.peer_optimizer = (model, self.session.optimizer) if mesh.shard == 1 else self._peer(gigabytes)

    def _peer(self, gigabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The same model under FSDP2, whose state DCP is for."""
        from torch.distributed.fsdp import fully_shard

        model = linear_layers(gigabytes, self.device)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        one_step(model, optimizer, torch.randn(8, WIDTH, device=self.device))
        return model, optimizer

    def _train(self) -> None:
        x = torch.randn(8, WIDTH, device=self.device)
        self.session.step(x, lambda model, batch: model(batch).square().mean())

    def _timed(self, function: Callable[[], Any]) -> float:
        """Seconds of the slowest rank."""
        self._sync()
        dist.barrier()
        started = time.perf_counter()
        function()
        self._sync()
        return self._slowest(time.perf_counter() - started)

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _slowest(self, seconds: float) -> float:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def ours(self) -> Timed:
        self._train()  # another step: checkpoints are called after it
        state = describe_session(self.session, {})
        stall = self._timed(lambda: self.saver.save(state))
        self.saver.wait()
        (report,) = self.saver.take_reports()
        assert isinstance(report, SaveReport) and not report.error, report
        saved = self._slowest(report.seconds if self.rank == 0 else 0.0)  # until it is visible; older ones are removed afterwards
        return {"stall_s": stall, "save_s": saved, "load_s": self._timed(lambda: restore_session(self.session, self.folder / "ours"))}

    def dcp_async(self) -> Timed:
        path, state = self._fresh("dcp-async"), self._state()
        response: list[Any] = []

        def save() -> None:
            response.append(dcp.async_save(state, checkpoint_id=path, process_group=self.dcp_group, async_stager=self.dcp_stager))

        stall = self._timed(save)
        saved = stall + self._timed(lambda: getattr(response[0], "upload_completion", response[0]).result())
        return {"stall_s": stall, "save_s": saved, "load_s": self._dcp_load(path)}

    def dcp_sync(self) -> Timed:
        path, state = self._fresh("dcp"), self._state()
        saved = self._timed(lambda: dcp.save(state, checkpoint_id=path, process_group=self.dcp_group))
        return {"stall_s": saved, "save_s": saved, "load_s": self._dcp_load(path)}

    def torch_save(self) -> Timed:
        """The first rank writes all: this needs whole tensors."""
        path = self._fresh("torch") / "state.pt"

        def save() -> None:
            if self.rank == 0:
                path.parent.mkdir()
                with path.open("wb") as file:
                    torch.save({"model": self.peer.state_dict(), "optimizer": self.peer_optimizer.state_dict()}, file)
                    file.flush()
                    os.fsync(file.fileno())
            dist.barrier()

        def load() -> None:
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.peer.load_state_dict(state["model"])
            self.peer_optimizer.load_state_dict(state["optimizer"])

        saved = self._timed(save)
        return {"stall_s": saved, "save_s": saved, "load_s": self._timed(load)}

    def _state(self) -> dict[str, Any]:
        """The same tensors, by name: DCP's stager cannot copy everything that an optimizer's own state dict holds."""
        names = {id(p): name for name, p in self.peer.named_parameters()}
        states = {f"{names[id(p)]}/{key}": value for p, state in self.peer_optimizer.state.items() for key, value in state.items()}
        return {**{name: p.detach() for name, p in self.peer.named_parameters()}, **states}

    def _dcp_load(self, path: Path) -> float:
        return self._timed(lambda: dcp.load(self._state(), checkpoint_id=path, process_group=self.dcp_group))

    def _fresh(self, name: str) -> Path:
        if self.rank == 0:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        dist.barrier()
        return self.folder / name

    def ways(self) -> dict[str, Callable[[], Timed]]:
        ways: dict[str, Callable[[], Timed]] = {"Meshwright": self.ours, "DCP async": self.dcp_async, "DCP": self.dcp_sync}
        return ways if self.mesh.shard > 1 else {**ways, "torch.save": self.torch_save}


def disk_rate(folder: Path, bytes_: int) -> float:
    """Bytes a second that `dd` writes and flushes."""
    megabytes = max(64, min(bytes_ // 2**20, 2048))
    path = folder / "dd"
    started = time.perf_counter()
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={megabytes}", "conv=fsync"], check=True, capture_output=True)
    seconds = time.perf_counter() - started
    path.unlink()
    return megabytes * 2**20 / seconds


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the state.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the first, which is shown apart.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, each with its own file.")] = 1,
    mesh: Annotated[str, typer.Option(help="dp (replicas) or shard (ZeRO-3), over all ranks.")] = "dp",
    only: Annotated[str | None, typer.Option(help="Some of the ways, with commas between them.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to write; a temporary folder unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Example: python bench/checkpoint.py --gigabytes 0.5 --rounds 2 --ranks 2 --mesh shard"""
    warnings.simplefilter("ignore")
    if FOLDER not in os.environ:
        home = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=folder))
        env = {**os.environ, FOLDER: str(home), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *sys.argv]
        try:
            raise typer.Exit(subprocess.run(command, env=env, check=False).returncode)
        finally:
            shutil.rmtree(home, ignore_errors=True)
    home = Path(os.environ[FOLDER])
    has_a_gpu_each = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_a_gpu_each else "gloo")
    try:
        result = _measure(Bench(gigabytes, Mesh(**{mesh: dist.get_world_size()}), home), rounds, only)
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(result)) if as_json else _show(result)


def _measure(bench: Bench, rounds: int, only: str | None) -> dict[str, Any]:
    ways = {name: way for name, way in bench.ways().items() if only is None or name in only.split(",")}
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for index in range(rounds + 1):
        for name in [n for n in (*list(ways)[index % len(ways) :], *list(ways)[: index % len(ways)]) if n not in failed]:
            try:
                found[name].append(ways[name]())
            except Exception as error:  # a peer that does not run here leaves the others
                failed[name] = f"{type(error).__name__}: {error}"
            gc.collect()
    dist.barrier()
    rate = disk_rate(bench.folder, bench.bytes) if bench.rank == 0 else 0.0
    dist.barrier()
    return {
        "device": f"{bench.world} {bench.device.type} rank{'s' * (bench.world > 1)}{f' ({bench.mesh})' * (bench.world > 1)}",
        "bytes": bench.bytes,
        "disk_bytes_per_s": rate,
        "ways": {name: _summary(times) for name, times in found.items() if name not in failed},
        "failed": failed,
    }


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
