"""Apply a plan to a model and its optimizer, in place, from outside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.errors import RequestError
from meshwright.core.mesh import check_runnable
from meshwright.core.plan import Plan
from meshwright.core.task import Batch
from meshwright.core.tied_parameters import check_tied_parameters
from meshwright.describe.attention_decompose import decompose_attention
from meshwright.describe.layers import tied_parameter_names
from meshwright.execute.context_parallel import ContextParallelRuntime
from meshwright.execute.data_parallel import DataParallel, full_gradient
from meshwright.execute.expert_parallel import ExpertParallelShards, shard_experts
from meshwright.execute.flat_buffer import norm_parts
from meshwright.execute.fp8 import Fp8Layers, convert_to_fp8, has_fp8
from meshwright.execute.gradient_sync import GradientBuckets
from meshwright.execute.memory_runtime import RandomKeys, low_precision_dtype, storage_bytes
from meshwright.execute.offload import OptimizerOffload
from meshwright.execute.pipeline_parallel import PipelineRuntime
from meshwright.execute.placeholders import Placeholders
from meshwright.execute.process_groups import ProcessGroups, make_process_groups
from meshwright.execute.recompute_runtime import RecomputeCache, recompute_units
from meshwright.execute.spatial_parallel import shard_spatial
from meshwright.execute.state_dict_guards import guard_state_dicts
from meshwright.execute.synced_batch_norm import sync_batch_norms
from meshwright.execute.tensor_parallel import TensorParallelShards, has_compiled_collectives, shard_model, sync_rng_state
from meshwright.execute.zero3_runtime import FullyShardedUnits, is_sharded
from meshwright.schedule.buckets import ParamReplication, init_broadcast_groups, replication_of


@dataclass(frozen=True)
class WholeTensors:
    """The model's parameters and buffers as they were before the plan was applied."""

    shapes: Mapping[str, tuple[int, ...]]  # by name, in the model's order
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]  # persistent ones
    aliases: Mapping[str, tuple[str, ...]]  # other names of tied tensors


@dataclass
class AppliedPlan:
    """A model and an optimizer to which `apply` has applied a plan in place, with the runtime objects that carry it out."""

    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    groups: ProcessGroups
    gradient_sync: DataParallel | None  # None without data parallelism
    random_keys: RandomKeys
    whole: WholeTensors
    tensor_parallel: TensorParallelShards | None = None
    pipeline: PipelineRuntime | None = None
    context: ContextParallelRuntime | None = None
    expert_parallel: ExpertParallelShards | None = None
    fp8: Fp8Layers = Fp8Layers()
    optimizer_offload: OptimizerOffload | None = None
    catalog: Any = None  # of the pieces of the state that ranks hold, as `state_pieces` has last found them

    def local(self, batch: Batch) -> Batch:
        """Return this rank's positions of `batch` under context parallelism, and `batch` itself under any other plan. For loops without `Session`."""
        if self.context is None:
            return batch
        if self.context.loss_slices_positions:
            raise RequestError("the loss that this plan was made for slices positions itself: put inputs and shifted labels into the batch")
        return self.context.shard_batch(batch)

    def accumulate(self) -> AbstractContextManager[None]:
        """Context for every backward of a step but the last: gradients accumulate and nothing is sent, where the plan allows it."""
        return self.gradient_sync.accumulate() if self.gradient_sync else nullcontext()

    def local_gradients(self) -> list[Tensor]:
        """Gradients of the parameters or shards that this rank's optimizer steps."""
        return [p.grad for p in self.optimizer_parameters() if p.grad is not None]

    def optimizer_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters or shards that this rank's optimizer steps, on its device."""
        if self.optimizer_offload is not None:
            return iter(self.optimizer_offload.device_parameters)
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def optimizer_state(self, param: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of a stepped parameter, on the device or on the host."""
        return self.optimizer.state.get(param if self.optimizer_offload is None else self.optimizer_offload.host_copy(param), {})

    def squared_norm(self) -> Tensor:
        """Return the sum of squares over the full gradient, the same on every rank. A gradient that n ranks replicate counts 1/n on each."""
        replication = self.replication()
        grads_by_copies: dict[int, list[Tensor]] = {}
        for param in self.optimizer_parameters():
            of = replication.get(id(param), ParamReplication())
            if of.in_grad_norm and param.grad is not None:
                grads_by_copies.setdefault(of.copies, []).append(param.grad)
        dtype = torch.float64 if self.plan.memory.precision == "fp64" else torch.float32
        total = torch.zeros((), dtype=dtype, device=self.plan.device)
        for copies, grads in grads_by_copies.items():
            parts = [part for grad in grads for part in norm_parts(grad)]
            squares = torch.stack([n.to(dtype) for n in torch._foreach_norm(parts)]).square().sum()
            total = total + (squares / copies if copies > 1 else squares)
        for axis in ("tp", "ep", "pp"):
            self.groups.get(axis).sync.all_reduce(total, f"norm/{axis}").wait()
        if self.plan.memory.zero:
            self.groups.shard.sync.all_reduce(total, "norm").wait()
        return total

    def replication(self) -> dict[int, ParamReplication]:
        """How each stepped parameter is replicated, by its id."""
        if self.gradient_sync is not None and self.plan.memory.zero:
            return {id(shard.param): b.layout.replication for b in self.gradient_sync.buckets for shard in b.optimizer_shards}
        return _param_replication(self.model, self.plan, self.pipeline)

    def all_reduce_tied_gradients(self, look: Callable[[str, Tensor], None] | None = None) -> None:
        """Sum the gradients of parameters that several pipeline stages use over those stages; `look` is shown each before."""
        if self.pipeline is None or not self.pipeline.tied_groups:
            return
        params = dict(self.model.named_parameters())
        for name, comm in self.pipeline.tied_groups:
            if comm is not None and (param := params.get(name)) is not None and param.requires_grad:
                gradient = self.gradient_sync.tied_gradient(param) if self.gradient_sync else full_gradient(param)
                if look is not None:
                    look(name, gradient)
                comm.sync.all_reduce(gradient, f"tied/{name}").wait()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradient down to a norm of at most `max_norm` and return its norm before that. Correct under every plan, pipelines too."""
        if self.gradient_sync:
            self.gradient_sync.finish()
        norm = self.squared_norm().sqrt()
        if grads := self.local_gradients():
            torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.gradient_sync:
            self.gradient_sync.clear()

    def discard_gradients(self) -> None:
        """Drop gradients that no step of this model left: another model's loss may run through this one."""
        if all(p.grad is None for p in self._all_parameters):
            return
        if self.gradient_sync:
            self.gradient_sync.finish()
        self.clear_gradients()
        for param in self._all_parameters:  # an offloaded optimizer clears the gradients of its host copies only
            param.grad = None

    @cached_property
    def _all_parameters(self) -> list[nn.Parameter]:
        """The model's parameters and the shards that the optimizer steps."""
        return list({id(p): p for p in (*self.model.parameters(), *self.optimizer_parameters())}.values())

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this rank's device holds between operations: parameters, gradients and optimizer state."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        states = [v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim() > 0]
        return {
            "parameters": self.gradient_sync.parameter_bytes(self.model) if self.gradient_sync else storage_bytes(list(self.model.parameters())),
            "gradients": self.gradient_sync.gradient_bytes() if self.gradient_sync else storage_bytes(grads),
            "optimizer": storage_bytes(states) if self.optimizer_offload is None else 0,
        }


class NoOptimizer(torch.optim.Optimizer):
    """Stands where a plan expects an optimizer, for a model that does not train: it holds the parameters, has no state, and refuses to step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([{"params": list(model.parameters())}], {})

    def step(self, closure: Any = None) -> Any:
        raise RequestError("this model was given no optimizer: it is for inference")


def _param_replication(model: nn.Module, plan: Plan, pipeline: PipelineRuntime | None) -> dict[int, ParamReplication]:
    replication = replication_of(plan)
    return {id(p): replication(name, pipeline is None or pipeline.in_grad_norm(name)) for name, p in model.named_parameters()}


def apply(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None, groups: ProcessGroups | None = None, *,
    broadcasts: bool = True, placeholders: Placeholders | None = None,
) -> AppliedPlan:  # fmt: skip
    """Make `model` and `optimizer` follow `plan`, in process groups of the plan's mesh. Collective: every rank calls it with the same plan.

    Without `broadcasts`, all ranks have built the same values, or `placeholders` that get theirs later. Without an optimizer, it is for inference.
    """
    optimizer = NoOptimizer(model) if optimizer is None else optimizer
    plan = plan.for_rank(dist.get_rank()) if plan.rank_devices else plan
    _check_plan(plan, model, has_values=placeholders is None)
    groups = groups or make_process_groups(plan.mesh, plan.sync, plan.rank_devices)
    if plan.world > 1 and broadcasts:
        broadcast_initial_state(model, groups)
    keys = RandomKeys(model)
    whole = _whole_tensors(model)
    if groups.pp.size > 1 or groups.tp.size > 1:
        decompose_attention(model)  # the plan was made from the dataflow of decomposed attention
    pipeline = PipelineRuntime(plan, model, optimizer, groups) if groups.pp.size > 1 else None
    cache = RecomputeCache()
    experts = shard_experts(model, optimizer, plan.expert, groups.ep, cache, plan.compile != "none") if groups.ep.size > 1 else None
    units = [name for name in plan.memory.units if name not in {t.module for t in plan.expert.tables} or experts is None]
    fp8 = convert_to_fp8(model, plan.memory.units) if plan.memory.precision == "fp8" else Fp8Layers()
    tensor = shard_model(model, optimizer, plan, groups, cache) if groups.tp.size > 1 else None
    context = ContextParallelRuntime(model, plan.context, groups.cp, cache) if groups.cp.size > 1 and plan.context.attention_sites else None
    if plan.spatial.grid:
        sync_rng_state(groups.cp, plan.device)
        shard_spatial(model, plan.spatial, groups.cp, plan.compile != "none")
    if plan.batch_norm == "sync" and plan.mesh.data_parallel_size > 1:
        sync_batch_norms(model, plan, groups.data, cache)
    modes = {name: mode for name, mode in plan.memory.recompute_modes.items() if name in units}
    recompute_units(model, modes, keys, cache, eager=tensor is not None and plan.compile != "none" and not has_compiled_collectives(plan))
    if plan.compile == "blocks":
        for name in units:
            model.get_submodule(name).compile()
    if placeholders is not None and plan.memory.zero == 0:
        placeholders.give_memory(model)
    gradient_sync: DataParallel | None = None
    replication = _param_replication(model, plan, pipeline)
    if groups.data.size > 1 and plan.memory.zero == 3:
        tied = [name for name, _ in pipeline.tied_parameters()] if pipeline is not None else []
        gradient_sync = FullyShardedUnits(model, optimizer, plan, groups, replication, tied)
    elif groups.data.size > 1:
        gradient_sync = GradientBuckets(model, optimizer, plan, groups, replication)
    if placeholders is not None:
        placeholders.give_memory(model)
    offload = OptimizerOffload(optimizer) if plan.memory.offload == "optimizer" else None
    if offload is not None:
        model.register_load_state_dict_post_hook(lambda *_: offload.refresh_copies())
    guard_state_dicts(plan, model, optimizer)
    if pipeline is not None:
        pipeline.attach_hooks()
    return AppliedPlan(plan, model, optimizer, groups, gradient_sync, keys, whole, tensor, pipeline, context, experts, fp8, offload)


def _whole_tensors(model: nn.Module) -> WholeTensors:
    shapes = {name: tuple(t.shape) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    first = {id(t): name for name, t in [*model.named_buffers(), *model.named_parameters()]}
    aliases: dict[str, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if first[id(tensor)] != name:
            aliases.setdefault(first[id(tensor)], []).append(name)
    parameters = tuple(name for name, _ in model.named_parameters())
    return WholeTensors(shapes, parameters, tuple(persistent_buffers(model)), {name: tuple(others) for name, others in aliases.items()})


def persistent_buffers(model: nn.Module) -> Iterator[str]:
    """Names of the buffers that belong to a model's state."""
    owners = {f"{prefix}." if prefix else "": module for prefix, module in model.named_modules()}
    for name, _ in model.named_buffers():
        module, _, key = name.rpartition(".")
        if key not in owners[f"{module}." if module else ""]._non_persistent_buffers_set:
            yield name


def _check_plan(plan: Plan, model: nn.Module, *, has_values: bool) -> None:
    check_runnable(plan.mesh)
    if plan.mesh.degree("tp") > 1 and not plan.tensor.sharded_dims:
        raise RequestError(f"plan: mesh {plan.mesh} has a tp axis, but tensor.sharded_dims is empty: let `meshwright plan` or plan_for fill it in")
    if plan.mesh.ep > 1 and not plan.expert:
        raise RequestError(f"plan: mesh {plan.mesh} has an ep axis, but expert is empty: let `meshwright plan` or plan_for fill it in")
    if plan.mesh.pp > 1 and not any(stage.entry for stage in plan.stages):
        raise RequestError(f"plan: mesh {plan.mesh} has a pp axis, but stages have no entries: let `meshwright plan` or plan_for fill them in")
    if plan.mesh.cp > 1 and not plan.context.attention_sites and not plan.spatial.grid:
        raise RequestError(f"plan: mesh {plan.mesh} has a cp axis, but context and spatial are empty: let `meshwright plan` or plan_for fill one in")
    if plan.memory.precision == "fp8" and not has_fp8(plan.device):
        raise RequestError("plan: precision=fp8 needs a GPU of compute capability 8.9 or newer, and this one is older: use bf16")
    modules = dict(model.named_modules())
    for name in plan.memory.units:
        if name not in modules:
            raise RequestError(f"plan: memory.units names '{name}', which the model does not have: use a name such as {list(modules)[1:4]}")
    check_tied_parameters(plan, tied_parameter_names(model))
    if has_values and is_sharded(model):
        raise RequestError("a plan was applied to this model already: build the model anew and apply one plan")
    for name, module in modules.items() if plan.world > plan.mesh.degree("tp") or plan.tensor.is_sequence_parallel else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            why = f"{name} renormalizes its weight in forward (max_norm), by the samples that it sees, so ranks would differ"
            raise RequestError(f"plan: {why}: use one device, or --mesh tp={plan.world} without sequence parallelism")


def broadcast_initial_state(model: nn.Module, groups: ProcessGroups) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks, whatever seed a user's script built them with."""
    state = [t.data for t in [*model.parameters(), *model.buffers()]]
    for group in init_broadcast_groups([t.nbytes for t in state], [t.dtype for t in state]):
        tensors = [state[i] for i in group]
        flat = torch.cat([t.reshape(-1) for t in tensors])
        groups.world.broadcast(flat, "init/params").wait()
        for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))


def autocast_factory(plan: Plan, device: str = "") -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of the context that forward runs in: autocast where the plan's precision is low. The device is the plan's unless given."""
    dtype = low_precision_dtype(plan)
    return nullcontext if dtype is None else lambda: torch.autocast(device or plan.device, dtype=dtype)
