"""Memory Manager, acting half: ZeRO-3 by FSDP2, the keys of randomness, and what a rank holds, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.task import Keyed
from meshwright.core.workload import LOW
from meshwright.execute.groups import Groups, process_group

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _NamedGather(AllGather):
    """FSDP2's all-gather through our `Comm`, so that it is named and counted. Unless it may travel `beside` what is computed, it waits
    on CUDA for all of that; elsewhere FSDP2 fetches nothing ahead by itself."""

    def __init__(self, comm: Comm, name: str, beside: bool) -> None:
        self.comm, self.name, self.beside = comm, name, beside

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        if output_tensor.is_cuda and not self.beside:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        return _handed_back(self.comm.all_gather(output_tensor, input_tensor, self.name), async_op)


class _NamedScatter(ReduceScatter):
    """FSDP2's reduce-scatter through our `Comm`. On CUDA it runs on a stream of its own. Elsewhere FSDP2 would wait for it: if it may
    travel `beside` what follows, it is waited for when backward ends, unless its result is wanted before."""

    def __init__(self, comm: Comm, name: str, beside: Callable[[], bool]) -> None:
        self.comm, self.name, self.beside = comm, name, beside

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        mean = op == dist.ReduceOp.AVG
        work = self.comm.reduce_scatter(output_tensor, input_tensor, self.name, "mean" if mean else "sum")
        if mean and not async_op and not output_tensor.is_cuda and self.beside():  # after a sum FSDP2 divides the result at once
            torch.autograd.Variable._execution_engine.queue_callback(partial(_awaited, work, input_tensor))
            return None
        if output_tensor.is_cuda and not self.beside():
            work.wait()
            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
        return _handed_back(work, async_op)


def _awaited(work: Any, _: torch.Tensor) -> None:
    """The tensor is kept until the call that reads it is over."""
    work.wait()


def _handed_back(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return None


def shard_model(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, groups: Groups) -> None:
    """ZeRO-3, in place: each unit's parameters are gathered before use and released after it; so are the root's."""
    if optimizer.state:
        raise RequestError("zero=3 cuts the optimizer's state: apply the plan before the optimizer's first step")
    names = {id(p): name for name, p in model.named_parameters()}
    precision = plan.memory.precision
    kind = DTYPES[LOW[precision]] if precision in LOW else None
    low = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32) if kind is not None else MixedPrecisionPolicy()
    mesh = DeviceMesh.from_group(process_group(groups.shard), plan.device)
    places = [(m, key, p) for m in model.modules() for key, p in m._parameters.items() if p is not None]
    before: Any = None
    owned = _owned_units(model, plan) if groups.ep.size > 1 else []
    units = _stage_units(model, plan, groups) if groups.pp.size > 1 else [*plan.memory.units, ""]
    for name in dict.fromkeys([*owned, *units]):
        unit: Any = fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=True, mp_policy=low)
        if unit._get_fsdp_state()._fsdp_param_group is None:
            continue  # the root when the units hold every parameter
        ahead = "gathers" in plan.sync.overlap
        unit.set_custom_all_gather(_NamedGather(groups.shard, f"params/{name or 'root'}", ahead))
        unit.set_custom_reduce_scatter(_NamedScatter(groups.shard, f"grads/{name or 'root'}", _may_be_late(unit, plan, groups)))
        if ahead and groups.pp.size == 1 and plan.device == "cpu":
            unit._set_unshard_async_op(True)
            if before is not None and name and name not in owned:
                before.set_modules_to_forward_prefetch([unit])
            before = before if name in owned else unit
        if name in owned:
            unit.set_all_reduce_hook(_owned_reduction(groups, f"replicas/{name}"))
        elif groups.replica.size > 1:
            unit.set_all_reduce_hook(_replica_reduction(groups, f"replicas/{name or 'root'}"))
    _retie(places)
    _repoint(optimizer, names, dict(model.named_parameters()))


def _may_be_late(unit: Any, plan: Plan, groups: Groups) -> Callable[[], bool]:
    """Whether nothing reads a unit's reduced gradients before backward ends: nothing is added to them, and no replicas average them."""
    if "scatters" not in plan.sync.overlap or (plan.device == "cpu" and (groups.replica.size > 1 or groups.pp.size > 1)):
        return lambda: False
    if plan.device == "cuda":
        return lambda: True
    group = unit._get_fsdp_state()._fsdp_param_group
    return lambda: all(p.sharded_param.grad is None for p in group.fsdp_params)


def _owned_units(model: nn.Module, plan: Plan) -> list[str]:
    """Mixtures of which this rank holds experts: units of their own, since the ranks that hold the same are others than for the rest."""
    found = {m.module: [n for n, _ in model.get_submodule(m.module).named_parameters()] for m in plan.owners.mixtures}
    for module, names in found.items():
        for name in (n for n in names if f"{module}.{n}" not in plan.owners.parameters):
            raise RequestError(f"zero=3 with ep: {module} has experts and, in {name}, a parameter that every rank holds: use zero=1 or zero=2")
    return [module for module, names in found.items() if names]


def _stage_units(model: nn.Module, plan: Plan, groups: Groups) -> list[str]:
    """A pipeline's stage leaves the model's forward half way, so there the model itself is no unit, and every layer of the stage is one."""
    modules = dict(model.named_modules())
    mine = {n for i, stage in enumerate(plan.stages) if plan.stage_rank(i) == groups.pp.rank for n in stage.layers if n in modules}
    return sorted(mine, key=lambda n: (-n.count("."), n))  # inner ones first


def _retie(places: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """A tied parameter that one unit has replaced is replaced wherever else it is registered."""
    now = {id(old): module._parameters[key] for module, key, old in places if module._parameters.get(key) is not old}
    for module, key, old in places:
        if module._parameters.get(key) is old and id(old) in now:
            module._parameters[key] = now[id(old)]


def _replica_reduction(groups: Groups, name: str) -> Callable[[torch.Tensor], None]:
    def reduce(output: torch.Tensor) -> None:
        groups.replica.all_reduce(output, name, "mean").wait()

    return reduce


def _owned_reduction(groups: Groups, name: str) -> Callable[[torch.Tensor], None]:
    """What is owned has had its gradient from all ranks along ep already: its owner's copies average theirs, and ep of them make one mean."""

    def reduce(output: torch.Tensor) -> None:
        groups.owned.all_reduce(output, name, "mean").wait()
        output.mul_(1.0 / groups.ep.size)

    return reduce


def _repoint(optimizer: torch.optim.Optimizer, names: dict[int, str], now: dict[str, nn.Parameter]) -> None:
    """`fully_shard` replaces parameter objects; the optimizer must step the new ones."""
    for group in optimizer.param_groups:
        group["params"] = [now[names[id(p)]] if id(p) in names else p for p in group["params"]]


class KeyRing:
    """The key of the micro-batch at hand, for modules whose randomness is keyed."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, Keyed)]
        self.now: tuple[int, int, int] = (0, 0, 0)

    def set(self, seed: int, step: int, first_sample: int) -> None:
        self.now = (seed, step, first_sample)
        for module in self._modules:
            module.set_key(*self.now)

    @contextmanager
    def at(self, key: tuple[int, int, int]) -> Iterator[None]:
        """For a while, the key of another micro-batch."""
        before = self.now
        if before != key:
            self.set(*key)
        try:
            yield
        finally:
            if before != key:
                self.set(*before)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The piece of a possibly sharded tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: views into one buffer count once."""
    seen = {}
    for tensor in tensors:
        storage = local_tensor(tensor).untyped_storage()
        seen[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
    return sum(seen.values())


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)
