"""The API for a user's own script: prepare(), parallelize(), plan_for(), connect()."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
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
from meshwright.orchestrate.plan_verification import add_lines, choose_verified, make_collective_check
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
        loader = RankLoader(batches, self.plan, self.rank, seed=self.session.seed, device=self.loader.device, num_micro_batches=1)
        return self.session.validate(loader, loss_fn)


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
    launched = _init_process_group()
    device = _rank_device(launched)
    model.to(device)
    plans, why = _resolve_plan(model, optimizer, loader, loss_fn, plan, strategy, launched)
    chosen, why = _verified_plan(plans, why, model, optimizer, loader, loss_fn, seed, launched)
    session = Session(chosen, model, optimizer, seed=seed, clip=clip)
    if launched.rank == 0:
        _report_plan(chosen, why, launched)
    return Run(session, RankLoader(loader, chosen, launched.rank, seed=seed, device=device), why)


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
    fixed = Constraints(world=world, **constraints)
    if fixed.flow is None and len(cluster.devices) > 1:
        fixed = replace(fixed, flow=_trace_dataflow(model, loss_fn, batch, fixed.mesh))
    return rank_plans(profile, cluster, workload, calibration, fixed)


def connect(mesh: Mesh | str | None = None, *, backend: str | None = None) -> ProcessGroups:
    """This rank's process groups, for explicit communication: `world`, and `data`, `dp`, `shard`, `tp`, `pp` of a mesh such as "dp=2,tp=2".

    Collective: every rank passes the same mesh. A degree of * takes the remaining ranks ("dp=*,tp=2"); no mesh means data parallel. The ranks
    are those that a launcher started. In a script that runs without a launcher every group has one rank and costs nothing, whatever the mesh.
    """
    world = _init_process_group(backend).world
    return make_process_groups(_resolve_mesh(mesh, world), rank_devices=rank_devices_from_env(os.environ))


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
            raise RequestError(f"backend {backend} was requested, and the process group uses {dist.get_backend()}: change one of them")
        rank, world = dist.get_rank(), dist.get_world_size()
        return LaunchedRank(rank, world, int(os.environ.get("LOCAL_RANK", rank % max(torch.cuda.device_count(), 1))), world, "", "script")
    launched = detect_launched_rank(os.environ) or LaunchedRank(0, 1, 0, 1, "", "python")
    launched.die_with_launcher()
    device, rank_devices = _rank_device(launched).type, rank_devices_from_env(os.environ)
    backend = backend or (backend_for(device, rank_devices) if rank_devices else default_backend(launched, device))
    register_backend(backend, _INIT_TIMEOUT_S)
    join_process_group(Rendezvous(launched.rank, launched.world, launched.init_method, backend, device, launched.local_rank))
    return launched


def _rank_device(launched: LaunchedRank) -> torch.device:
    """The device that the launcher assigned to this rank, or the GPU of its local rank, or the CPU."""
    if rank_devices := rank_devices_from_env(os.environ):
        return torch.device(rank_devices[launched.rank])
    return torch.device("cuda", launched.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _resolve_plan(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    plan: Plan | str | Path | None, strategy: Strategy | PlanTransform | str | None, launched: LaunchedRank,
) -> tuple[Sequence[Plan], str]:  # fmt: skip
    """The plans that may run, best first, and why."""
    given = plan or (launched.plan if launched.plan not in ("", "auto") else None)
    if given is not None and strategy is not None:
        raise RequestError("a given plan runs unchanged, and a strategy would change it: leave one of them out")
    if isinstance(given, Plan):
        return [given], "Given by the script."
    if given is not None:
        return [Plan.load(Path(given))], f"Given by {given}."
    decision: list[Any] = [None]
    if launched.rank == 0:
        decision = [_plan_on_rank_zero(model, optimizer, loader, loss_fn, strategy, launched.world)]
    if launched.world > 1:
        dist.broadcast_object_list(decision, src=0)
    if isinstance(decision[0], RequestError):
        raise decision[0]
    return decision[0]  # type: ignore[no-any-return]


def _plan_on_rank_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    strategy: Strategy | PlanTransform | str | None, world: int,
) -> tuple[Sequence[Plan], str] | RequestError:  # fmt: skip
    """Rank 0's plans, best first, and reasons, or the error: returned, not raised, so that it is broadcast and no rank waits forever."""
    try:
        transform = load_strategy(strategy) if isinstance(strategy, str) else as_strategy(strategy, "strategy") if strategy is not None else None
        cluster = discover(os.environ, ranks=world, devices=device_selection(rank_devices_from_env(os.environ)) or None)
        batch = _example_batch(loader) if loss_fn is not None or not isinstance(loader, DataLoader) else None
        size = sample_count(batch) if batch is not None else loader.batch_size  # type: ignore[attr-defined]
        if not size:
            raise RequestError("the loader has no batch_size: pass loss_fn to prepare, which then reads the size from a batch")
        name, optimizer_name = type(model).__name__, type(optimizer).__name__.lower()
        profile = profile_parameters_only(model, name) if loss_fn is None else trace_module(model, loss_fn, batch, name=name)
        workload = Workload(size, "train", "fp32", optimizer_name if optimizer_name in ("sgd", "adam", "adamw") else "adamw")
        calibration = calibrate.load_cached(cluster, os.environ) or datasheet_calibration(cluster)
        # A script may use its model in ways that torch.compile cannot trace, so the model is compiled only on request.
        config = config_from_environment(os.environ)
        mesh, backend = Mesh.parse(config.mesh) if config.mesh else None, dist.get_backend() if world > 1 else None
        flow = _trace_dataflow(model, loss_fn, batch, mesh) if loss_fn is not None and world > 1 else None
        constraints = replace(constraints_from_config(config, flow), world=world, compile=config.compile or "none", backend=backend)
        ranking = rank_plans(profile, cluster, workload, calibration, constraints)
        why = explain(ranking)
        if transform is not None:
            ranking, change = apply_strategy(ranking, transform, lambda _: flow)
            why = f"{change}\n{why}"
        if not ranking.best.estimate.fits:
            raise RequestError(why.replace("\n", " "))
        return ranking.alternatives, why
    except RequestError as error:
        return error


def _verified_plan(
    plans: Sequence[Plan], why: str, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    seed: int, launched: LaunchedRank,
) -> tuple[Plan, str]:  # fmt: skip
    """The first plan that computes what one device does, and why it was chosen. Without a loss there is nothing to compare."""
    if loss_fn is None or launched.world == 1 or not config_from_environment(os.environ).verify:
        return plans[0], why
    check = make_collective_check(model, optimizer, lambda: _batch_to_verify(loader), loss_fn, seed)
    log = (lambda line: print(f"meshwright: {line}", file=sys.stderr)) if launched.rank == 0 else lambda _: None
    chosen, lines = choose_verified(plans, check, log)
    return chosen, add_lines(lines, why)


def _batch_to_verify(loader: Iterable[Batch]) -> Batch:
    """An example batch. The loader is left as it is."""
    if isinstance(loader, Iterator):
        raise RequestError("the loader is an iterator, whose batches can be read only once: pass a DataLoader or a list")
    generator = getattr(loader, "generator", None)
    state = generator.get_state() if generator is not None else None
    try:
        return _example_batch(loader)
    finally:
        if generator is not None:
            generator.set_state(state)


def _example_batch(loader: Iterable[Batch]) -> Batch:
    """A batch to trace with. It bypasses the sampler where possible: a draw on one rank alone would change its order of samples."""
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__") and loader.batch_size:
        count = min(loader.batch_size, len(loader.dataset))
        return loader.collate_fn([loader.dataset[i] for i in range(count)])
    return next(iter(loader))


def _report_plan(plan: Plan, why: str, launched: LaunchedRank) -> None:
    print(f"meshwright: {plan.summary()}", file=sys.stderr)
    if launched.run:
        plan.save(Path(launched.run) / "plan.json")
        write_json(Path(launched.run) / "why.json", {"why": why})
    if launched.launcher == "python":
        num_devices = len(discover(os.environ).devices)
        if num_devices > 1:
            print(f"meshwright: 1 of {num_devices} devices is used; to use all: meshwright train {sys.argv[0] or 'script.py'}", file=sys.stderr)
