"""What a pipeline's messages cost ranks in processor time, measured with the executor that runs them.

A bare message between two ranks costs less: here stages are entered and left, autograd goes back through each micro-batch by itself, and the next
message is waited for. All of that is so for any model, and grows with nothing but the number of messages.
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
from meshwright.describe.flow import trace_flow
from meshwright.describe.trace import trace_task
from meshwright.execute.session import Session
from meshwright.plan.pipeline import cut_stages

_WIDTH = 32
_MORE = 8  # micro-batches than ranks, which is the fewest: what these add is theirs, and not the step's
_WARM, _STEPS = 2, 9


def handing_seconds(comm: Comm, backend: str) -> float:
    """Of all ranks together, for one message of a pipeline over them. Every rank calls it at the same time."""
    task = chain(comm.size)
    few, many = (_step_seconds(plan, task, comm) for plan in pipelines(task, comm.size, backend))
    total = torch.tensor([many - few], dtype=torch.float64)
    comm.all_reduce(total, "probe").wait()
    return max(float(total) / (2 * (comm.size - 1) * _MORE), 0.0)


def chain(layers: int) -> Task:
    """A model that computes next to nothing."""
    return Task("chain", partial(_build, layers), _loss, {"x": Field((_WIDTH,))})


def pipelines(task: Task, ranks: int, backend: str) -> list[Plan]:
    """A layer on each rank, with as few micro-batches as fill it, and with more."""
    stages = cut_stages(trace_flow(task), trace_task(task), ranks)
    return [Plan(task.name, micro, Mesh(pp=ranks), micro, stages, "1f1b", backend=backend) for micro in (ranks, ranks + _MORE)]


def _step_seconds(plan: Plan, task: Task, comm: Comm) -> float:
    model = task.build()
    session = Session(plan, model, torch.optim.SGD(model.parameters(), lr=0.0))
    batch, found = {"x": torch.zeros(plan.global_batch, _WIDTH)}, []
    for _ in range(_WARM + _STEPS):
        comm.barrier()
        begun = time.process_time()
        session.step(batch, task.loss)
        found.append(time.process_time() - begun)
    return statistics.median(found[_WARM:])


def _build(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found
