"""The API for a user's own script: prepare(), gather(), parallelize(), plan_for(), connect()."""

from __future__ import annotations

import builtins
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh, check_runnable
from meshwright.core.plan import Plan
from meshwright.core.plan_strategy import PlanTransform, Strategy, as_strategy
from meshwright.core.rank_devices import device_selection, rank_devices_from_env
from meshwright.core.sample_coupling import describe_inexactness, explain_samples
from meshwright.core.serialization import write_json
from meshwright.core.task import Batch, Loss
from meshwright.core.workload import Precision, Workload
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.describe.discover import discover
from meshwright.describe.profile_tracer import profile_parameters_only, trace_module
from meshwright.execute import gather_metrics
from meshwright.execute.apply import AppliedPlan, apply
from meshwright.execute.birth import Birth
from meshwright.execute.own_loop import OwnLoop, check_optimizer
from meshwright.execute.placeholders import Placeholders
from meshwright.execute.process_groups import ProcessGroups, make_process_groups, register_backend
from meshwright.execute.rank_loader import OneShotLoader, RankLoader, keep_first_batch, latest_loader, prepare_loaders, used_loaders
from meshwright.execute.session import Session, sample_count
from meshwright.execute.sharded_gradients import clip_grad_norm_, follow_sharded_gradients
from meshwright.execute.weights import export_weights, load_whole_state_dict, whole_state_dict
from meshwright.launch import LaunchedRank, Rendezvous, default_backend, detect_launched_rank, join_process_group
from meshwright.orchestrate import calibrate
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.knobs import constraints_from_config, script_config
from meshwright.orchestrate.plan_verification import add_lines, choose_verified, make_collective_check
from meshwright.orchestrate.resume import weights_folder
from meshwright.orchestrate.sample_planning import rank_plans_traced
from meshwright.orchestrate.script_birth import birth_of, call_factories, fill_with_initial_values
from meshwright.orchestrate.script_birth import deferred_init as deferred_init
from meshwright.orchestrate.script_state import Resumed, ScriptState, as_mapping
from meshwright.orchestrate.user_strategy import apply_strategy, load_strategy
from meshwright.plan import Constraints, Ranking, explain

_INIT_TIMEOUT_S = 600.0  # longest wait for a slow rank
_KINDS: dict[str, Any] = {
    "model": nn.Module, "optimizer": torch.optim.Optimizer, "schedule": (LRScheduler, ReduceLROnPlateau), "scaler": GradScaler,
}  # fmt: skip


@dataclass(frozen=True)
class _Prepared:
    """What `prepare` was given, by type, and in which order."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loaders: tuple[Iterable[Batch], ...]
    schedulers: tuple[LRScheduler, ...]
    scalers: tuple[GradScaler, ...]
    objects: tuple[Any, ...]


class Run:
    """A prepared run: iterate `loader` and call `step`; or unpack it, in the order in which `prepare` was given things, for a loop of your own."""

    def __init__(
        self, session: Session, given: _Prepared, loaders: Sequence[RankLoader], why: str, *, reader: RankLoader, snapshots: str = "",
        snapshot_every: str = "",
    ) -> None:  # fmt: skip
        """`loaders` are those of `given`, split over ranks; `reader` is the first, or another run's where this one has none. `snapshots` is a folder
        in memory, if there are to be any."""
        self.session, self.loader, self.why = session, reader, why
        self._given, self._loaders = given, loaders
        self._state = ScriptState(session, loaders, given.schedulers, given.scalers, snapshots, snapshot_every or "auto")
        self._own_loop = OwnLoop(session, loaders)

    def __iter__(self) -> Iterator[Any]:
        """Unpack, for a loop of your own: loaders yield this rank's samples, the rest is what was given, changed in place."""
        if self._own_loop.refusal:
            raise RequestError(self._own_loop.refusal)
        if self.is_first and self.plan.micro_batches > 1:
            builtins.print(
                f"meshwright: micro_batches={self.plan.micro_batches} is for run.step; your own loop takes a share at once", file=sys.stderr
            )
        prepared = dict(zip(map(id, self._given.loaders), self._loaders, strict=True))
        return iter([prepared.get(id(thing), thing) for thing in self._given.objects])

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
        """Forward, backward, gradient synchronisation, optimizer step, and a step of the schedules that `prepare` was given. Returns the mean loss
        over the global batch, the same on every rank."""
        if any(scaler.is_enabled() for scaler in self._given.scalers):
            raise RequestError("run.step does not use a GradScaler: scale with --set precision=fp16, or write your own loop")
        share = self._own_loop.share()
        result = self.session.step(batch, loss_fn, total=share.global_batch if share else None, share=share)
        for scheduler in self._given.schedulers if not result.skipped else ():
            if not isinstance(scheduler, ReduceLROnPlateau):  # it wants a metric, which is the script's
                scheduler.step()
        return result.loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down to a norm of at most `max_norm`, in your own loop; returns the norm before that, over all ranks."""
        if self._own_loop.refusal:
            raise RequestError(self._own_loop.refusal)
        return clip_grad_norm_(self.session.model.parameters(), max_norm)

    # -- state --

    @property
    def epoch(self) -> int:
        """Passes over the first loader that are over."""
        return self._loaders[0].passes_done if self._loaders else 0

    def save(self, folder: str | Path = "checkpoints", *, extra: Any = None, keep: int = 2, wait: bool = True) -> Path:
        """Save model, optimizer, schedules, random generators and positions of loaders as `folder`/STEP, of which the last `keep` stay. Every rank
        calls it. `extra` is what the script wants back: numbers, texts, lists. Without `wait`, files are written while training goes on."""
        return self._state.save(Path(folder), extra, keep, wait)

    def resume(self, folder: str | Path = "checkpoints") -> Resumed | None:
        """Go on from the newest whole checkpoint in `folder`, whatever plan and number of ranks wrote it; None if there is none. The next pass over a
        loader yields what was left of the one that was interrupted. Collective."""
        return self._state.resume(Path(folder))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, whole, under the model's own names, on the CPU of the first rank; empty on the others. Collective."""
        return state_dict(self.session.applied)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Distribute whole tensors that the first rank has. Collective."""
        load_state_dict(self.session.applied, state)

    def export(self, folder: str | Path) -> None:
        """Write the weights as safetensors, for `from_pretrained` where the model is of transformers. Collective."""
        export_weights(self.session.applied, Path(folder))

    def validate(self, batches: Iterable[Batch], loss_fn: Loss) -> float:
        """The mean loss without gradients, reduced over ranks; `batches` are global batches, of which each rank takes its share."""
        if not isinstance(batches, RankLoader):
            batches = self.loader.split_also(batches, num_micro_batches=1)
        loader = batches
        return self.session.validate(loader, loss_fn, lambda: loader.share)


def prepare(
    *objects: Any,
    loss_fn: Loss | None = None,
    plan: Plan | str | Path | None = None,
    strategy: Strategy | PlanTransform | str | None = None,
    seed: int = 0,
    clip: float | None = None,
    weights: str | Path | None = None,
    recover: bool = True,
    **constraints: Any,
) -> Run:
    """Plan (or take the launcher's plan) and apply the plan to the model in place. With `loss_fn` the planner also accounts for activations.

    `objects` are a model, its optimizer and a loader, and what else the loop uses, in any order: learning rate schedules, further loaders, a
    `GradScaler`. The first loader's batch is the global batch of the plan; a model without one is trained on the loader of an earlier call.
    A model on the meta device, one of `deferred_init`, or a function that makes the model, with one that makes the optimizer for it, is never whole
    on a rank: each makes its own pieces. `weights` is a folder of safetensors, or a run, that the model begins with.
    `constraints` fix choices of the planner, as `--set` does: `mesh="tp=2"`, `precision="bf16"`, `zero=3`, `recompute="full"`, …
    Under `meshwright train`, a script that calls `run.resume` is started again after a fault that new processes may not meet again, and `resume` then
    goes on from the freshest state, in the middle of a pass; `recover=False` leaves that out.
    `strategy` changes the plan that was found: a function `(plan, profile, cluster) -> Plan`, or its reference FILE.py:NAME.
    """
    given, config = _by_type(call_factories(objects)), script_config(os.environ, constraints)
    folder = weights_folder(Path(weights), "weights=") if weights is not None else None
    launched = _init_process_group()
    device = _rank_device(launched)
    birth = birth_of(given.model, folder)
    if birth is None:
        given.model.to(device)
    given_loaders = [keep_first_batch(loader) for loader in given.loaders]
    first = given_loaders[0] if given_loaders else latest_loader()
    if first is None:
        raise RequestError("prepare needs the loader, whose batch is the global batch: prepare(model, optimizer, loader)")
    raw = first.raw_loader if isinstance(first, RankLoader) else first
    with torch.random.fork_rng(devices=[]):  # planning draws nothing from the script's generator
        plans, why = _resolve_plan(given.model, given.optimizer, raw, loss_fn, plan, strategy, launched, config)
        chosen, why = _verified_plan(plans, why, given.model, given.optimizer, raw, loss_fn, seed, launched, config, birth, device)
    placeholders = Placeholders(given.model, device, given.optimizer) if birth is not None else None
    parameters = {name: weakref.ref(p) for name, p in given.model.named_parameters()}
    session = Session(
        chosen, given.model, given.optimizer, seed=seed, clip=clip, planned_loss=loss_fn, broadcasts=birth is None, placeholders=placeholders
    )
    fill_with_initial_values(session.applied, birth, folder)
    follow_sharded_gradients(session.applied, parameters)
    if launched.rank == 0:
        _report_plan(chosen, why, launched)
    loaders = prepare_loaders(given_loaders or (first,), session, device)
    snapshots = launched.snapshots if recover else ""
    own = loaders if given.loaders else ()
    return Run(session, given, own, why, reader=loaders[0], snapshots=snapshots, snapshot_every=launched.snapshot_every)


def _by_type(objects: Sequence[Any]) -> _Prepared:
    """Sort what `prepare` was given; the checks here need no plan."""
    kinds: dict[str, list[Any]] = {"model": [], "optimizer": [], "schedule": [], "scaler": [], "loader": []}
    for thing in objects:
        kind = next((kind for kind, types in _KINDS.items() if isinstance(thing, types)), "loader")
        if kind == "loader" and (isinstance(thing, (str, bytes, Path, torch.Tensor)) or not isinstance(thing, Iterable)):
            raise RequestError(f"prepare takes a model, an optimizer, loaders, schedules and a GradScaler, not a {type(thing).__name__}")
        kinds[kind].append(thing)
    for kind in ("model", "optimizer"):
        if len(kinds[kind]) != 1:
            raise RequestError(f"prepare takes one {kind}, and was given {len(kinds[kind])}: call prepare once for each model, with its optimizer")
    (model,), (optimizer,) = kinds["model"], kinds["optimizer"]
    check_optimizer(model, optimizer)
    for schedule in kinds["schedule"]:
        if getattr(schedule, "optimizer", optimizer) is not optimizer:
            raise RequestError(f"{type(schedule).__name__} schedules another optimizer: prepare it with that one")
    return _Prepared(model, optimizer, tuple(kinds["loader"]), tuple(kinds["schedule"]), tuple(kinds["scaler"]), tuple(objects))


def gather(value: Any) -> Any:
    """A tensor, or each tensor of a tree, of all data ranks: concatenated along dim 0 in the order of the global batch's samples. A number or a
    tensor without dims becomes a tensor with one entry a data rank. Collective: every rank calls it, for a batch of the loader that it iterates."""
    return gather_metrics.gather(value, _current_loader("gather"))


def mean(value: Any, loader: Iterable[Batch] | None = None) -> Any:
    """The mean over the global batch of values, such as a loss, that are means over this rank's samples. Collective. The batch is the one that
    `loader` yielded last; without it, the one of the loader that is being iterated."""
    found = loader if isinstance(loader, RankLoader) else _current_loader("mean")
    if loader is None and found is not None and not found.is_open and len({other.share.weight for other in used_loaders() if other.share}) > 1:
        raise RequestError("mw.mean: the loops are over, and their last batches were split differently: name the loader, mw.mean(loss, train_loader)")
    return gather_metrics.mean(value, found)


def is_first() -> bool:
    """True on the one rank that should print and save."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    launched = detect_launched_rank(os.environ)
    return launched is None or launched.rank == 0


def print(*values: Any, **options: Any) -> None:
    """Python's print, on the first rank only."""
    if is_first():
        builtins.print(*values, **options)


def _current_loader(function: str) -> RankLoader | None:
    """The loader that the script iterates; None in a script of one rank that has prepared none."""
    loader = latest_loader()
    if loader is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RequestError(f"mw.{function}: no loader was prepared, so it is not known which samples a rank has: give the loader to mw.prepare")
    return loader


def parallelize(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | str | Path) -> AppliedPlan:
    """Apply a plan in place, for your own loop of `model(x)`, `loss.backward()`, `optimizer.step()`. Gradients are averaged over ranks. A model
    without values, of `deferred_init` or on the meta device, gets them piece by piece."""
    launched = _init_process_group()
    check_optimizer(model, optimizer)
    birth = birth_of(model, None)
    placeholders = Placeholders(model, _rank_device(launched), optimizer) if birth is not None else None
    parameters = {name: weakref.ref(p) for name, p in model.named_parameters()}
    plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    applied = apply(plan, model, optimizer, broadcasts=birth is None, placeholders=placeholders)
    fill_with_initial_values(applied, birth, None)
    follow_sharded_gradients(applied, parameters)
    return applied


def state_dict(applied: AppliedPlan) -> dict[str, torch.Tensor]:
    """Parameters and buffers after `parallelize`, whole, under the model's own names, on the first rank's CPU; empty on the others. Collective."""
    state = {name: tensor for name, tensor in whole_state_dict(applied) if not tensor.is_meta}
    return state if applied.groups.rank == 0 else {}


def load_state_dict(applied: AppliedPlan, state: Mapping[str, torch.Tensor]) -> None:
    """Distribute whole tensors that the first rank has, after `parallelize`. Collective."""
    load_whole_state_dict(applied, as_mapping(state, "load_state_dict"))


def plan_for(model: nn.Module, batch: Batch, loss_fn: Loss, *, world: int | None = None, **constraints: Any) -> Ranking:
    """Ranked plans for a live model on this machine, best first; `explain` gives the reasons. `batch` is a global batch."""
    cluster = discover(os.environ, ranks=world)
    workload = Workload(sample_count(batch))
    profile = trace_module(model, loss_fn, batch, name=type(model).__name__, device=cluster.devices[0].kind)
    calibration = calibrate.load_cached(cluster, os.environ) or datasheet_calibration(cluster)
    fixed = Constraints(world=world, **constraints)
    if fixed.flow is None and len(cluster.devices) > 1:
        fixed = replace(fixed, flow=_trace_dataflow(model, loss_fn, batch, fixed.mesh))
    return rank_plans_traced(profile, cluster, workload, calibration, fixed, lambda: _trace_dataflow(model, loss_fn, batch))


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
    plan: Plan | str | Path | None, strategy: Strategy | PlanTransform | str | None, launched: LaunchedRank, config: RunConfig,
) -> tuple[Sequence[Plan], str]:  # fmt: skip
    """The plans that may run, best first, and why."""
    given = plan or (launched.plan if launched.plan not in ("", "auto") else None)
    if given is not None and strategy is not None:
        raise RequestError("a given plan runs unchanged, and a strategy would change it: leave one of them out")
    if isinstance(given, Plan):
        return [given], " ".join(["Given by the script.", *explain_samples(given)])
    if given is not None:
        loaded = Plan.load(Path(given))
        return [loaded], " ".join([f"Given by {given}.", *explain_samples(loaded)])
    decision: list[Any] = [None]
    if launched.rank == 0:
        decision = [_plan_on_rank_zero(model, optimizer, loader, loss_fn, strategy, launched.world, config)]
    if launched.world > 1:
        dist.broadcast_object_list(decision, src=0)
    if isinstance(decision[0], RequestError):
        raise decision[0]
    return decision[0]  # type: ignore[no-any-return]


def _plan_on_rank_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    strategy: Strategy | PlanTransform | str | None, world: int, config: RunConfig,
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
        workload = Workload(size, "train", _script_precision(config), optimizer_name if optimizer_name in ("sgd", "adam", "adamw") else "adamw")
        calibration = calibrate.load_cached(cluster, os.environ) or datasheet_calibration(cluster)
        # A script may use its model in ways that torch.compile cannot trace, so the model is compiled only on request.
        mesh, backend = Mesh.parse(config.mesh) if config.mesh else None, dist.get_backend() if world > 1 else None
        flow = _trace_dataflow(model, loss_fn, batch, mesh) if loss_fn is not None and world > 1 else None
        constraints = replace(constraints_from_config(config, flow), world=world, compile=config.compile or "none", backend=backend)
        trace = lambda: _trace_dataflow(model, loss_fn, batch) if loss_fn is not None else None  # noqa: E731
        ranking = rank_plans_traced(profile, cluster, workload, calibration, constraints, trace)
        why = explain(ranking)
        if transform is not None:
            ranking, change = apply_strategy(ranking, transform, lambda _: flow)
            why = f"{change}\n{why}"
        if not ranking.best.estimate.fits:
            raise RequestError(why.replace("\n", " "))
        if profile.untraceable:
            builtins.print(
                f"meshwright: the model was run instead of traced, for data parallelism and ZeRO alone: {profile.untraceable}", file=sys.stderr
            )
        return ranking.alternatives, why
    except RequestError as error:
        return error


def _script_precision(config: RunConfig) -> Precision:
    """What a script asks for; in fp32 unless it does, since it may have an autocast of its own."""
    if config.precision == "best":
        raise RequestError('precision=best is for `meshwright train MODEL`: name one, such as precision="bf16"')
    return "fp32" if config.precision == "auto" else config.precision


def _verified_plan(
    plans: Sequence[Plan], why: str, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch], loss_fn: Loss | None,
    seed: int, launched: LaunchedRank, config: RunConfig, birth: Birth | None, device: torch.device,
) -> tuple[Plan, str]:  # fmt: skip
    """The first plan that computes what one device does, and why it was chosen. Without a loss there is nothing to compare."""
    if loss_fn is None or launched.world == 1 or not config.verify:
        return plans[0], why
    check = make_collective_check(model, optimizer, lambda: _batch_to_verify(loader), loss_fn, seed, birth=birth, device=device)
    log = (lambda line: print(f"meshwright: {line}", file=sys.stderr)) if launched.rank == 0 else lambda _: None
    chosen, lines = choose_verified(plans, check, log)
    return chosen, add_lines(lines, why)


def _batch_to_verify(loader: Iterable[Batch]) -> Batch:
    """An example batch. The loader is left as it is."""
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
        if not count:
            raise RequestError("the loader yields nothing: its data set is empty")
        return loader.collate_fn([loader.dataset[i] for i in range(count)])
    try:
        return loader.peek() if isinstance(loader, OneShotLoader) else next(iter(loader))
    except StopIteration:
        raise RequestError("the loader yields nothing: its data set is empty, or it is a generator at its end") from None


def _report_plan(plan: Plan, why: str, launched: LaunchedRank) -> None:
    builtins.print(f"meshwright: {plan.summary()}", file=sys.stderr)
    if inexact := describe_inexactness(plan):
        builtins.print(f"meshwright: {inexact}", file=sys.stderr)
    if launched.run:
        plan.save(Path(launched.run) / "plan.json")
        write_json(Path(launched.run) / "why.json", {"why": why})
    if launched.launcher == "python":
        num_devices = len(discover(os.environ).devices)
        if num_devices > 1:
            builtins.print(
                f"meshwright: 1 of {num_devices} devices is used; to use all: meshwright train {sys.argv[0] or 'script.py'}", file=sys.stderr
            )
