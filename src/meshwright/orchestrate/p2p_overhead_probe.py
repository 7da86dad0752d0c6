"""Measures the CPU time that one pipeline message costs, with the executor that runs pipelines.

A bare send between two ranks costs less: here each message also includes entering and leaving a stage, a separate backward for each micro-batch, and
the wait for the next message. This overhead is the same for any model and grows only with the number of messages.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.core.comm import Comm
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.task import Batch, Field, Task
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.execute.session import Session
from meshwright.plan.pipeline_planner import cut_stages

_WIDTH = 32
_EXTRA_MICRO_BATCHES = 8  # beyond one per rank, the fewest; the added time is the cost of their messages, without the step's fixed cost
_WARMUP_STEPS, _TIMED_STEPS = 2, 9


def measure_p2p_overhead(comm: Comm, backend: str) -> float:
    """CPU seconds that one pipeline message costs, summed over all ranks. Collective."""
    task = make_chain_task(comm.size)
    base, longer = (_step_cpu_seconds(plan, task, comm) for plan in make_pipeline_plans(task, comm.size, backend))
    total = torch.tensor([longer - base], dtype=torch.float64)
    comm.all_reduce(total, "probe").wait()
    return max(float(total) / (2 * (comm.size - 1) * _EXTRA_MICRO_BATCHES), 0.0)


def make_chain_task(layers: int) -> Task:
    """A chain of small linear layers whose compute time is negligible."""
    return Task("chain", partial(_build_chain, layers), _loss, {"x": Field((_WIDTH,))})


def make_pipeline_plans(task: Task, ranks: int, backend: str) -> list[Plan]:
    """Two 1F1B plans with one layer on each rank: as many micro-batches as ranks, and `_EXTRA_MICRO_BATCHES` more."""
    stages = cut_stages(trace_dataflow(task), trace_task(task), ranks)
    return [Plan(task.name, micro, Mesh(pp=ranks), micro, stages, "1f1b", backend=backend) for micro in (ranks, ranks + _EXTRA_MICRO_BATCHES)]


def _step_cpu_seconds(plan: Plan, task: Task, comm: Comm) -> float:
    model = task.build()
    session = Session(plan, model, torch.optim.SGD(model.parameters(), lr=0.0))
    batch, seconds = {"x": torch.zeros(plan.global_batch, _WIDTH)}, []
    for _ in range(_WARMUP_STEPS + _TIMED_STEPS):
        comm.barrier()
        start = time.process_time()
        session.step(batch, task.loss)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[_WARMUP_STEPS:])


def _build_chain(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch["x"]).square().mean()
    return loss
