"""Data parallelism and ZeRO-3: torch's own DDP and FSDP2 are what everybody writes by hand."""

from __future__ import annotations

from by_hand.ours import Job
from cases import Case, raw_ddp, raw_fsdp2
from meshwright.core.mesh import Mesh
from meshwright.zoo.losses import next_token_loss
from rounds import Trial

GPT = Case(batch=4, layers=3, vocab=2048)  # of all blocks that train one
SMALL = Case(batch=2, layers=3, vocab=2048)  # where every rank takes samples of its own


def gpt_job(case: Case) -> Job:
    return Job(case.model, next_token_loss, case.data(0, 0), case.batch)


def replicas(block: str, rank: int, world: int) -> Trial:
    job = gpt_job(SMALL)
    engines = job.engines(block, lambda: raw_ddp(SMALL, views=True), job.plan(Mesh(dp=world)), ("gradients",))
    return Trial(list(engines), lambda number: SMALL.data(rank, number))


def shards(block: str, rank: int, world: int) -> Trial:
    job = gpt_job(SMALL)
    plan = job.plan(Mesh(shard=world), units=units_of(SMALL))
    engines = job.engines(block, lambda: raw_fsdp2(SMALL, world), plan, ("gathers", "scatters"))
    return Trial(list(engines), lambda number: SMALL.data(rank, number))


def units_of(case: Case) -> tuple[str, ...]:
    return tuple(f"blocks.{i}" for i in range(case.layers))
