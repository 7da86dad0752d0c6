"""What data parallelism offers the rest of a run: one interface of gradient buckets (ZeRO-0, 1 and 2) and of fully sharded units (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from meshwright.core.errors import RequestError
from meshwright.execute.shard_layout import ShardLayout
from meshwright.schedule.buckets import Bucket

# Optimizers whose update of one element depends on that element alone; only these may step a shard that is cut across tensors.
ELEMENTWISE_OPTIMIZERS = {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}


@dataclass(frozen=True)
class OptimizerShard:
    """What the optimizer steps of a rank's shard of a flat buffer."""

    param: nn.Parameter
    start: int  # in the shard
    param_group: int  # of the optimizer
    slots: range  # the parameters that it is a part of


class ShardedBuffer(Protocol):
    """Parameters that lie in one flat buffer, and what the optimizer steps of it; nothing where its state is not sharded."""

    @property
    def layout(self) -> Bucket: ...

    @property
    def params(self) -> tuple[nn.Parameter, ...]: ...

    @property
    def slices(self) -> ShardLayout: ...

    @property
    def optimizer_shards(self) -> tuple[OptimizerShard, ...]: ...


class DataParallel(Protocol):
    """Attached to a model and its optimizer by hooks; works under `backward()` of any loop."""

    reduce_op: str  # "mean": a user's own loop averages over ranks; Session weights the loss itself and sets "sum"

    @property
    def buckets(self) -> Sequence[ShardedBuffer]:
        """Those whose parameters are trained."""
        ...

    def accumulate(self) -> AbstractContextManager[None]:
        """Inside, backward adds gradients up and sends nothing, where there is a place to add them up in."""
        ...

    def finish(self) -> None:
        """Make gradients final. Calling it again does nothing."""
        ...

    def reduce_all(self) -> None:
        """Reduce everything that was added up, whichever way it got there: a pipeline's backward may go round autograd's hooks."""
        ...

    def clear(self) -> None:
        """Drop gradients after a step."""
        ...

    def tied_gradient(self, param: nn.Parameter) -> torch.Tensor:
        """What this rank has of the gradient of a parameter that pipeline stages share."""
        ...

    def full_parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's values in the storage dtype, on the CPU, in the model's order. Collective."""
        ...

    def parameter_bytes(self, model: nn.Module) -> int: ...

    def gradient_bytes(self) -> int: ...


def full_gradient(param: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient; zeros where no backward has reached it."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def check_shardable(optimizer: torch.optim.Optimizer, zero: int) -> None:
    if optimizer.state:
        raise RequestError(f"zero={zero} cuts the optimizer's state: apply the plan before the optimizer's first step")
    if type(optimizer).__name__ not in ELEMENTWISE_OPTIMIZERS:
        raise RequestError(f"zero={zero} steps slices cut across tensors, and {type(optimizer).__name__} is not known to be element-wise: use zero=0")
