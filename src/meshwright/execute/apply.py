"""Apply a plan to a model and its optimizer, in place, from outside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.core.errors import RequestError
from meshwright.core.mesh import check_runnable
from meshwright.core.plan import Plan
from meshwright.core.task import Batch
from meshwright.core.ties import check_ties
from meshwright.core.workload import LOW
from meshwright.describe.attention import compose_attention
from meshwright.describe.layers import tied_names
from meshwright.execute.context import ContextRun
from meshwright.execute.data_parallel import DataParallel, full_gradient
from meshwright.execute.fp8 import Fp8Layers, has_fp8, use_fp8
from meshwright.execute.groups import Groups, make_groups
from meshwright.execute.memory import DTYPES, KeyRing, storage_bytes
from meshwright.execute.offload import HostStates
from meshwright.execute.owners import OwnedParts, own_parts
from meshwright.execute.pipeline import PipelineCuts
from meshwright.execute.recompute import Recall, recompute_units
from meshwright.execute.spatial import cut_positions
from meshwright.execute.sync import GradientBuckets
from meshwright.execute.tensor import TensorCuts, cut_model, share_randomness
from meshwright.execute.units import UnitShards, is_sharded
from meshwright.schedule.buckets import Kind, replication_of, start_runs


@dataclass
class Applied:
    """A model and optimizer that now follow a plan. Both are the objects that were handed in."""

    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    groups: Groups
    buckets: DataParallel | None  # None where one rank has all of the data
    keys: KeyRing
    tensor: TensorCuts | None = None
    pipeline: PipelineCuts | None = None
    context: ContextRun | None = None
    owners: OwnedParts | None = None
    fp8: Fp8Layers = Fp8Layers()
    offloaded: HostStates | None = None

    def local(self, batch: Batch) -> Batch:
        """For a loop of your own under context parallelism: this rank's positions of a batch. Any other plan leaves it as it is."""
        if self.context is None:
            return batch
        if self.context.loss_takes_positions:
            raise RequestError("the loss that this plan was made for slices positions itself: put inputs and shifted labels into the batch")
        return self.context.local(batch)

    def accumulate(self) -> AbstractContextManager[None]:
        """Around every backward but the last of a step: gradients add up and nothing is sent where the plan allows it."""
        return self.buckets.accumulate() if self.buckets else nullcontext()

    def gradients(self) -> list[torch.Tensor]:
        """The pieces of the gradient that this rank steps."""
        return [p.grad for p in self.stepped() if p.grad is not None]

    def stepped(self) -> Iterator[nn.Parameter]:
        """What this rank steps, on its device."""
        if self.offloaded is not None:
            return iter(self.offloaded.stepped)
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """What the optimizer keeps for a stepped parameter, wherever that is."""
        found: dict[str, Any] = self.optimizer.state.get(self.offloaded.of(param) if self.offloaded is not None else param, {})
        return found

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares over the whole gradient, the same on every rank. What several ranks hold alike each counts for its part."""
        kinds = self._kinds()
        held: dict[int, list[torch.Tensor]] = {}
        for param in self.stepped():
            of = kinds.get(id(param), Kind())
            if of.counted and param.grad is not None:
                held.setdefault(of.copies, []).append(param.grad)
        kind = torch.float64 if self.plan.memory.precision == "fp64" else torch.float32
        total = torch.zeros((), dtype=kind, device=self.plan.device)
        for copies, grads in held.items():
            squares = torch.stack([n.to(kind) for n in torch._foreach_norm(grads)]).square().sum()
            total = total + (squares / copies if copies > 1 else squares)
        if self.tensor is not None:
            self.groups.tp.at_once.all_reduce(total, "norm/tp").wait()
        if self.owners is not None:
            self.groups.ep.at_once.all_reduce(total, "norm/ep").wait()
        if self.pipeline is not None:
            self.groups.pp.at_once.all_reduce(total, "norm/pp").wait()
        if self.plan.memory.zero:
            self.groups.shard.at_once.all_reduce(total, "norm").wait()
        return total

    def _kinds(self) -> dict[int, Kind]:
        """The kind of each stepped parameter."""
        if self.buckets is not None and self.plan.memory.zero:
            return {id(shard.param): b.layout.kind for b in self.buckets.buckets for shard in b.optimizer_shards}
        return _kinds_of(self.model, self.plan, self.pipeline)

    def meet_shared(self) -> None:
        """Gradients of parameters that several pipeline stages use are summed over those stages."""
        named = dict(self.model.named_parameters()) if self.pipeline is not None and self.pipeline.meetings else {}
        for name, comm in self.pipeline.meetings if self.pipeline is not None else ():
            param = named.get(name)
            if comm is not None and param is not None:
                gradient = self.buckets.tied_gradient(param) if self.buckets else full_gradient(param)
                comm.at_once.all_reduce(gradient, f"tied/{name}").wait()

    def clip_gradients(self, most: float) -> torch.Tensor:
        """Scale the gradient down to a norm of at most `most`; its norm before that. Right under every plan, which
        `torch.nn.utils.clip_grad_norm_` is not: under ZeRO-1 and 2 a rank holds its slice of the gradient alone."""
        if self.buckets:
            self.buckets.finish()
        norm = self.squared_norm().sqrt()
        pieces = self.gradients()
        if pieces:
            torch._foreach_mul_(pieces, torch.clamp(most / (norm + 1e-6), max=1.0))
        return norm

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.buckets:
            self.buckets.clear()

    def held_bytes(self) -> dict[str, int]:
        """What this rank's device keeps between operations: parameters, gradients and optimizer state apart."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        states = [v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim() > 0]
        return {
            "parameters": self.buckets.parameter_bytes(self.model) if self.buckets else storage_bytes(list(self.model.parameters())),
            "gradients": self.buckets.gradient_bytes() if self.buckets else storage_bytes(grads),
            "optimizer": storage_bytes(states) if self.offloaded is None else 0,
        }


def _kinds_of(model: nn.Module, plan: Plan, pipeline: PipelineCuts | None) -> dict[int, Kind]:
    kind = replication_of(plan)
    return {id(p): kind(name, pipeline is None or pipeline.counted(name)) for name, p in model.named_parameters()}


def apply(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> Applied:
    """Make `model` and `optimizer` follow `plan`. Collective: every rank calls it with the same plan."""
    plan = plan.seen_by(dist.get_rank()) if plan.places else plan
    _check(plan, model)
    groups = make_groups(plan.mesh, plan.sync, plan.places)
    if plan.world > 1:
        equalise(model, groups)
    keys = KeyRing(model)
    if groups.pp.size > 1 or groups.tp.size > 1:
        compose_attention(model)  # as the dataflow was read from which the plan was made
    pipeline = PipelineCuts(plan, model, optimizer, groups) if groups.pp.size > 1 else None
    recall = Recall()
    owners = own_parts(model, optimizer, plan.owners, groups.ep, recall, plan.compile != "none") if groups.ep.size > 1 else None
    units = [name for name in plan.memory.units if name not in {t.module for t in plan.owners.tables} or owners is None]
    fp8 = use_fp8(model, plan.memory.units) if plan.memory.precision == "fp8" else Fp8Layers()
    tensor = cut_model(model, optimizer, plan, groups, recall) if groups.tp.size > 1 else None
    context = ContextRun(model, plan.context, groups.cp, recall) if groups.cp.size > 1 and plan.context.attends else None
    if plan.spatial.grid:
        share_randomness(groups.cp, plan.device)
        cut_positions(model, plan.spatial, groups.cp, plan.compile != "none")
    modes = {name: mode for name, mode in plan.memory.modes.items() if name in units}
    recompute_units(model, modes, keys, recall, apart=tensor is not None and plan.compile != "none")
    if plan.compile == "blocks":
        for name in units:
            model.get_submodule(name).compile()
    buckets: DataParallel | None = None
    kinds = _kinds_of(model, plan, pipeline)
    if groups.data.size > 1 and plan.memory.zero == 3:
        shared = [name for name, _ in pipeline.shared()] if pipeline is not None else []
        buckets = UnitShards(model, optimizer, plan, groups, kinds, shared)
    elif groups.data.size > 1:
        buckets = GradientBuckets(model, optimizer, plan, groups, kinds)
    offloaded = HostStates(optimizer) if plan.memory.offload == "optimizer" else None
    if pipeline is not None:
        pipeline.attach()
    return Applied(plan, model, optimizer, groups, buckets, keys, tensor, pipeline, context, owners, fp8, offloaded)


def _check(plan: Plan, model: nn.Module) -> None:
    check_runnable(plan.mesh)
    if plan.mesh.degree("tp") > 1 and not plan.tensor.strands:
        raise RequestError(f"plan: mesh {plan.mesh} has a tp axis, but tensor.strands is empty: let `meshwright plan` or plan_for fill it in")
    if plan.mesh.ep > 1 and not plan.owners:
        raise RequestError(f"plan: mesh {plan.mesh} has an ep axis, but owners is empty: let `meshwright plan` or plan_for fill it in")
    if plan.mesh.pp > 1 and not any(stage.entry for stage in plan.stages):
        raise RequestError(f"plan: mesh {plan.mesh} has a pp axis, but stages are not cut: let `meshwright plan` or plan_for fill them in")
    if plan.mesh.cp > 1 and not plan.context.attends and not plan.spatial.grid:
        raise RequestError(f"plan: mesh {plan.mesh} has a cp axis, but context and spatial are empty: let `meshwright plan` or plan_for fill one in")
    if plan.memory.precision == "fp8" and not has_fp8(plan.device):
        raise RequestError("plan: precision=fp8 needs a GPU of compute capability 8.9 or newer, and this one is older: use bf16")
    modules = dict(model.named_modules())
    for name in plan.memory.units:
        if name not in modules:
            raise RequestError(f"plan: memory.units names '{name}', which the model does not have: use a name such as {list(modules)[1:4]}")
    check_ties(plan, tied_names(model))
    if is_sharded(model):
        raise RequestError("this model follows a plan already: apply one plan to a fresh model")


def equalise(model: nn.Module, groups: Groups) -> None:
    """Start every rank from rank 0's values, whatever seed a user's script built them with."""
    every = [t.data for t in [*model.parameters(), *model.buffers()]]
    for run in start_runs([t.numel() * t.element_size() for t in every], [t.dtype for t in every]):
        tensors = [every[i] for i in run]
        flat = torch.cat([t.reshape(-1) for t in tensors])
        groups.world.broadcast(flat, "start/values").wait()
        offset = 0
        for tensor in tensors:
            tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()


def average_buffers(applied: Applied) -> None:
    """Running statistics (BatchNorm's) differ between ranks; before they are used or kept, take their mean."""
    if applied.groups.data.size > 1:
        for buffer in applied.model.buffers():
            if buffer.is_floating_point() and buffer.numel():
                applied.groups.data.all_reduce(buffer, "buffers", "mean").wait()


def autocast(plan: Plan) -> Callable[[], AbstractContextManager[None]]:
    """A factory of the context that forward runs in: lower-precision arithmetic where the plan says so."""
    if plan.memory.precision in LOW:
        dtype = DTYPES[LOW[plan.memory.precision]]
        return lambda: torch.autocast(plan.device, dtype=dtype)
    return nullcontext
