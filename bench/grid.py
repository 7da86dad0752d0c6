"""Six small models, the grid of plans that each is measured on, and what one rank does to measure a plan. Used by `regret.py` and `memory.py`."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from links import move_in
from meshwright.core.calibration import Rates
from meshwright.core.cluster import Cluster
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.core.task import Field, Loss, Task
from meshwright.core.workload import Workload
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.discover import discover
from meshwright.describe.profile_tracer import trace_task
from meshwright.execute.session import Session
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.orchestrate.rank_entrypoints import probe_rank
from meshwright.plan.search import Constraints
from meshwright.plan.search_space import candidates
from meshwright.zoo import losses
from meshwright.zoo.cnn import CNN
from meshwright.zoo.cosmoflow import CosmoFlow, CosmoFlowConfig
from meshwright.zoo.dlrm import DLRM, DLRMConfig
from meshwright.zoo.gpt import GPT, GPTConfig
from meshwright.zoo.llama import Llama, LlamaConfig
from meshwright.zoo.vae import VAE, VAEConfig

WORLD = 4
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
OTHER_AXES = (Mesh(cp=2), Mesh(ep=2), Mesh(dp=2, cp=2), Mesh(dp=2, ep=2))  # those that the planner leaves to the user
_OPTIMIZER_S = 1e-3


@dataclass(frozen=True)
class Subject:
    """A model with the description that the planner works from."""

    task: Task
    profile: ModelProfile
    flow: Dataflow
    workload: Workload


def _language(name: str, build: Callable[[], nn.Module], vocab: int, seq: int, batch: int) -> Task:
    return Task(name, build, losses.next_token_loss, {"tokens": Field((seq + 1,), "int64", vocab)}, global_batch=batch, tokens_per_sample=seq)


def _images(name: str, build: Callable[[], nn.Module], loss: Loss, shape: tuple[int, ...], batch: int) -> Task:
    return Task(name, build, loss, {"image": Field(shape), "label": Field((), "int64", 10)}, global_batch=batch)


def _tasks() -> Iterator[Task]:
    """Sizes such that one process takes 50 to 200 ms a step and plans differ: wide layers communicate, long sequences and volumes compute."""
    gpt = GPTConfig(vocab=512, context=32, layers=4, heads=4, width=128)
    yield _language("gpt", partial(GPT, gpt), gpt.vocab, gpt.context, 16)
    llama = LlamaConfig(vocab=1024, context=24, layers=4, heads=8, kv_heads=4, width=160, ffn=416)
    yield _language("llama", partial(Llama, llama), llama.vocab, llama.context, 16)
    vae = VAEConfig(image=(1, 28, 28), hidden=512, latent=32)
    yield _images("vae", partial(VAE, vae), losses.elbo_loss, vae.image, 256)
    yield _images("cnn", CNN, losses.classification_loss, CNN.image, 32)
    cosmo = CosmoFlowConfig(edge=16, filters=(16, 32, 64, 64), dense=(64, 32))
    fields = {"volume": Field(cosmo.volume), "target": Field((cosmo.targets,))}
    yield Task("cosmoflow", partial(CosmoFlow, cosmo), losses.regression_loss, fields, global_batch=8)
    dlrm = DLRMConfig(tables=4, rows=8000, width=64, dense=64, bottom=(128, 128), top=(256, 256, 128))
    fields = {"dense": Field((dlrm.dense,)), "sparse": Field((dlrm.tables,), "int64", dlrm.rows), "label": Field((), "int64", 2)}
    yield Task("dlrm", partial(DLRM, dlrm), losses.click_loss, fields, global_batch=512)


TASKS: Mapping[str, Task] = {task.name: task for task in _tasks()}


def cluster_here() -> Cluster:
    """This machine as four ranks of one thread each, however many cores or GPUs it has."""
    cluster = discover({}, ranks=WORLD, gpus=())
    return replace(cluster, nodes=(replace(cluster.nodes[0], cores=1),))


def subject(name: str) -> Subject:
    task = TASKS[name]
    return Subject(task, trace_task(task), trace_dataflow(task), Workload(task.global_batch))


def legal(of: Subject, cluster: Cluster) -> list[Plan]:
    """Every plan of one, two and four ranks that the planner may consider, in each schedule, and some over axes that it does not try by itself."""
    constraints = [Constraints(flow=of.flow), *(Constraints(flow=of.flow, schedule=s) for s in SCHEDULES[1:])]  # type: ignore[arg-type]
    constraints += [Constraints(flow=of.flow, mesh=mesh) for mesh in OTHER_AXES]
    plans: dict[str, Plan] = {}
    for constraint in constraints:
        try:
            for plan in candidates(of.profile, cluster, of.workload, constraint):
                plans.setdefault(label(plan), plan)
        except RequestError:
            continue  # nothing of this model can be split there
    return list(plans.values())


def chosen(plans: list[Plan], max_count: int) -> list[Plan]:
    """A grid of at most `max_count` plans: strategies take turns, each with its plainest plan (few micro-batches, nothing recomputed) first and then
    with the others, of which each strategy starts with a different one."""
    rows: dict[tuple[int, str], list[Plan]] = {}
    for plan in sorted(plans, key=lambda p: (p.memory.recompute != "none", p.micro_batches, p.memory.recompute, p.tensor.is_sequence_parallel)):
        if plan.micro_batches <= 8:
            rows.setdefault((plan.world, plan.strategy), []).append(plan)
    plans_in_turn = chain.from_iterable(zip_longest(*(_varied(row, offset) for offset, row in enumerate(rows.values()))))
    return sorted([p for p in plans_in_turn if p is not None][:max_count], key=lambda p: (p.world, label(p)))


def _varied(row: list[Plan], offset: int) -> list[Plan]:
    start = 1 + offset % max(len(row) - 1, 1)
    return [row[0], *row[start:], *row[1:start]]


def label(plan: Plan) -> str:
    """Short, and different for different plans of a grid."""
    parts = [f"{a}{'x'.join(map(str, plan.mesh.tp)) if a == 'tp' else plan.mesh.degree(a)}" for a in _AXES if plan.mesh.degree(a) > 1] or ["one"]
    parts += [plan.schedule] * (plan.mesh.pp > 1)
    parts += [f"zero{plan.memory.zero}"] * (plan.memory.zero > 0)
    parts += ["sequence"] * plan.tensor.is_sequence_parallel
    parts += [f"m{plan.micro_batches}"] * (plan.micro_batches > 1)
    parts += [plan.memory.recompute] * (plan.memory.recompute != "none")
    return " ".join(parts)


_AXES = ("pp", "dp", "shard", "cp", "ep", "tp")


# -- in a worker --


def batch_of(task: Task, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Random samples in the task's shape."""
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for name, field in task.fields.items():
        shape = (count, *field.shape)
        is_integer = field.dtype.startswith("int")
        batch[name] = torch.randint(0, field.high, shape, generator=generator) if is_integer else torch.rand(shape, generator=generator)
    return batch


def session_of(task: Task, plan: Plan) -> Session:
    torch.manual_seed(0)
    model = task.build()
    return Session(plan, model, torch.optim.AdamW(model.parameters(), lr=_OPTIMIZER_S, fused=True))


def probed(rank: int, world: int, init_method: str, space: str) -> tuple[list[Rates], Mapping[str, float]]:
    """One rank of a probe, in its network namespace."""
    move_in(space, rank)
    return probe_rank(rank, world, init_method, "cpu", "gloo", 1, True)


class Ran(NamedTuple):
    """What one rank says of a plan: the seconds of each step that counts, or why it cannot run; and in how many seconds the machine's cores
    were at work for how long, and this rank's process among them."""

    steps: list[float]
    refused: str
    lasted_s: float
    cores_s: float
    own_s: float


def timed(
    rank: int, world: int, init_method: str, model: str, plans: list[tuple[Any, int]], warm: int, space: str = "", long_s: float = math.inf
) -> list[Ran]:  # fmt: skip
    """Each plan on this rank: built, run and freed one after the other. A plan comes with how many of its steps are timed; of one whose first
    takes longer than `long_s` that one counts."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    move_in(space, rank)
    join_process_group(Rendezvous(rank, world, init_method))
    results = []
    for data, steps in plans:
        before = time.perf_counter(), _cores_s(), time.process_time()
        times, refused = [], ""
        try:
            times = _steps(TASKS[model], from_data(Plan, data, "plan"), warm, steps, long_s)
        except RequestError as error:
            refused = str(error)
        after = time.perf_counter(), _cores_s(), time.process_time()
        results.append(Ran(times, refused, *(b - a for a, b in zip(before, after, strict=True))))
        gc.collect()
    leave_process_group()
    return results


def _cores_s() -> float:
    """Seconds that this machine's cores have worked for any process, or were stolen by other virtual machines; without interrupts."""
    try:
        user, nice, system, _, _, _, _, stolen, *_ = (int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    except (OSError, ValueError):
        return 0.0  # not Linux
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def others_share(ranks: list[Ran]) -> float:
    """Number of cores that other processes used while a plan ran."""
    return max(ranks[0].cores_s - sum(r.own_s for r in ranks), 0.0) / ranks[0].lasted_s


def _steps(task: Task, plan: Plan, warm: int, steps: int, long_s: float) -> list[float]:
    session = session_of(task, plan)
    data_rank = plan.mesh.data_rank(session.applied.groups.rank)
    batch = batch_of(task, plan.sample_range(data_rank)[1], data_rank)
    gc.collect()
    gc.disable()
    times: list[float] = []
    while len(times) < warm + steps:
        if plan.world > 1:
            dist.barrier()
        start = time.perf_counter()
        float(session.step(batch, task.loss).loss)
        times.append(time.perf_counter() - start)
        if len(times) == 1 and _any_longer(times[0], long_s, plan.world):
            break
    gc.enable()
    return times[warm:] or times


def _any_longer(seconds: float, than_s: float, world: int) -> bool:
    """The same answer on every rank."""
    if math.isinf(than_s) or world == 1:
        return seconds > than_s
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest) > than_s


def median_of_slowest(ranks: list[list[float]]) -> float:
    """A step lasts until the slowest rank is done."""
    return statistics.median(max(times) for times in zip(*ranks, strict=True))
