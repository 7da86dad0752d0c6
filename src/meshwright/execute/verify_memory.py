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
from meshwright.describe.discover import available_memory, bytes_below_limit
from meshwright.execute.verify_truncation import Truncation

_STATES = 3  # gradients, and two optimizer states, as Adam has them
_RESULTS = 3  # that rank 0 keeps on the host: gradients of both sides, and the plan's parameters


class TooLargeError(Exception):
    """Verification with these blocks needs more memory than there is. Raised on all ranks or on none."""


def place_reference(plan: Plan, model: nn.Module, truncation: Truncation, device: torch.device, copies: int = 1) -> torch.device:
    """The device for one device's part: the rank's own or, where a GPU is too small, the host. Raises TooLargeError on all ranks if `copies` of the
    model do not fit on one. Collective."""
    copied = copies * sum(t.nbytes for name, t in (*model.named_parameters(), *model.named_buffers()) if truncation.keeps(name))
    states = _STATES * sum(p.nbytes for name, p in model.named_parameters() if p.requires_grad and truncation.keeps(name))
    host, free = free_host_bytes(plan.world), free_bytes(device, plan.world)
    sharded = copied + states // (plan.mesh.shard * plan.mesh.degree("tp") * plan.mesh.pp)
    is_first = dist.get_rank() == 0
    results = _RESULTS * sum(p.nbytes for name, p in model.named_parameters() if truncation.keeps(name)) if is_first else 0
    whole = copied + states if is_first else 0  # rank 0 runs one device's part, before the plan's and, for the optimizer, after it
    host = max(host - results, 0)
    free = max(free - results, 0) if device.type == "cpu" else free
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
    available, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    allowed = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device) * total - allocated
    return int(HEADROOM * min(available + torch.cuda.memory_reserved(device) - allocated, allowed))


def free_host_bytes(world: int) -> int:
    """Bytes of this machine's memory that one of its ranks may allocate."""
    return int(HEADROOM * min(available_memory() / min(world, os.cpu_count() or 1), bytes_below_limit()))


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
