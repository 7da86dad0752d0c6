"""Whether a device can hold what verification adds to it, before the copies are made: the part of one device, and this rank's part of the plan.

What is added is gone before step 1, so a run's peak is the larger of the two, and a plan never fails for its verification: fewer blocks are verified,
or none.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.cost.step_cost import HEADROOM
from meshwright.describe.discover import available_memory
from meshwright.execute.verify_truncation import Truncation

_STATES = 3  # gradients, and two optimizer states, as Adam has them


class TooLargeError(Exception):
    """Verification with these blocks needs more memory than there is. Raised on all ranks or on none."""


def place_reference(plan: Plan, model: nn.Module, truncation: Truncation) -> torch.device:
    """The device for one device's part: the rank's own or, where a GPU is too small, the host. Raises TooLargeError on all ranks if the copies do
    not fit on one. Collective."""
    device = next(iter([*model.parameters(), *model.buffers()])).device
    copied = sum(t.nbytes for name, t in (*model.named_parameters(), *model.named_buffers()) if truncation.keeps(name))
    states = _STATES * sum(p.nbytes for name, p in model.named_parameters() if p.requires_grad and truncation.keeps(name))
    host, free = free_host_bytes(plan.world), free_bytes(device, plan.world)
    sharded = copied + states // (plan.mesh.shard * plan.mesh.degree("tp") * plan.mesh.pp)
    whole = copied + states if dist.get_rank() == 0 else 0  # rank 0 runs one device's part, before the plan's
    reason = ""
    if sharded > free:
        reason = f"a copy of the model and its optimizer needs {show_bytes(sharded)}, and {show_bytes(free)} are free"
    elif whole > max(free, host):
        reason = f"one device's step needs {show_bytes(whole)}, and {show_bytes(free)} are free"
    reasons: list[Any] = [None] * plan.world
    dist.all_gather_object(reasons, reason)
    if reason := next(filter(None, reasons), ""):
        raise TooLargeError(reason + (f", with {len(truncation.left_out)} blocks left out" if truncation.left_out else ""))
    return device if whole <= free else torch.device("cpu")


def free_bytes(device: torch.device, world: int) -> int:
    """Bytes that this process may allocate on its device, with some room for activations."""
    if device.type != "cuda":
        return free_host_bytes(world)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(HEADROOM * free)


def free_host_bytes(world: int) -> int:
    """Bytes of this machine's memory that one of its ranks may allocate."""
    return int(HEADROOM * available_memory() / min(world, os.cpu_count() or 1))


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
