"""The planner's estimate of traced models beside published runs of the same layout, and beside the closed form, which `published.py` compares with
all of these runs. Models are built from each row's own dimensions, traced, and parallelized as the row says; rates are the data sheet's with the
constants of the row's own generation of frameworks. Attention is a flash kernel in all plans: of rows without one only the distance from the closed
form with flash kernels is reported.

All of these runs fitted. Which of them the estimate says fit is reported too, with the bytes by kind of those that do not. Parameters and gradients
are stored in fp32 here, also where a row's framework stores them in bf16; where the row's layout does not fit so, the same mesh is tried with
higher ZeRO stages. What a row leaves open, its recomputation, is chosen as whoever ran it had to: as little as fits.
"""

from __future__ import annotations

import json
import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from meshwright.core.cluster import Cluster
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import MeshwrightError
from meshwright.core.estimate import Estimate
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.task import Field, Task
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.closed_form_step import closed_form_step
from meshwright.cost.constants import load_fitted_constants
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.cost.parallel_config import ParallelConfig
from meshwright.cost.transformer_kernels import TransformerConfig
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.plan import Constraints
from meshwright.plan.pipeline_planner import cut_stages
from meshwright.plan.recompute_planner import choose_mixed_recompute
from meshwright.plan.search_space import candidates
from meshwright.plan.tuning import tune
from meshwright.zoo import losses
from meshwright.zoo.gpt import GPT, GPTConfig
from meshwright.zoo.llama import Llama, LlamaConfig
from published import DATA, is_test, settled
from published_rows import Job, read

MACHINES = {"A100": "dgx-a100", "H100": "dgx-h100"}  # as the catalog has them: eight around NVSwitch, rails between nodes


@dataclass(frozen=True)
class Row:
    row: str
    source: str
    mesh: str
    test: bool  # not among those that the constants were fitted to
    measured_s: float
    closed: float  # relative errors
    planned: float | None
    apart: float  # of the plan's estimate from the closed form's
    breakdown: dict[str, float]
    fits: bool  # the layout as the row says it
    fits_sharded: bool  # so, or with a higher ZeRO stage
    plan: str
    memory: dict[str, float]  # GB of the largest rank, by kind
    capacity_gb: float


def main(
    data: Path = DATA,
    each: Annotated[int, typer.Option(help="Largest number of rows of each source.")] = 8,
    row: Annotated[list[str] | None, typer.Option(help="Only these rows; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    jobs = [job for job in read(data)[0] if job.seconds and _comparable(job) and (not row or job.row in row)]
    rows, skipped = [], {}
    for job in track(_some(jobs, each), "planning", console=Console(stderr=True), transient=True):
        try:
            rows.append(compare(job))
        except MeshwrightError as error:
            skipped[job.row] = str(error)
    if as_json:
        found = {"rows": [asdict(r) for r in rows], "skipped": skipped, "mape": _means(rows), "fitting": _shares_that_fit(rows)}
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table("row", "source", "mesh", "part", "measured", "closed form", "planner", "apart", box=None)
    for r in rows:
        figures = (f"{r.measured_s:.3f} s", f"{r.closed:+.0%}", f"{r.planned:+.0%}" if r.planned is not None else "", f"{r.apart:+.0%}")
        table.add_row(r.row, r.source, r.mesh, "test" if r.test else "training", *figures)
    Console().print(table, _means(rows), skipped, _table_of_misfits(rows), _shares_that_fit(rows))


def _shares_that_fit(rows: list[Row]) -> dict[str, float]:
    """Of runs that ran: the shares that the estimate says fit."""
    count = max(len(rows), 1)
    return {"rows": len(rows), "as the row says": sum(r.fits for r in rows) / count, "or with more ZeRO": sum(r.fits_sharded for r in rows) / count}


def _table_of_misfits(rows: list[Row]) -> Table:
    """The rows that do not fit as they are, with their bytes by kind."""
    table = Table("row", "source", "plan", "GB", "of", "by kind, in GB", "with more ZeRO", box=None, title="Told not to fit", title_justify="left")
    for r in (r for r in rows if not r.fits):
        kinds = ", ".join(f"{kind} {size:.1f}" for kind, size in sorted(r.memory.items(), key=lambda item: -item[1]) if size >= 0.1)
        total = f"{sum(r.memory.values()):.1f}"
        table.add_row(r.row, r.source, r.plan, total, f"{r.capacity_gb:.1f}", kinds, "fits" if r.fits_sharded else "does not fit")
    return table


def compare(job: Job) -> Row:
    constants = load_fitted_constants().constants(job.kind, job.generation)
    spread = settled(job, constants)
    closed = closed_form_step(job.model, spread, job.machine, constants).seconds
    plan, cost = priced(job, spread)
    flash_s = closed_form_step(job.model, replace(spread, flash_attention=True, dropout=False), job.machine, constants).seconds
    assert job.seconds
    planned = cost.step_s / job.seconds - 1 if spread.flash_attention else None
    errors = (closed / job.seconds - 1, planned, cost.step_s / flash_s - 1)
    memory = {kind: size / 1e9 for kind, size in cost.memory_kinds.items()}
    capacity = machine(job.machine.device.name, spread.world).least_memory(spread.world) / 1e9
    sharded = cost.fits or _fits_with_more_zero(job, spread)
    return Row(
        job.row, job.source, str(plan.mesh), is_test(job), job.seconds, *errors, cost.breakdown, cost.fits, sharded, plan.summary(), memory, capacity
    )


def _fits_with_more_zero(job: Job, spread: ParallelConfig) -> bool:
    """Whether the row's mesh fits with a higher ZeRO stage, over all data ranks where the row has none."""
    for zero in range(spread.zero + 1, 4) if spread.dp > 1 else ():
        try:
            if priced(job, replace(spread, zero=zero, shard=spread.shard if spread.zero else spread.dp), with_time=False)[1].fits:
                return True
        except MeshwrightError:
            continue
    return False


def priced(job: Job, spread: ParallelConfig, with_time: bool = True) -> tuple[Plan, Estimate]:
    profile, flow = traced(job.model, spread.precision)
    cluster = machine(job.machine.device.name, spread.world)
    zero = spread.zero if spread.dp > 1 else 0
    shard = min(spread.shard, spread.dp) if zero else 1
    recompute: RecomputeMode = "full" if spread.recompute == "full" and spread.recomputed_share > 0.5 else "none"
    recompute = "selective" if spread.recompute == "attention" else recompute
    constraints = Constraints(
        mesh=Mesh(pp=spread.pp, cp=spread.cp, tp=(spread.tp,), dp=spread.dp // shard, shard=shard),
        zero=zero,
        micro_batches=spread.micro_batches,
        flow=flow,
        recompute=recompute if job.recompute_given else "none",
        offload="none",
        compile="blocks" if spread.fused else "none",
        sequence=spread.sequence_parallel if spread.tp > 1 and spread.cp == 1 else None,
        schedule="interleaved" if spread.pp > 1 and spread.virtual_stages > 1 else None,
    )
    workload = Workload(spread.global_batch, precision=profile.precision)  # type: ignore[arg-type]
    plan = next(candidates(profile, cluster, workload, constraints))
    if spread.virtual_stages > 1 and spread.pp > 1:
        plan = replace(plan, stages=cut_stages(flow, profile, spread.pp * spread.virtual_stages, plan.tensor, plan.tensor_y, plan.mesh.cp))
    calibration = datasheet_calibration(cluster, job.generation)
    if not job.recompute_given:
        plan = choose_mixed_recompute(plan, profile, workload, cluster, calibration) or plan
    price = partial(estimate, profile=profile, workload=workload, cluster=cluster, calibration=calibration, with_time=with_time)
    if not with_time:
        return plan, price(plan)
    return tune(plan, price(plan), constraints, calibration.rates_for(plan.world), price)[:2]


@cache
def traced(model: TransformerConfig, precision: str) -> tuple[ModelProfile, Dataflow]:
    if model.glu:
        sizes = LlamaConfig(
            model.vocab, model.seq, model.layers, model.heads, model.kv_heads, model.hidden, model.ffn, tied_embeddings=model.tied_embeddings
        )
        build = partial(Llama, sizes)
    else:
        build = partial(GPT, GPTConfig(model.vocab, model.seq, model.layers, model.heads, model.hidden))  # type: ignore[assignment]
    task = Task("published", build, losses.next_token_loss, {"tokens": Field((model.seq + 1,), "int64", model.vocab)}, tokens_per_sample=model.seq)
    return trace_task(task, precision=precision), trace_dataflow(task, precision)


@cache
def machine(device: str, world: int) -> Cluster:
    name = next(machine for start, machine in MACHINES.items() if device.startswith(start))
    return resolve_cluster(f"{name}:{-(-world // 8)}", {}, ranks=world)


def _comparable(job: Job) -> bool:
    dense = not job.model.experts and not job.model.head_dim and not job.spread.frozen and (job.model.glu or job.model.ffn == 4 * job.model.hidden)
    return dense and job.machine.per_node == 8 and job.machine.device.name.startswith(tuple(MACHINES))


def _some(jobs: list[Job], each: int) -> list[Job]:
    """The same number of rows of every source, chosen by a hash of the configuration, so that they are always the same; sorted by model."""
    by_source: dict[str, list[Job]] = defaultdict(list)
    for job in sorted(jobs, key=lambda j: zlib.crc32(j.configuration.encode() + b"planned")):
        by_source[job.source].append(job)
    return sorted((job for source_jobs in by_source.values() for job in source_jobs[:each]), key=lambda j: (j.source, j.model.hidden, j.row))


def _means(rows: list[Row]) -> dict[str, dict[str, float]]:
    parts = {"all": rows, "test": [r for r in rows if r.test]}
    return {part: {n: _mean(getattr(r, n) for r in part_rows) for n in ("closed", "planned", "apart")} for part, part_rows in parts.items()}


def _mean(errors: Iterable[float | None]) -> float:
    known = [abs(e) for e in errors if e is not None]
    return round(100 * statistics.fmean(known), 1) if known else math.nan


if __name__ == "__main__":
    typer.run(main)
