"""The API for a user's own script: prepare(), parallelize(), plan_for(), connect()."""

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
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh, check_runnable
from meshwright.core.plan import Plan
from meshwright.core.plan_strategy import PlanTransform, Strategy, as_strategy
from meshwright.core.rank_devices import device_selection, rank_devices_from_env
from meshwright.core.serialization import write_json
from meshwright.core.task import Batch, Loss
from meshwright.core.workload import Workload
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.describe.discover import discover
from meshwright.describe.profile_tracer import profile_parameters_only, trace_module
from meshwright.execute.apply import AppliedPlan, apply
from meshwright.execute.process_groups import ProcessGroups, make_process_groups, register_backend
from meshwright.execute.rank_loader import RankLoader
from meshwright.execute.session import Session, sample_count
from meshwright.launch import LaunchedRank, Rendezvous, default_backend, detect_launched_rank, join_process_group
from meshwright.orchestrate import calibrate
from meshwright.orchestrate.knobs import config_from_environment, constraints_from_config
from meshwright.orchestrate.user_strategy import apply_strategy, load_strategy
from meshwright.plan import Constraints, Ranking, explain, rank_plans

_INIT_TIMEOUT_S = 600.0  # longest wait for a slow rank


class Run:
    """A prepared run: iterate `loader` and call `step`. The rest of the user's script stays unchanged."""

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
        """Forward, backward, gradient synchronisation, optimizer step. Returns the mean loss over the global batch, the same on every rank."""
        return self.session.step(batch, loss_fn, total=self.loader.global_batch).loss

    def validate(self, batches: Iterable[Batch], loss_fn: Loss) -> float:
        """The mean loss without gradients, reduced over ranks; `batches` are global batches, of which each rank takes its share."""
        cut = RankLoader(batches, self.plan, self.rank, seed=self.session.seed, device=self.loader.device, num_micro_batches=1)
        return self.session.validate(cut, loss_fn)


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Batch],
    *,
    loss_fn: Loss | None = None,
    plan: Plan | str | Path | None = None,
    strategy: Strategy | PlanTransform | str | None = None,
    seed: int = 0,
    clip: float | None = None,
) -> Run:
    """Plan (or take the launcher's plan) and apply the plan to the model in place. With `loss_fn` the planner also accounts for activations.

    `strategy` changes the plan that was found: a function `(plan, profile, cluster) -> Plan`, or its reference FILE.py:NAME.
    """
    place = _init_process_group()
    device = _rank_device(place)
    model.to(device)
    chosen, why = _resolve_plan(model, optimizer, loader, loss_fn, plan, strategy, place)
    session = Session(chosen, model, optimizer, seed=seed, clip=clip)
    if place.rank == 0:
        _report_plan(chosen, why, place)
    return Run(session, RankLoader(loader, chosen, place.rank, seed=seed, device=device), why)


def parallelize(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | str | Path) -> AppliedPlan:
    """Apply a plan in place, for your own loop of `model(x)`, `loss.backward()`, `optimizer.step()`. Gradients are averaged over ranks."""
    _init_process_group()
    return apply(plan if isinstance(plan, Plan) else Plan.load(Path(plan)), model, optimizer)


def plan_for(model: nn.Module, batch: Batch, loss_fn: Loss, *, world: int | None = None, **constraints: Any) -> Ranking:
    """Ranked plans for a live model on this machine, best first; `explain` gives the reasons. `batch` is a global batch."""
    cluster = discover(os.environ, ranks=world)
    workload = Workload(sample_count(batch))
    profile = trace_module(model, loss_fn, batch, name=type(model).__name__, device=cluster.devices[0].kind)
    calibration = calibrate.load_cached(cluster, os.environ) or datasheet_calibration(cluster)
    asked = Constraints(world=world, **constraints)
    if asked.flow is None and len(cluster.devices) > 1:
        asked = replace(asked, flow=_trace_dataflow(model, loss_fn, batch, asked.mesh))
    return rank_plans(profile, cluster, workload, calibration, asked)


def connect(mesh: Mesh | str | None = None, *, backend: str | None = None) -> ProcessGroups:
    """This rank's process groups, for explicit communication: `world`, and `data`, `dp`, `shard`, `tp`, `pp` of a mesh such as "dp=2,tp=2".

    Collective: every rank passes the same mesh. A degree of * takes the remaining ranks ("dp=*,tp=2"); no mesh means data parallel. The ranks
    are those that a launcher started. In a script that runs without a launcher every group has one rank and costs nothing, whatever the mesh.
    """
    place = _init_process_group(backend)
    return make_process_groups(_resolve_mesh(mesh, place.world), rank_devices=rank_devices_from_env(os.environ))


def _resolve_mesh(mesh: Mesh | str | None, world: int) -> Mesh:
    if isinstance(mesh, str):
        others = Mesh.parse(mesh.replace("*", "1")).size
        mesh = Mesh.parse(mesh.replace("*", str(max(world // others, 1))))
    mesh = mesh or Mesh(dp=world)
    check_runnable(mesh)
    if world > 1 and mesh.size != world:
        raise RequestError(f"connect: mesh {mesh} has {mesh.size} ranks, {world} were started: start {mesh.size}, or change the mesh")
    return mesh if world > 1 else Mesh()


def _trace_dataflow(model: nn.Module, loss_fn: Loss, batch: Batch, mesh: Mesh | None = None) -> Dataflow | None:
    """The dataflow that tensor, pipeline and expert parallelism need. None for a model that cannot be traced, unless the mesh requires it."""
    try:
        return trace_module_dataflow(model, loss_fn, batch)
    except RequestError:
        if mesh is not None and mesh.size > mesh.dp * mesh.shard:
            raise
        return None


def _init_process_group(backend: str | None = None) -> LaunchedRank:
    """This process's rank and world; initialises the process group unless the script already did."""
    if backend is not None and "cpu" not in backend_traits(backend).devices and not torch.cuda.is_available():
        raise RequestError(f"backend {backend} needs a CUDA device, and there is none: use gloo")
    if dist.is_available() and dist.is_initialized():
        if backend not in (None, dist.get_backend()):
            raise RequestError(f"backend {backend} was asked for, and the process group uses {dist.get_backend()}: change one of them")
        rank = dist.get_rank()
        local = int(os.environ.get("LOCAL_RANK", rank % max(torch.cuda.device_count(), 1)))
        return LaunchedRank(rank, dist.get_world_size(), local, dist.get_world_size(), "", "script")
    place = detect_launched_rank(os.environ) or LaunchedRank(0, 1, 0, 1, "", "python")
    device = _rank_device(place).type
    backend = backend or (backend_for(device, where) if (where := rank_devices_from_env(os.environ)) else default_backend(place, device))
    register_backend(backend, _INIT_TIMEOUT_S)
    join_process_group(Rendezvous(place.rank, place.world, place.init_method, backend, device, place.local_rank))
    return place


def _rank_device(launched_rank: LaunchedRank) -> torch.device:
    """The device that the launcher assigned to this rank, or the GPU of its local rank, or the CPU."""
    where = rank_devices_from_env(os.environ)
    if where:
        return torch.device(where[launched_rank.rank])
    return torch.device("cuda", launched_rank.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _resolve_plan(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    plan: Plan | str | Path | None, strategy: Strategy | PlanTransform | str | None, launched_rank: LaunchedRank,
) -> tuple[Plan, str]:  # fmt: skip
    given = plan or (launched_rank.plan if launched_rank.plan not in ("", "auto") else None)
    if given is not None and strategy is not None:
        raise RequestError("a plan that is given is run as it is, and a strategy would change it: leave one of them out")
    if isinstance(given, Plan):
        return given, "Given by the script."
    if given is not None:
        return Plan.load(Path(given)), f"Given by {given}."
    decision: list[Any] = [None]
    if launched_rank.rank == 0:
        decision = [_plan_on_rank_zero(model, optimizer, loader, loss_fn, strategy, launched_rank.world)]
    if launched_rank.world > 1:
        dist.broadcast_object_list(decision, src=0)
    if isinstance(decision[0], RequestError):
        raise decision[0]
    return decision[0]  # type: ignore[no-any-return]


def _plan_on_rank_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    strategy: Strategy | PlanTransform | str | None, world: int,
) -> tuple[Plan, str] | RequestError:  # fmt: skip
    """Rank 0's plan and reasons, or the error: returned, not raised, so that it is broadcast and no rank waits forever."""
    try:
        own = load_strategy(strategy) if isinstance(strategy, str) else as_strategy(strategy, "strategy") if strategy is not None else None
        cluster = discover(os.environ, ranks=world, devices=device_selection(rank_devices_from_env(os.environ)) or None)
        batch = _example_batch(loader) if loss_fn is not None or not isinstance(loader, DataLoader) else None
        size = sample_count(batch) if batch is not None else loader.batch_size  # type: ignore[attr-defined]
        if not size:
            raise RequestError("the loader's batch size is not known: pass loss_fn to prepare, so that a batch is looked at")
        profile = (
            profile_parameters_only(model, type(model).__name__)
            if loss_fn is None
            else trace_module(model, loss_fn, batch, name=type(model).__name__)
        )
        name = type(optimizer).__name__.lower()
        workload = Workload(size, "train", "fp32", name if name in ("sgd", "adam", "adamw") else "adamw")
        calibration = calibrate.load_cached(cluster, os.environ) or datasheet_calibration(cluster)
        # A script may use its model in ways that torch.compile cannot trace, so the model is compiled only on request.
        config = config_from_environment(os.environ)
        flow = _trace_dataflow(model, loss_fn, batch, Mesh.parse(config.mesh) if config.mesh else None) if loss_fn is not None and world > 1 else None
        asked = replace(
            constraints_from_config(config, flow), world=world, compile=config.compile or "none", backend=dist.get_backend() if world > 1 else None
        )
        ranking = rank_plans(profile, cluster, workload, calibration, asked)
        why = explain(ranking)
        if own is not None:
            ranking, change = apply_strategy(ranking, own, lambda _: flow)
            why = f"{change}\n{why}"
        if not ranking.best.estimate.fits:
            raise RequestError(why.replace("\n", " "))
        return ranking.best.plan, why
    except RequestError as error:
        return error


def _example_batch(loader: Iterable[Batch]) -> Batch:
    """A batch to trace with. It bypasses the sampler where possible: a draw on one rank alone would change its order of samples."""
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__") and loader.batch_size:
        count = min(loader.batch_size, len(loader.dataset))
        return loader.collate_fn([loader.dataset[i] for i in range(count)])
    return next(iter(loader))


def _report_plan(plan: Plan, why: str, launched_rank: LaunchedRank) -> None:
    print(f"meshwright: {plan.summary()}", file=sys.stderr)
    if launched_rank.run:
        plan.save(Path(launched_rank.run) / "plan.json")
        write_json(Path(launched_rank.run) / "why.json", {"why": why})
    if launched_rank.launcher == "python":
        devices = len(discover(os.environ).devices)
        if devices > 1:
            script = sys.argv[0] or "script.py"
            print(f"meshwright: one of {devices} devices is used; all: meshwright train {script}", file=sys.stderr)
