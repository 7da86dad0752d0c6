"""Entry points of a rank: probe the machine, train a built-in task, or run a user's script. Called by the worker pool or by external ranks."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from meshwright import data
from meshwright.checkpoint.checkpoint_folder import step_folder
from meshwright.checkpoint.manifest import Manifest
from meshwright.comm import Ledger, NullComm, TorchComm
from meshwright.core.calibration import Rates
from meshwright.core.errors import NonFiniteLossError, RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.event import Fault
from meshwright.core.injected_fault import InjectedFault, parse_injected_faults
from meshwright.core.phases import PhaseClock
from meshwright.core.plan import Plan
from meshwright.core.progress_page import ProgressPage
from meshwright.core.serialization import from_data, read_json
from meshwright.core.task import Task
from meshwright.core.verification import Verification
from meshwright.describe.collective_probe import measure_in_turns
from meshwright.describe.probe import host_copy_rates, measure_rates, slowest_rates
from meshwright.describe.speed_groups import rates_by_speed_group, suspect_unequal
from meshwright.execute.birth import Birth, check_replicas
from meshwright.execute.fault_injection import FaultInjection
from meshwright.execute.placeholders import Placeholders
from meshwright.execute.rank_device import setup_device
from meshwright.execute.session import Session
from meshwright.execute.session_state import restore_first_whole, restore_session
from meshwright.execute.state_digest import state_digest
from meshwright.execute.step_profiler import profile_step
from meshwright.execute.verify import verify
from meshwright.execute.weights import LoadedWeights, export_weights, load_weights
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.observe import Recorder, open_sinks, peak_resident_bytes, reset_peak_resident, resident_bytes
from meshwright.orchestrate.births import born_in_pieces, build_whole, describe_birth
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.job import load_dataset, load_task, with_verified_samples
from meshwright.orchestrate.lr_schedule import learning_rate
from meshwright.orchestrate.nonfinite_policy import NonFinitePolicy
from meshwright.orchestrate.p2p_overhead_probe import measure_p2p_overhead
from meshwright.orchestrate.plan_verification import Check, make_collective_check
from meshwright.orchestrate.rank_progress import open_progress
from meshwright.orchestrate.recovery import FIRST_GENERATION, Generation
from meshwright.orchestrate.resume import MODEL_FOLDER, checkpoints_of, describe_names
from meshwright.orchestrate.run_checkpoints import RunCheckpoints
from meshwright.orchestrate.script_state import finish_saves
from meshwright.orchestrate.step_log import StepLog, StepRecord
from meshwright.schedule import LedgerLine, ledger_differences

_MakeBatches = Callable[[], Iterator[dict[str, torch.Tensor]]]
_WARMUP_STEPS = 3  # the first steps allocate, fault pages in and compile: not part of the measured step time
_PROFILED_STEP = 5
_METRICS_INTERVAL_S = 0.5


def probe_rank(
    rank: int, world: int, init_method: str, device: str, backend: str, threads: int, quick: bool, rank_devices: Sequence[str] = ()
) -> tuple[list[Rates], Mapping[str, float]]:
    """Run one rank of a probe; returns the rates of the slowest rank, for each kind of device or speed group, and host copy rates (rank 0)."""
    torch_device = setup_device(rank_devices[rank] if rank_devices else device if device == "cpu" else f"{device}:{rank}", threads)
    kind = torch_device.type
    join_process_group(Rendezvous(rank, world, init_method, backend, kind, rank))
    comm = TorchComm(torch.distributed.group.WORLD, Ledger()) if world > 1 else NullComm()  # type: ignore[arg-type]
    rates = measure_rates(
        comm,
        torch_device,
        backend=backend,
        threads=threads,
        read_memory=torch.cuda.memory_allocated if kind == "cuda" else resident_bytes,
        quick=quick,
        mixed_devices=bool(rank_devices),
        pair_comm=_make_pair_comm(world),
        log_progress=lambda _: None,
    )
    if world > 1 and kind == "cpu" and not rank_devices:
        rates = replace(rates, fixed={**rates.fixed, "p2p": measure_p2p_overhead(comm, backend)})
    all_rates: list[Any] = [rates] * world
    if world > 1:
        torch.distributed.all_gather_object(all_rates, rates)
    by_speed = kind == "cpu" and not rank_devices
    turn_speeds: list[Any] = [[]] * world
    if by_speed and suspect_unequal(all_rates):  # the same answer on all ranks
        torch.distributed.all_gather_object(turn_speeds, measure_in_turns(comm))
    copies = host_copy_rates(torch_device) if rank == 0 else {}
    leave_process_group()
    if by_speed:
        return rates_by_speed_group(all_rates, turn_speeds if turn_speeds[0] else ()), copies
    names = dict.fromkeys(r.device for r in all_rates)
    return [slowest_rates([r for r in all_rates if r.device == name]) for name in names], copies


def _make_pair_comm(world: int) -> TorchComm | None:
    """The two-rank group of this rank and its neighbour; None if the number of ranks is odd. Collective."""
    if world < 2 or world % 2:
        return None
    group, _ = torch.distributed.new_subgroups_by_enumeration([[r, r + 1] for r in range(0, world, 2)])
    return TorchComm(group, Ledger())


def train_rank(
    rank: int, world: int, init_method: str, folder: str, local_rank: int | None = None, progress: str | None = None,
    generation: Generation = FIRST_GENERATION,
) -> dict[str, Any]:  # fmt: skip
    """Train as one rank of the run that its folder describes; returns what it measured. `progress` is the folder of its progress page, which its
    supervisor reads."""
    home = Path(folder)
    job = RunConfig(**read_json(home / "job.json"))
    plan = Plan.load(home / "plan.json")
    estimate = from_data(Estimate, read_json(home / "estimate.json")["estimate"], "estimate.json")
    joined = torch.distributed.is_initialized()
    if plan.device_order and joined:
        raise RequestError("plan: device_order cannot move ranks that a launcher has already started on their devices: leave device_order out")
    local = local_rank if local_rank is not None else plan.device_order[rank] if plan.device_order else rank
    sinks = open_sinks(home, job.tensorboard, job.prometheus_port, generation.first_step) if rank == 0 else ()
    with Recorder(home, rank, sinks, generation.number) as recorder, open_progress(progress, rank) as page:
        device = setup_device(plan.device_of(rank, local), plan.threads)
        recorder.event("start", pid=os.getpid(), device=str(device), world=world)
        if not joined:
            join_process_group(Rendezvous(rank, world, init_method, plan.backend, device.type, local, plan.sync.timeout_s))
        try:
            return _TrainingLoop(job, plan, estimate, recorder, device, rank, page, generation).run(home)
        except NonFiniteLossError as error:
            if joined:  # no supervisor of ours records it
                recorder.fault(Fault(time.time(), rank, type(error).__name__, str(error), secondary=error.secondary))
            raise
        finally:
            if not joined:
                leave_process_group()


class _TrainingLoop:
    """The training loop of one rank: reads batches, steps the session, writes metrics."""

    def __init__(
        self, job: RunConfig, plan: Plan, estimate: Estimate, recorder: Recorder, device: torch.device, rank: int, page: ProgressPage,
        generation: Generation,
    ) -> None:  # fmt: skip
        self.job, self.plan, self.estimate, self.recorder, self.device, self.rank = job, plan, estimate, recorder, device, rank
        self.page, self.generation = page, generation
        self.injection = FaultInjection(parse_injected_faults(job.inject), rank, generation.number, self._say_injected)
        self.task = load_task(job)
        self.phases = PhaseClock()
        self.first_step = 0  # of this process: a run that goes on begins later
        self.losses: list[float] = []
        self.times: list[float] = []
        self.validations: list[dict[str, float]] = []
        self.birth: Birth | None = None  # None: the model is built whole
        interval_steps = 1 if device.type == "cpu" else max(1, round(_METRICS_INTERVAL_S / max(estimate.step_s, 1e-4)))
        self.log = StepLog(device, interval_steps, self._write_metrics)

    def run(self, folder: Path) -> dict[str, Any]:
        session = self._make_session()
        self.policy = NonFinitePolicy(self.job, session, self.recorder, folder)
        self._compare_ledger(session, folder, "start-up")
        session.applied.groups.ledger.on_call = self.page.begin_collective
        self._fill(session)
        train, validation = self._make_loaders()
        checkpoints = RunCheckpoints(
            self.job, session, self.recorder, folder, self.estimate.step_s, train.state_dict, self._settle, self.generation.snapshots
        )
        self.phases.mark("build")
        self.recorder.event("applied", seconds=round(self.phases.seconds["build"], 3), held=session.applied.memory_bytes())
        if self.plan.memory.precision == "fp8":
            self.recorder.event("fp8", layers=len(session.applied.fp8.converted), in_bf16=dict(session.applied.fp8.skipped))
        self.page.enter("load")
        self._load_state(session, train, checkpoints)
        with checkpoints.stop.watching():
            exposed = self._run_steps(session, train, validation, checkpoints, folder)
        self._settle()
        self.phases.mark("steps")
        memory = self._peak_memory()
        if not checkpoints.stop.signal:
            self._validate(session, validation, self.job.steps - 1)
            self.phases.mark("validation")
            self.page.enter("save")
            self._leave_state(session, checkpoints, folder)
        checkpoints.close()
        self.phases.mark("save")
        digest = state_digest(session.applied) if self.job.digest else None
        self.phases.mark("end")
        seconds = sum(self.phases.seconds.values())
        self.recorder.event("end", memory_bytes=memory, seconds=round(seconds, 3))
        return {
            "losses": self.losses,
            "first_step": self.first_step,
            "times": self.times,
            "validation": self.validations,
            "skipped_steps": self.policy.skipped,
            "memory_bytes": memory,
            "state_digest": digest,
            "exposed": exposed,
            "stopped": checkpoints.stopped(),
            "checkpoint": checkpoints.newest(),
            "seconds": seconds,
            "phases": self.phases.seconds,
        }

    def _run_steps(
        self, session: Session, train: data.Loader, validation: _MakeBatches, checkpoints: RunCheckpoints, folder: Path
    ) -> dict[str, float]:  # fmt: skip
        """Take the steps that are left, until the last or until the run is told to stop; returns what the profiled step exposed."""
        rate, exposed, last_warmup = self._make_lr_function(), dict[str, float](), self.first_step + _WARMUP_STEPS - 1
        profile_at = self.first_step + _PROFILED_STEP if self.job.profile and self.job.steps - self.first_step > _PROFILED_STEP + 2 else -1
        self._reset_peak_memory()
        self.log.restart_clock()
        self.page.enter("data")
        for step, batch in enumerate(train, self.first_step):
            self.page.begin_step(step)
            for group in session.optimizer.param_groups:
                group["lr"] = rate(step)
            run_step = partial(session.step, {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}, self.task.loss)
            with self.injection.around_step(step, session.model, self.page.last_own_seconds):
                if step == profile_at:
                    self.log.drain()
                if step == profile_at and self.rank == 0:
                    self.page.enter("profile")
                    self.phases.mark("steps")
                    result, exposed = profile_step(run_step, self.device, folder / "trace.json")
                else:
                    session.applied.groups.ledger.drain()
                    result = run_step()
            if step == last_warmup:
                self._compare_ledger(session, folder, "step")
            self.log.add(step, result, rate(step))
            self.page.end_step()
            if step in (profile_at, last_warmup):
                self.log.close_interval(is_timed=False)
                self.phases.mark("profile" if step == profile_at else "warm-up")
            self.policy.check()
            if self.job.validate_every and (step + 1) % self.job.validate_every == 0 and step + 1 < self.job.steps:
                self.phases.mark("steps")
                checkpoints.after_validation(self._validate(session, validation, step))
                self.phases.mark("validation")
            self.page.enter("save")
            if checkpoints.after_step(is_warm=step >= last_warmup, is_last=step + 1 == self.job.steps):
                break
            self.page.enter("data")
        return exposed

    def _settle(self) -> bool:
        """Read the losses of all finished steps, and end the run if one must end it; returns whether the state is finite, as far as is known."""
        self.log.drain()
        self.policy.check()
        return self.policy.is_savable()

    def _load_state(self, session: Session, train: data.Loader, checkpoints: RunCheckpoints) -> None:
        """Go on from the freshest state after a fault, from a checkpoint, or begin with the weights of a folder, if the run is to."""
        if self._recover(session, train, checkpoints):
            pass
        elif self.job.resume is not None:
            root, step = checkpoints_of(Path(self.job.resume))
            with _kept_settings(session.optimizer):
                manifest, problems = restore_session(session, root, step)
            self._go_on_from(manifest, problems, "checkpoint", train, checkpoints)
        elif self.job.init_from is not None and self.birth is None:
            self._say_loaded(load_weights(session.applied, Path(self.job.init_from)))
        if self.generation.states or self.job.init_from is not None or self.job.resume is not None:
            self.phases.mark("load")
        self.first_step = session.steps_done
        train.steps = max(self.job.steps - self.first_step, 0)

    def _recover(self, session: Session, train: data.Loader, checkpoints: RunCheckpoints) -> bool:
        """Go on from the freshest state that is whole; whether there is one."""
        states = self.generation.states
        with _kept_settings(session.optimizer):
            index, manifest, problems = restore_first_whole(session, [step_folder(Path(s.root), s.step) for s in states])
        if manifest is not None:
            self._go_on_from(manifest, problems, states[index].kind, train, checkpoints)
        else:
            for line in problems if self.rank == 0 else ():
                print(f"meshwright: {line}; it is left out", file=sys.stderr)
        return manifest is not None

    def _go_on_from(self, manifest: Manifest, problems: list[str], kind: str, train: data.Loader, checkpoints: RunCheckpoints) -> None:
        self._load_position(train, manifest)
        checkpoints.resumed_from(manifest, is_checkpoint=kind == "checkpoint")
        self.recorder.event("resumed", manifest.step, world=manifest.world, problems=problems, source=kind)
        for line in problems if self.rank == 0 else ():
            print(f"meshwright: {line}; the {kind} of step {manifest.step} is used", file=sys.stderr)

    def _load_position(self, train: data.Loader, manifest: Manifest) -> None:
        try:
            train.load_state_dict(manifest.state["data"])
        except RequestError as error:
            if not self.job.allow_changes:
                raise
            if self.rank == 0:
                print(f"meshwright: {str(error).rpartition(':')[0]}; the data begin anew, as allow_changes asks", file=sys.stderr)

    def _say_loaded(self, loaded: LoadedWeights) -> None:
        self.recorder.event("weights", **vars(loaded))
        if self.rank == 0 and self.job.init_from is not None and (loaded.missing or loaded.unexpected):
            print(f"meshwright: {describe_names(self.job.init_from, loaded.missing, loaded.unexpected)}", file=sys.stderr)

    def _leave_state(self, session: Session, checkpoints: RunCheckpoints, folder: Path) -> None:
        """What a finished run leaves: a last checkpoint, where it has made some, and the weights."""
        checkpoints.at_end()
        if self.job.export:
            source = Path(self.job.model.removeprefix("hf:"))
            try:
                export_weights(session.applied, folder / MODEL_FOLDER, source if self.job.model.startswith("hf:") and source.is_dir() else None)
            except RequestError as error:  # a full disk: the run itself is done
                self.recorder.event("export", message=str(error))
                print(f"meshwright: {error}", file=sys.stderr)

    def _compare_ledger(self, session: Session, folder: Path, phase: str) -> None:
        """Compare the collectives of start-up, or of the last warm-up step, with the plan's ledger; records an event with the differences."""
        done = [(line.name, line.op, line.group, line.calls, line.bytes) for line in session.applied.groups.ledger.drain()]
        planned = read_json(folder / "ledger.json")
        rank_lines = next(lines for ranks, lines in planned.items() if str(self.rank) in ranks.split(","))
        differences = ledger_differences([from_data(LedgerLine, line, "ledger.json") for line in rank_lines], done, phase)
        self.recorder.event("ledger", phase=phase, lines=len(done), differences=differences)
        if differences:
            print(f"meshwright: rank {self.rank}: communication of the {phase} differs from the plan: {differences[0]}", file=sys.stderr)

    def _say_injected(self, fault: InjectedFault, step: int) -> None:
        self.recorder.event("injected", step, fault=str(fault))
        print(f"meshwright: rank {self.rank}: injected at step {step}: --inject {fault}", file=sys.stderr, flush=True)

    def _make_session(self) -> Session:
        torch.manual_seed(self.job.seed)
        model, self.birth, reason = born_in_pieces(self.job, self.task, self.plan)
        if model is None:
            model = build_whole(self.job, self.task, self.plan).to(self.device)
        placeholders = Placeholders(model, self.device) if self.birth is not None else None
        optimizer, clip = make_optimizer(self.job, model), self.job.clip or None
        session = Session(self.plan, model, optimizer, seed=self.job.seed, clip=clip, broadcasts=False, placeholders=placeholders)
        self.recorder.event("born", sharded=self.birth is not None, reason=reason)
        if self.rank == 0 and (line := describe_birth(self.birth, reason, self.plan, session.applied.whole.shapes)):
            print(f"meshwright: {line}", file=sys.stderr, flush=True)
        return session

    def _fill(self, session: Session) -> None:
        """Give the model its initial values, where it has none, and compare those that several ranks hold, unless a state is loaded after a fault."""
        if self.birth is None:
            if not self.generation.states:
                check_replicas(session.applied)
            return
        self.birth.fill(session.applied)
        if self.birth.loaded is not None:
            self._say_loaded(self.birth.loaded)
        if self.birth.values is not None and self.birth.values.rng_state is not None:
            torch.set_rng_state(self.birth.values.rng_state)  # as after an ordinary construction
        if not self.generation.states:
            self.birth.check_replicas(session.applied)

    def _make_loaders(self) -> tuple[data.Loader, _MakeBatches]:
        first, count = self.plan.sample_range(self.plan.mesh.data_rank(self.rank))
        batch = self.plan.global_batch

        def loader(split: Any, steps: int) -> data.Loader:
            dataset = load_dataset(self.job, self.task, split)
            sampler = data.GlobalSampler(len(dataset), batch, self.job.seed, shuffle=split == "train")
            return data.Loader(dataset, sampler, first, count, steps, pin_memory=self.device.type == "cuda")

        return loader("train", self.job.steps), lambda: iter(loader("validation", self.job.validate_batches))

    def _make_lr_function(self) -> Callable[[int], float]:
        job, peak, warmup = self.job, self.job.learning_rate, self.job.warmup_steps
        assert peak is not None
        assert warmup is not None
        return lambda step: learning_rate(step, peak=peak, warmup=warmup, steps=job.steps, schedule=job.lr_schedule)

    def _validate(self, session: Session, make_batches: _MakeBatches, step: int) -> float | None:
        if not self.job.validate_batches:
            return None
        self.page.enter("validation")
        self.log.drain()
        batches = ({k: v.to(self.device) for k, v in b.items()} for b in islice(make_batches(), self.job.validate_batches))
        loss = session.validate(batches, self.task.loss)
        self.policy.look_at_validation(step, loss)
        self.validations.append({"step": step, "loss": loss})
        self.recorder.event("validation", step=step, loss=loss)
        self.recorder.metrics({"step": step, "time": time.time(), "validation_loss": loss})
        self.policy.check()
        self.log.restart_clock()
        return loss

    # -- measuring --

    def _write_metrics(self, records: list[StepRecord]) -> None:
        """Write the metrics of finished steps."""
        memory = self._peak_memory()
        for record in records:
            self.losses.append(record.loss)
            self.policy.look(record)
            if record.is_timed and record.step >= self.first_step + _WARMUP_STEPS:
                self.times.append(record.seconds)
            samples = self.plan.global_batch / record.seconds
            self.recorder.metrics(
                {
                    "step": record.step,
                    "time": time.time(),
                    "loss": record.loss,
                    "step_s": record.seconds,
                    "samples_per_s": samples,
                    "tokens_per_s": samples * self.task.tokens_per_sample if self.task.tokens_per_sample else None,
                    "mfu": self.estimate.mfu * self.estimate.step_s / record.seconds if self.estimate.mfu else None,
                    "memory_bytes": memory,
                    "grad_norm": record.grad_norm,
                    "learning_rate": record.learning_rate,
                }
            )

    def _reset_peak_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_peak_resident()

    def _peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else peak_resident_bytes()


@contextmanager
def _kept_settings(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer's settings are in the end as the request has them, although a checkpoint was loaded: they may have been given anew."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)


def make_optimizer(job: RunConfig, model: torch.nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """The optimizer by name. Adam is fused, except for parameters on meta: it updates in one pass and keeps no temporaries."""
    lr, decay = job.learning_rate, job.weight_decay
    assert lr is not None  # planning fills it in
    parameters = [p for p in model.parameters() if p.requires_grad]
    if job.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=job.betas, eps=job.adam_eps, weight_decay=decay, fused=fused)
    if job.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr, betas=job.betas, eps=job.adam_eps, weight_decay=0.0, fused=fused)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9 if job.optimizer == "momentum" else 0.0, weight_decay=decay)


def verify_rank(rank: int, world: int, init_method: str, job: Mapping[str, Any], plan: Mapping[str, Any]) -> Verification:
    """Verify a plan as one of its ranks, before training; returns what was found, the same on every rank."""
    config, trial = RunConfig(**job), from_data(Plan, plan, "plan")
    local = trial.device_order[rank] if trial.device_order else rank
    device = setup_device(trial.device_of(rank, local), trial.threads)
    join_process_group(Rendezvous(rank, world, init_method, trial.backend, device.type, local, trial.sync.timeout_s))
    try:
        config = with_verified_samples(config, load_task(config), trial)
        task = load_task(config)
        model, birth, optimizer = _model_to_verify(config, task, trial, device)
        batch = verification_batch(config, task, trial) if rank == 0 else None
        return verify(trial, model, optimizer, batch, task.loss, seed=config.seed, birth=birth, device=device)
    finally:
        leave_process_group()


def make_rank_check(job: RunConfig, plan: Plan, local_rank: int) -> Check:
    """A check for ranks that a launcher has started and that verify before they train. All plans are for the same devices."""
    job = with_verified_samples(job, load_task(job), plan)
    task, device = load_task(job), setup_device(plan.device_of(torch.distributed.get_rank(), local_rank), plan.threads)
    model, birth, optimizer = _model_to_verify(job, task, plan, device)
    return make_collective_check(model, optimizer, lambda: verification_batch(job, task, plan), task.loss, job.seed, birth=birth, device=device)


def _model_to_verify(job: RunConfig, task: Task, plan: Plan, device: torch.device) -> tuple[torch.nn.Module, Birth | None, torch.optim.Optimizer]:
    """The model without values where that is possible: verification gives them to as many blocks as fit."""
    torch.manual_seed(job.seed)
    model, birth, _ = born_in_pieces(job, task, plan)
    if model is None:
        model = build_whole(job, task, plan).to(device)
    return model, birth, make_optimizer(job, model, fused=birth is None)


def verification_batch(job: RunConfig, task: Task, plan: Plan) -> dict[str, torch.Tensor]:
    """The first samples of the training data: at most a global batch."""
    dataset = load_dataset(job, task, "train")
    return dict(dataset.batch(torch.arange(min(plan.global_batch, len(dataset)))))


def run_script(
    rank: int, world: int, init_method: str, script: str, arguments: list[str], folder: str, environment: Mapping[str, str],
    generation: Generation = FIRST_GENERATION,
) -> float:  # fmt: skip
    """Run a user's own script as one rank; `prepare` inside it reads its rank from the environment, as under any launcher. Returns seconds."""
    start = time.perf_counter()
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MESHWRIGHT_INIT_METHOD=init_method, MESHWRIGHT_RUN=folder, MESHWRIGHT_SNAPSHOTS=generation.snapshots or "", **environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise RequestError(f"{script} exited with {error.code}") from None
    finally:
        finish_saves()
        leave_process_group()
        os.environ.clear()
        os.environ.update(before)  # a worker may be reused, and must not see the environment of this rank
    return time.perf_counter() - start
