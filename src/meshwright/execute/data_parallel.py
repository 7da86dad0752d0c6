"""The interface of data parallelism, implemented by gradient buckets (ZeRO-0, 1 and 2) and fully sharded units (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshwright.core.errors import RequestError
from meshwright.execute.shard_layout import ShardLayout
from meshwright.schedule.buckets import Bucket

# Optimizers whose update of one element depends on that element alone; only these may step flat shards, which split tensors.
ELEMENTWISE_OPTIMIZERS = {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}


class Reduction(NamedTuple):
    """How gradients of ranks are combined: each rank's is multiplied by `factor`, where there is one, and then they are reduced by `op`."""

    op: str = "mean"
    factor: float | None = None


MEAN, SUM = Reduction(), Reduction("sum")
LookAtGradients = Callable[[Sequence[nn.Parameter], Sequence[Tensor], Tensor], None]  # parameters, their gradients, and both in one flat buffer


@dataclass(frozen=True)
class OptimizerShard:
    """A part of a rank's shard of a flat buffer that the optimizer steps as one parameter."""

    param: nn.Parameter
    start: int  # offset in the shard
    param_group: int  # index of the optimizer's param group
    slots: range  # of the parameters that it is a part of


class ShardedBuffer(Protocol):
    """Parameters in one flat buffer, and the shards of it that the optimizer steps; none if optimizer state is not sharded."""

    layout: Bucket
    params: tuple[nn.Parameter, ...]
    slices: ShardLayout
    missing_slots: set[int]  # slots that this rank's last backward has not reached
    unreached_slots: set[int]  # slots without a gradient, since no rank's backward has reached them

    @property
    def optimizer_shards(self) -> tuple[OptimizerShard, ...]: ...


class DataParallel(Protocol):
    """Synchronizes gradients by hooks on a model and its optimizer; works under `backward()` of any loop."""

    def watch_own_gradients(self, look: LookAtGradients) -> None:
        """Have each buffer of this rank's own gradients looked at just before it is reduced."""

    @property
    def buckets(self) -> Sequence[ShardedBuffer]:
        """Buffers of trainable parameters."""

    def set_reduction(self, reduction: Callable[[], Reduction]) -> None:
        """Ask `reduction` in every backward how gradients of ranks are combined; without it, by their mean."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Context in which backward accumulates gradients and sends nothing, if there is a buffer to accumulate full gradients in."""

    def before_backward(self, loss: Tensor) -> None:
        """Announce the backward of a loss that need not be one of the model's outputs: a sum in place of the mean that the model returned."""

    def finish(self) -> None:
        """Make gradients final. Calling it again does nothing."""

    def reduce_all(self) -> None:
        """Reduce all accumulated gradients, however they were accumulated: a pipeline's backward may bypass autograd's hooks."""

    def clear(self) -> None:
        """Drop gradients after a step."""

    def tied_gradient(self, param: nn.Parameter) -> Tensor:
        """This rank's part of the gradient of a parameter that pipeline stages share."""

    def sharded_parameters(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Parameters of which this rank stores some elements only: (parameter, the first of these, their values), flat."""

    def residuals(self, *, create: bool) -> Iterator[tuple[str, Tensor]]:
        """Tensors that gradient compression keeps between steps, by name. With `create`, before the first step they are made."""

    def parameter_bytes(self, model: nn.Module) -> int: ...

    def gradient_bytes(self) -> int: ...


def full_gradient(param: nn.Parameter) -> Tensor:
    """A parameter's gradient; zeros if no backward has reached it."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def check_shardable(optimizer: torch.optim.Optimizer, zero: int) -> None:
    if optimizer.state:
        raise RequestError(f"zero={zero} shards the optimizer's state: apply the plan before the optimizer's first step")
    if type(optimizer).__name__ not in ELEMENTWISE_OPTIMIZERS:
        raise RequestError(f"zero={zero} steps flat shards, and {type(optimizer).__name__} is not known to be element-wise: use zero=0")
