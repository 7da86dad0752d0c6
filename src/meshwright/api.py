"""What a user's own script calls: prepare(), parallelize(), plan_for(), connect()."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.errors import RequestError
from meshwright.core.hybrid import picked, told_places
from meshwright.core.mesh import Mesh, check_runnable
from meshwright.core.plan import Plan
from meshwright.core.serial import write_json
from meshwright.core.strand import Flow
from meshwright.core.strategy import Change, Strategy, as_strategy
from meshwright.core.task import Batch, Loss
from meshwright.core.workload import Workload
from meshwright.cost.sheets import from_sheets
from meshwright.describe.discover import discover
from meshwright.describe.flow import trace_module_flow
from meshwright.describe.trace import parameters_only, trace_module
from meshwright.execute.apply import Applied, apply
from meshwright.execute.data import RankLoader
from meshwright.execute.groups import Groups, make_groups, make_ready
from meshwright.execute.session import Session, sample_count
from meshwright.launch import Place, Rendezvous, adopted, default_backend, join
from meshwright.orchestrate import calibrate
from meshwright.orchestrate.knobs import told, wishes_of
from meshwright.orchestrate.strategy import load_strategy, transform
from meshwright.plan import Ranking, Wishes, explain, rank_plans

_PATIENCE_S = 600.0  # with a rank that keeps the others waiting


class Run:
    """A prepared run: iterate `loader`, call `step`. Everything else of the user's script stays as it was."""

    def __init__(self, session: Session, loader: RankLoader, why: str) -> None:
        self.session, self.loader, self.why = session, loader, why

    @property
    def plan(self) -> Plan:
        return self.session.plan

    @property
    def rank(self) -> int:
        return self.session.applied.groups.rank

    @property
    def is_first(self) -> bool:
        """True on the one rank that should print and save."""
        return self.rank == 0

    def step(self, batch: Batch, loss_fn: Loss) -> torch.Tensor:
        """Forward, backward, synchronise, optimizer step. Returns the mean loss over the global batch, the same on every rank."""
        return self.session.step(batch, loss_fn, total=self.loader.total).loss

    def validate(self, batches: Iterable[Batch], loss_fn: Loss) -> float:
        """Mean loss without gradients, reduced over ranks; `batches` are global, each rank takes its share."""
        cut = RankLoader(batches, self.plan, self.rank, seed=self.session.seed, device=self.loader.device, pieces=1)
        return self.session.validate(cut, loss_fn)


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Batch],
    *,
    loss_fn: Loss | None = None,
    plan: Plan | str | Path | None = None,
    strategy: Strategy | Change | str | None = None,
    seed: int = 0,
    clip: float | None = None,
) -> Run:
    """Plan (or take the launcher's plan) and apply it in place. Give `loss_fn` to let the planner see activations too.

    `strategy` changes the plan that was found: a function `(plan, profile, cluster) -> Plan`, or FILE.py:NAME where it is.
    """
    place = _join()
    device = _device(place)
    model.to(device)
    chosen, why = _decide(model, optimizer, loader, loss_fn, plan, strategy, place)
    session = Session(chosen, model, optimizer, seed=seed, clip=clip)
    if place.rank == 0:
        _announce(chosen, why, place)
    return Run(session, RankLoader(loader, chosen, place.rank, seed=seed, device=device), why)


def parallelize(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | str | Path) -> Applied:
    """Apply a plan in place; then your own loop: `model(x)`, `loss.backward()`, `optimizer.step()`. Gradients are averaged over ranks."""
    _join()
    return apply(plan if isinstance(plan, Plan) else Plan.load(Path(plan)), model, optimizer)


def plan_for(model: nn.Module, batch: Batch, loss_fn: Loss, *, world: int | None = None, **wishes: Any) -> Ranking:
    """Ranked plans for a live model on this machine, best first; `explain` tells why. `batch` is a global batch."""
    cluster = discover(os.environ, ranks=world)
    workload = Workload(sample_count(batch))
    profile = trace_module(model, loss_fn, batch, name=type(model).__name__, device=cluster.devices[0].kind)
    calibration = calibrate.kept(cluster, os.environ) or from_sheets(cluster)
    asked = Wishes(world=world, **wishes)
    if asked.flow is None and len(cluster.devices) > 1:
        asked = replace(asked, flow=_flow(model, loss_fn, batch, asked.mesh))
    return rank_plans(profile, cluster, workload, calibration, asked)


def connect(mesh: Mesh | str | None = None, *, backend: str | None = None) -> Groups:
    """This rank's groups, to communicate by hand: `world`, and `data`, `dp`, `shard`, `tp`, `pp` of a mesh such as "dp=2,tp=2".

    Every rank calls it with the same mesh; a degree of * takes what the others leave ("dp=*,tp=2"), and no mesh means data parallel. The
    ranks are those that a launcher started. In a script that runs alone every group has one rank and costs nothing, whatever the mesh.
    """
    place = _join(backend)
    return make_groups(_mesh_for(mesh, place.world), places=told_places(os.environ))


def _mesh_for(mesh: Mesh | str | None, world: int) -> Mesh:
    if isinstance(mesh, str):
        others = Mesh.parse(mesh.replace("*", "1")).size
        mesh = Mesh.parse(mesh.replace("*", str(max(world // others, 1))))
    mesh = mesh or Mesh(dp=world)
    check_runnable(mesh)
    if world > 1 and mesh.size != world:
        raise RequestError(f"connect: mesh {mesh} has {mesh.size} ranks, {world} were started: start {mesh.size}, or change the mesh")
    return mesh if world > 1 else Mesh()


def _flow(model: nn.Module, loss_fn: Loss, batch: Batch, mesh: Mesh | None = None) -> Flow | None:
    """What tensor parallelism, pipelines and owners are found by. A model that cannot be followed does without, unless the mesh asks for them."""
    try:
        return trace_module_flow(model, loss_fn, batch)
    except RequestError:
        if mesh is not None and mesh.size > mesh.dp * mesh.shard:
            raise
        return None


def _join(backend: str | None = None) -> Place:
    """Our place among the ranks; makes the process group unless the script already did."""
    if backend is not None and "cpu" not in backend_traits(backend).devices and not torch.cuda.is_available():
        raise RequestError(f"backend {backend} needs a CUDA device, and there is none: use gloo")
    if dist.is_available() and dist.is_initialized():
        if backend not in (None, dist.get_backend()):
            raise RequestError(f"backend {backend} was asked for, and the process group uses {dist.get_backend()}: change one of them")
        rank = dist.get_rank()
        local = int(os.environ.get("LOCAL_RANK", rank % max(torch.cuda.device_count(), 1)))
        return Place(rank, dist.get_world_size(), local, dist.get_world_size(), "", "script")
    place = adopted(os.environ) or Place(0, 1, 0, 1, "", "python")
    device = _device(place).type
    backend = backend or (backend_for(device, where) if (where := told_places(os.environ)) else default_backend(place, device))
    make_ready(backend, _PATIENCE_S)
    join(Rendezvous(place.rank, place.world, place.meeting, backend, device, place.local_rank))
    return place


def _device(place: Place) -> torch.device:
    """What the launcher put this rank on, or the card of its number on this machine, or else the CPU."""
    where = told_places(os.environ)
    if where:
        return torch.device(where[place.rank])
    return torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _decide(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    plan: Plan | str | Path | None, strategy: Strategy | Change | str | None, place: Place,
) -> tuple[Plan, str]:  # fmt: skip
    given = plan or (place.plan if place.plan not in ("", "auto") else None)
    if given is not None and strategy is not None:
        raise RequestError("a plan that is given is run as it is, and a strategy would change it: leave one of them out")
    if isinstance(given, Plan):
        return given, "Given by the script."
    if given is not None:
        return Plan.load(Path(given)), f"Given by {given}."
    decision: list[Any] = [None]
    if place.rank == 0:
        decision = [_plan_here(model, optimizer, loader, loss_fn, strategy, place.world)]
    if place.world > 1:
        dist.broadcast_object_list(decision, src=0)
    if isinstance(decision[0], RequestError):
        raise decision[0]
    return decision[0]  # type: ignore[no-any-return]


def _plan_here(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    strategy: Strategy | Change | str | None, world: int,
) -> tuple[Plan, str] | RequestError:  # fmt: skip
    """Rank 0's decision, or the reason why there is none: the others must hear of it rather than wait."""
    try:
        own = load_strategy(strategy) if isinstance(strategy, str) else as_strategy(strategy, "strategy") if strategy is not None else None
        cluster = discover(os.environ, ranks=world, devices=picked(told_places(os.environ)) or None)
        batch = _peek(loader) if loss_fn is not None or not isinstance(loader, DataLoader) else None
        size = sample_count(batch) if batch is not None else loader.batch_size  # type: ignore[attr-defined]
        if not size:
            raise RequestError("the loader's batch size is not known: pass loss_fn to prepare, so that a batch is looked at")
        profile = parameters_only(model, type(model).__name__) if loss_fn is None else trace_module(model, loss_fn, batch, name=type(model).__name__)
        name = type(optimizer).__name__.lower()
        workload = Workload(size, "train", "fp32", name if name in ("sgd", "adam", "adamw") else "adamw")
        calibration = calibrate.kept(cluster, os.environ) or from_sheets(cluster)
        # A script may do with its model what a compiler cannot follow, so it is compiled only when the script says so.
        config = told(os.environ)
        flow = _flow(model, loss_fn, batch, Mesh.parse(config.mesh) if config.mesh else None) if loss_fn is not None and world > 1 else None
        asked = replace(wishes_of(config, flow), world=world, compile=config.compile or "none", backend=dist.get_backend() if world > 1 else None)
        ranking = rank_plans(profile, cluster, workload, calibration, asked)
        why = explain(ranking)
        if own is not None:
            ranking, change = transform(ranking, own, lambda _: flow)
            why = f"{change}\n{why}"
        if not ranking.best.estimate.fits:
            raise RequestError(why.replace("\n", " "))
        return ranking.best.plan, why
    except RequestError as error:
        return error


def _peek(loader: Iterable[Batch]) -> Batch:
    """A batch to look at. Taken past the sampler where that is possible: a draw on one rank alone would change its order of samples."""
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__") and loader.batch_size:
        count = min(loader.batch_size, len(loader.dataset))
        return loader.collate_fn([loader.dataset[i] for i in range(count)])
    return next(iter(loader))


def _announce(plan: Plan, why: str, place: Place) -> None:
    print(f"meshwright: {plan.summary()}", file=sys.stderr)
    if place.run:
        plan.save(Path(place.run) / "plan.json")
        write_json(Path(place.run) / "why.json", {"why": why})
    if place.launcher == "python":
        devices = len(discover(os.environ).devices)
        if devices > 1:
            script = sys.argv[0] or "script.py"
            print(f"meshwright: one of {devices} devices is used; all: meshwright train {script}", file=sys.stderr)
