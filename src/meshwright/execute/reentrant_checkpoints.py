"""Refuses the reentrant checkpoints of torch.utils.checkpoint where a plan cuts the model.

Such a checkpoint runs its part without gradients, and in backward runs it again with a backward of its own inside. What a plan does around a
module - gather its parameters, sum its gradients, hand activations over - then happens twice or in the wrong order. The other kind, which torch
recommends, gives the same numbers and is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.utils import checkpoint

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan


def _refuse(*_: Any) -> NoReturn:
    raise RequestError(
        "torch.utils.checkpoint with use_reentrant=True cannot be followed under this plan: use use_reentrant=False, or --set recompute=full"
    )


@contextmanager
def no_reentrant_checkpoints(plan: Plan) -> Iterator[None]:
    """Within it a reentrant checkpoint is an error, unless each rank has the whole model."""
    is_whole = plan.memory.zero < 3 and plan.world == plan.mesh.data_parallel_size and plan.mesh.ep == 1
    if is_whole or "apply" in vars(checkpoint.CheckpointFunction):  # the latter: refused already
        yield
        return
    setattr(checkpoint.CheckpointFunction, "apply", _refuse)  # noqa: B010  # hides the inherited method
    try:
        yield
    finally:
        delattr(checkpoint.CheckpointFunction, "apply")
