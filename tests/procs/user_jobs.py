"""What worker processes do in tests of a user's own code: loops, strategies, scripts on `connect`, profiled steps."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data, to_data
from meshwright.execute.rank_loader import RankLoader
from meshwright.execute.session import Session
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.orchestrate.rank_entrypoints import run_script
from tests import convolutional
from tests.procs.jobs import build, global_batch, make_optimizer

SAMPLES, BATCH = 9, 4  # the last batch has one sample: too few for two ranks


def script(rank: int, world: int, init_method: str, path: str, arguments: list[str]) -> str:
    """A user's script as one rank of a job; what it printed."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_script(rank, world, init_method, path, arguments, "", {"MESHWRIGHT_PLAN": "auto"})
    return said.getvalue()


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 5)).double()
    x, y = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randn(SAMPLES, 5, dtype=torch.float64)
    return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), x, y


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def own_loop(rank: int, world: int, init_method: str, mesh: str = "") -> dict[str, Any]:
    """After `parallelize` a loop needs torch's own verbs alone. Losses over the global batch, and what this rank holds."""
    torch.set_num_threads(1)
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        network, optimizer, x, y = _parts()
        whole = sum(p.numel() for p in network.parameters())
        plan = Plan("alone", BATCH)
        if mesh:
            plan = mw.plan_for(network, (x[:BATCH], y[:BATCH]), _loss, world=world, mesh=Mesh.parse(mesh)).best.plan
        applied = mw.parallelize(network, optimizer, plan)
        data, losses = applied.groups.data, []
        for _ in range(3):
            for start in range(0, SAMPLES, BATCH):
                total = min(BATCH, SAMPLES - start)
                first, end = (start + total * r // data.size for r in (data.rank, data.rank + 1))
                # A sum over nothing is nothing; gradients are averaged over the data ranks, hence the factor.
                loss = (network(x[first:end]) - y[first:end]).square().sum() / (total * 5)
                optimizer.zero_grad()
                (loss * data.size).backward()
                optimizer.step()
                mean = loss.detach()
                data.all_reduce(mean, "loss").wait()
                losses.append(float(mean))
        return {"losses": losses, "held": sum(p.numel() for p in network.parameters()), "whole": whole, "plan": to_data(plan)}
    finally:
        leave_process_group()


def to_tensor_parallel(plan: Plan, profile: Any, cluster: Any) -> Plan:
    return replace(plan, mesh=Mesh(tp=(plan.world,)), memory=replace(plan.memory, zero=0), micro_batches=1)


def prepared_loop(rank: int, world: int, init_method: str, strategy: bool = False) -> dict[str, Any]:
    """`prepare` with a strategy that leaves the cuts to Meshwright; the last batch is short."""
    torch.set_num_threads(1)
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        network, optimizer, x, y = _parts()
        loader = DataLoader(TensorDataset(x, y), BATCH)
        run = mw.prepare(network, optimizer, loader, loss_fn=_loss, strategy=to_tensor_parallel if strategy else None)
        losses = [float(run.step(batch, _loss)) for _ in range(3) for batch in run.loader]
        return {"losses": losses, "mesh": str(run.plan.mesh), "why": run.why}
    finally:
        leave_process_group()


def uneven_batches(
    rank: int, world: int, init_method: str, plan: dict[str, Any], trained: list[int], validated: list[int], model: dict[str, Any]
) -> dict[str, Any]:
    """Training and validation on batches of several sizes, through the loader; how often the pipeline had to look at samples."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan")
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        network, loss = build(model, torch.float64, 7)
        session = Session(told, network, make_optimizer("sgd", network), clip=0.5)
        looks: list[int] = []
        if session.applied.pipeline is not None:
            session.applied.pipeline.infer_shapes = _counting(session.applied.pipeline.infer_shapes, looks)  # type: ignore[method-assign]

        def batches(sizes: list[int], pieces: int | None = None) -> RankLoader:
            made = [global_batch(model, size, size, torch.float64) for size in sizes]
            return RankLoader(made, told, rank, device=torch.device("cpu"), num_micro_batches=pieces)

        losses, loader = [], batches(trained)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            losses += [float(session.step(batch, loss, loader.global_batch).loss) for batch in loader]
        losses += [session.validate(batches(validated, 1), loss) for _ in range(2)]
        losses.append(float(session.step(next(iter(batches(trained))), loss).loss))
        return {"losses": losses, "looks": len(looks), "said": said.getvalue()}
    finally:
        leave_process_group()


def _counting(function: Any, seen: list[int]) -> Any:
    def call(*args: Any) -> Any:
        seen.append(1)
        return function(*args)

    return call


def profiled_step(rank: int, world: int, init_method: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Three steps, the second under a profiler: their losses, the names that were counted in it, and those in its timeline."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan")
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        network, loss = build({"zoo": "gpt-tiny"}, torch.float64, 7)
        session = Session(told, network, make_optimizer("sgd", network))
        first, count = told.sample_range(told.mesh.data_rank(rank))
        losses, counted, shown = [], set(), set()
        for step in range(3):
            whole = global_batch({"zoo": "gpt-tiny"}, told.global_batch, step, torch.float64)
            mine = {k: v[first : first + count] for k, v in whole.items()}
            session.applied.groups.ledger.drain()
            with torch.profiler.profile() if step == 1 else contextlib.nullcontext() as profiler:
                losses.append(float(session.step(mine, loss).loss))
            if profiler is not None:
                counted = {line.name for line in session.applied.groups.ledger.drain()}
                with tempfile.TemporaryDirectory() as folder:
                    profiler.export_chrome_trace(f"{folder}/trace.json")
                    shown = {event.get("name") for event in json.loads(Path(folder, "trace.json").read_text())["traceEvents"]}
        return {"losses": losses, "counted": counted, "shown": shown & (counted | {f"{name} (wait)" for name in counted})}
    finally:
        leave_process_group()


def connected(rank: int, world: int, init_method: str, mesh: str | None) -> dict[str, Any]:
    """Who this rank is in each group, and the ranks that an all-gather finds there."""
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        groups = mw.connect(mesh)
        found: dict[str, Any] = {}
        for name in ("world", "data", "dp", "shard", "tp", "pp"):
            comm = getattr(groups, name)
            out = torch.empty(comm.size, dtype=torch.int64)
            comm.all_gather(out, torch.tensor([rank]), f"who/{name}").wait()
            assert out[comm.rank] == rank
            found[name] = out.tolist()
        return found
    finally:
        leave_process_group()


def spatial_loop(rank: int, world: int, init_method: str, mesh: str = "") -> dict[str, Any]:
    """A residual network in a loop of one's own, evaluated, and once more through `prepare`; every rank feeds the same samples."""
    torch.set_num_threads(1)
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        batches = [convolutional.batch("resnet", BATCH, step) for step in range(3)]

        def made() -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(3 + rank)
            network = convolutional.build("resnet").double()
            return network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)

        network, optimizer = made()
        plan = Plan("alone", BATCH)
        if mesh:
            plan = mw.plan_for(network, batches[0], convolutional.loss, world=world, mesh=Mesh.parse(mesh)).best.plan
        mw.parallelize(network, optimizer, plan)
        losses = []
        for given in batches:
            optimizer.zero_grad()
            loss = convolutional.loss(network, given)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        buffers = {name: float(b.double().sum()) for name, b in network.named_buffers()}
        with torch.no_grad():
            evaluated = float(convolutional.loss(network.eval(), batches[0]))
        refused = ""
        try:
            network(batches[0]["x"][:, :, :16, :16])
        except mw.RequestError as error:
            refused = str(error)
        again, stepped = made()
        run = mw.prepare(again, stepped, batches, plan=plan)
        prepared = [float(run.step(given, convolutional.loss)) for given in run.loader]
        return {"losses": losses, "buffers": buffers, "evaluated": evaluated, "prepared": prepared, "refused": refused}
    finally:
        leave_process_group()
