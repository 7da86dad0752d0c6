"""Pipeline parallelism: each rank keeps its stages of the model and runs micro-batches through them.

[Note: a stage of any model]
Every stage runs the model's unchanged forward, with the loss around it. Modules that an earlier stage has computed are skipped and return
placeholders of the right shapes; at the stage's entry, received boundary activations replace the placeholders; at the next stage's entry, the run
ends and its boundary activations are captured. So each stage computes what does not depend on parameters (masks, position tables) from the
samples itself, and only learned values are sent. The schedules and the communication are torch's.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.utils import _pytree as pytree

from meshwright.comm import Ledger, NullComm
from meshwright.comm.null_comm import NullWork
from meshwright.core.backends import backend_traits
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import schedule_traits
from meshwright.core.plan import BoundaryActivation, Plan
from meshwright.core.task import Batch, Loss
from meshwright.core.tied_parameters import stages_holding
from meshwright.describe.fake_tensors import assume_unpacked_sequences, fake_parameters, silence_torch_logging
from meshwright.execute.context_parallel import ContextParallelRuntime
from meshwright.execute.module_hooks import input_leaves, map_input_at, tensor_leaves
from meshwright.execute.process_groups import ProcessGroups, new_subgroup, process_group
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.stage_placeholders import SkippedCall, SkippedCallRecorder, lend_parameters, skip_calls
from meshwright.execute.zero_bubble_runtime import depend_on_inputs

_SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}
# torch's errors when both halves of a split backward need the same nodes (T5's position bias, under recomputation or tensor parallelism) and, in
# 2.11, when some output of a stage does not require grad or some input is unused.
_SPLIT_BACKWARD_ERRORS = (
    "backward through the graph a second time",
    "different number of tensors was saved",
    "does not require grad and does not have a grad_fn",
    "appears to not have been used in the graph",
)
_MAX_CACHED_SHAPES = 16  # sample shapes whose schedules, with their receive buffers, are kept


class _StageEndError(BaseException):
    """Ends the run of a stage. Not an Exception, so that no handler in a model's code catches it."""


class _FakeComm(NullComm):
    """A group of ranks for a run on fake tensors; it communicates nothing."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size = comm.rank, comm.size

    def all_gather(self, output: Tensor, tensor: Tensor, name: str, sizes: Sequence[int] | None = None) -> NullWork:
        return NullWork()


class PipelineRuntime:
    """This rank's stages. Created when a plan is applied; `run` needs a loss and micro-batches, and infers shapes from the first of each shape."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, groups: ProcessGroups) -> None:
        self.plan, self.model, self.groups = plan, model, groups
        self.local_stages = [s for s in range(len(plan.stages)) if plan.stage_rank(s) == groups.pp.rank]
        holders = stages_holding(plan.stages)
        self.stages_of_param = {name: holders(name) for name, _ in model.named_parameters()}
        self._meta_model = _meta_copy(model)
        context_comm = _FakeComm(groups.cp)
        self._meta_context = ContextParallelRuntime(self._meta_model, plan.context, context_comm, RecomputeCache()) if context_comm.size > 1 else None
        self._drop_remote_parameters(optimizer)
        sendable = backend_traits(dist.get_backend(process_group(groups.pp))).devices
        self.p2p_device = plan.device if plan.device in sendable else "cpu"  # gloo sends host memory only
        self._current = -1  # the running stage; -1: none
        self._boundary_values: dict[str, Tensor] = {}  # boundary activations by name
        self._shape_cache: dict[Hashable, StageShapes] = {}  # by sample shapes: a schedule's buffers fit one shape only
        self._shapes = StageShapes()
        self.tied_groups = [(name, new_subgroup(plan.mesh, "pp", ranks, groups.ledger)) for name, ranks in self.tied_parameters()]
        groups.subgroups.extend(comm for _, comm in self.tied_groups if comm is not None)

    # -- set-up --

    def _drop_remote_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the parameters of other ranks' stages. What the model's own code computes from one before a stage's entry is a placeholder, so one
        that has its shape and no values stays."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        remote = {id(p) for p in self.model.parameters() if not set(self.stages_of_param[names[id(p)]]) & set(self.local_stages)}
        held = {module: list(module.parameters()) for module in self.model.modules()}
        placeholders = {id(p): _placeholder(p) for p in self.model.parameters() if id(p) in remote}
        for module in self.model.modules():
            for key, param in list(module._parameters.items()):
                if param is not None and id(param) in remote:
                    del module._parameters[key]
                    vars(module)[key] = placeholders[id(param)]
        for module, parameters in held.items():
            if parameters and all(id(p) in remote for p in parameters):
                lend_parameters(module, [placeholders[id(p)] for p in parameters], lambda: self._current >= 0)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in remote]

    def tied_parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """Parameters that stages on several ranks use, with those ranks: their gradients must be summed."""
        ranks_of = {name: tuple(sorted({self.plan.stage_rank(s) for s in stages})) for name, stages in self.stages_of_param.items()}
        return [(name, ranks) for name, ranks in ranks_of.items() if len(ranks) > 1]

    def in_grad_norm(self, name: str) -> bool:
        """Whether this rank counts a parameter in sums over the pipeline: of the ranks that hold it, one does."""
        return self.plan.stage_rank(self.stages_of_param[name][0]) == self.groups.pp.rank

    def attach_hooks(self) -> None:
        """Register the hooks at stage boundaries. After all other hooks on modules, since a skipped module must bypass them."""
        self._modules = modules = dict(self.model.named_modules(remove_duplicate=False))
        for name in {n for s in self.local_stages for n in self.plan.stages[s].skipped_modules}:
            self._skip_module(modules[name], name)
        for index, stage in enumerate(self.plan.stages):
            if index in self.local_stages:
                for activation in stage.boundary_activations:
                    for consumer in activation.consumers:
                        hook = lambda _, *inputs, i=index, a=activation, c=consumer: self._inject_received(i, a, c.position, inputs)  # noqa: E731
                        modules[consumer.module].register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            if index and index - 1 in self.local_stages:
                end_stage = lambda *_, stage=index - 1: self._end_stage(stage)  # noqa: E731
                modules[stage.entry].register_forward_pre_hook(end_stage, prepend=True)
        sending = [stage for i, stage in enumerate(self.plan.stages) if i - 1 in self.local_stages]
        for activation in {a.name: a for stage in sending for a in stage.boundary_activations}.values():
            source = modules[activation.source]
            if activation.at_module_input:  # before the hook that ends a stage there
                source.register_forward_pre_hook(lambda _, *inputs, a=activation: self._capture(a, inputs), with_kwargs=True, prepend=True)
            else:
                source.register_forward_hook(lambda _m, _a, out, a=activation: self._capture(a, out))

    def _skip_module(self, module: Any, name: str) -> None:
        """Intercept the module's calls, before its hooks: return placeholders if an earlier stage has computed it."""
        inner = module._compiled_call_impl or module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._current < 0 or not self._skips(name):
                return inner(*args, **kwargs)
            return skip_calls(self._shapes.skipped_calls[name], self._modules)

        module._compiled_call_impl = call

    def _end_stage(self, stage: int) -> None:
        if self._current == stage:
            raise _StageEndError

    def _capture(self, activation: BoundaryActivation, tree: Any) -> None:
        """Keep a boundary activation where it is computed. One that was received stays: the model's own code has only placeholders of it."""
        if self._current >= 0 and activation.name not in self._boundary_values and not self._skips(activation.source):
            self._boundary_values[activation.name] = _activation_in(tree, activation)

    def _skips(self, module: str) -> bool:
        return module in self.plan.stages[self._current].skipped_modules

    def _inject_received(self, stage: int, activation: BoundaryActivation, position: int, inputs: Any) -> Any:
        return map_input_at(inputs, position, lambda _: self._boundary_values[activation.name]) if self._current == stage else None

    # -- shape inference --

    @property
    def loss_has_count(self) -> bool:
        """Whether the loss is a (sum, count)."""
        return self._shapes.loss_has_count

    def _shapes_for(self, micro_batch: Batch, loss_fn: Loss, autocast: Any, *, training: bool) -> StageShapes:
        """The shapes for micro-batches of this shape, inferred when one first comes. Every rank of the pipeline sees the same ones."""
        key = (training, tuple((tuple(t.shape), t.dtype) for t in tensor_leaves(micro_batch)))
        shapes = self._shape_cache.pop(key, None)
        if shapes is None:
            shapes = self.infer_shapes(loss_fn, micro_batch, autocast)
            if training:
                shapes.schedule = self._build_schedule(shapes)
        self._shape_cache[key] = shapes
        if len(self._shape_cache) > _MAX_CACHED_SHAPES:
            del self._shape_cache[next(iter(self._shape_cache))]
        return shapes

    def infer_shapes(self, loss_fn: Loss, micro_batch: Batch, autocast: Any) -> StageShapes:
        """Shapes and dtypes of boundary activations and of skipped modules' outputs, from one forward on fake tensors."""
        shapes, device = StageShapes(), self.plan.device
        modules = dict(self._meta_model.named_modules())

        def record_boundary(activation: BoundaryActivation, tree: Any) -> None:
            shapes.boundary_metas[activation.name] = self._local_meta(activation, _meta_of(_activation_in(tree, activation)))

        skipped = {n for s in self.local_stages for n in self.plan.stages[s].skipped_modules}
        recorders = {name: SkippedCallRecorder(name, modules[name], device) for name in skipped}
        handles = [handle for recorder in recorders.values() for handle in recorder.handles]
        for activation in {a.name: a for stage in self.plan.stages for a in stage.boundary_activations}.values():
            source = modules[activation.source]
            if activation.at_module_input:
                handles.append(source.register_forward_pre_hook(lambda _m, *inputs, a=activation: record_boundary(a, inputs), with_kwargs=True))
            else:
                handles.append(source.register_forward_hook(lambda _m, _a, out, a=activation: record_boundary(a, out)))
        for copied, module in zip(self._meta_model.modules(), self.model.modules(), strict=True):
            copied.training = module.training
        parameters = fake_parameters(self._meta_model, self.plan.memory.precision, device)
        with FakeTensorMode(allow_non_fake_inputs=True), parameters, silence_torch_logging(), assume_unpacked_sequences(), autocast():
            fakes = pytree.tree_map(lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device) if torch.is_tensor(t) else t, micro_batch)
            try:
                value = (self._meta_context.wrap_loss(loss_fn) if self._meta_context is not None else loss_fn)(self._meta_model, fakes)
            except ValueError as error:  # what a model says of its input: norms of a single value, for one
                raise RequestError(
                    f"pipeline: this model does not take a batch of one micro-batch's size ({error}): use fewer micro-batches"
                ) from error
            shapes.loss_has_count = isinstance(value, tuple)
            shapes.loss = _meta_of(value[0] if isinstance(value, tuple) else value)
        for handle in handles:
            handle.remove()
        shapes.skipped_calls = {name: recorder.calls for name, recorder in recorders.items()}
        return shapes

    def _local_meta(self, activation: BoundaryActivation, full: TensorMeta) -> TensorMeta:
        """This rank's shape of a boundary activation, from its full shape."""
        if not activation.logical_dim:
            return full
        local_size, size = self.plan.logical_dim_shards[self.plan.mesh.coordinate(self.groups.rank, "tp")][activation.logical_dim]
        return replace(full, shape=tuple(n // size * local_size if d == activation.dim else n for d, n in enumerate(full.shape)))

    def _build_schedule(self, shapes: StageShapes) -> _PipelineSchedule:
        device = torch.device("cuda", torch.cuda.current_device()) if self.p2p_device == "cuda" else torch.device("cpu")
        # What each stage takes in; after the last one comes the loss.
        specs = [tuple(_meta_tensor(shapes.boundary_metas[a.name]) for a in stage.boundary_activations) for stage in self.plan.stages]
        specs.append((_meta_tensor(shapes.loss),))
        group = process_group(self.groups.pp)
        stages = [
            _RecordedStage(_StageModule(self, i), i, len(self.plan.stages), device, specs[i], specs[i + 1], group, self.groups.ledger)
            for i in self.local_stages
        ]
        several = schedule_traits(self.plan.schedule).stages_per_rank > 1
        make = _SCHEDULES[self.plan.schedule]
        return make(stages if several else stages[0], self.plan.micro_batches, loss_fn=lambda out, _: out, scale_grads=False)

    # -- running --

    def run(self, micro_batches: list[Batch], run_stage: Any, loss_fn: Loss, autocast: Any) -> list[Tensor]:
        """Run forward and backward of all micro-batches; return the losses, on the rank of the last stage. `run_stage(index)` computes a loss."""
        self._shapes = self._shapes_for(micro_batches[0], loss_fn, autocast, training=True)
        self._run_stage = run_stage
        schedule: Any = self._shapes.schedule
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = True
            stage.clear_runtime_states()
        losses: list[Tensor] = []
        count = len(micro_batches)
        kwargs = [{"index": torch.tensor(i)} for i in range(count)]  # torch 2.11 expects every argument to be a tensor
        try:
            schedule._step_microbatches([()] * count, kwargs, [None] * count, losses, False)
        except RuntimeError as error:
            if self.plan.splits_backward and any(words in str(error) for words in _SPLIT_BACKWARD_ERRORS):
                message = f"schedule={self.plan.schedule} splits backward, which torch cannot do with this model: use interleaved"
                raise RequestError(message) from error
            raise
        return losses

    def evaluate(self, batch: Batch, run_stage: Any, loss_fn: Loss, autocast: Any) -> Any:
        """Run one batch forward through all stages, one after the other; return the loss on the rank of the last."""
        self._shapes = self._shapes_for(batch, loss_fn, autocast, training=False)
        self._run_stage = run_stage
        group, rank, last = process_group(self.groups.pp), self.groups.pp.rank, len(self.plan.stages) - 1
        out: Any = ()  # of the stage before, if it is on this rank
        for index in self.local_stages:
            if index and self.plan.stage_rank(index - 1) != rank:
                metas = [self._shapes.boundary_metas[a.name] for a in self.plan.stages[index].boundary_activations]
                out = tuple(torch.empty(m.shape, dtype=m.dtype, device=self.p2p_device) for m in metas)
                for tensor in out:
                    dist.recv(tensor, group=group, group_src=self.plan.stage_rank(index - 1))
            out = self.forward(index, out, 0)
            if index < last and self.plan.stage_rank(index + 1) != rank:
                for tensor in out:
                    dist.send(tensor.contiguous(), group=group, group_dst=self.plan.stage_rank(index + 1))
        return out if last in self.local_stages else None

    def forward(self, stage: int, received: tuple[Tensor, ...], index: int) -> Any:
        """Run one micro-batch through one stage; return the loss from the last stage, boundary activations from the others."""
        inputs = (_Received.apply(t.to(self.plan.device)) if t.requires_grad else t.to(self.plan.device) for t in received)
        self._boundary_values = {a.name: t for a, t in zip(self.plan.stages[stage].boundary_activations, inputs, strict=True)}
        self._current = stage
        if self.plan.splits_backward and stage and torch.is_grad_enabled() and not any(t.requires_grad for t in received):
            reason = f"stage {stage} receives no activation that needs a gradient"
            raise RequestError(f"schedule={self.plan.schedule} splits backward, and {reason}: use interleaved")
        try:
            return self._run_stage(index)
        except _StageEndError:
            out = tuple(self._to_send_buffer(self._boundary_values[a.name]) for a in self.plan.stages[stage + 1].boundary_activations)
            return depend_on_inputs(out, received) if self.plan.splits_backward else out
        finally:
            self._current = -1
            self._boundary_values = {}

    def run_stage(self, stage: int, received: tuple[Tensor, ...], shapes: StageShapes, run: Any) -> Any:
        """One stage of a forward pass whose shapes are known: its boundary activations, or what `run` returns from the last stage."""
        self._shapes, self._run_stage = shapes, lambda _: run()
        return self.forward(stage, received, 0)

    def _to_send_buffer(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous and on the P2P device. To split backward, torch detaches a stage's outputs in place, which views forbid."""
        must_clone = (self.plan.splits_backward and tensor._is_view()) or not has_standard_strides(tensor)
        return (tensor.clone(memory_format=torch.contiguous_format) if must_clone else tensor).to(self.p2p_device)


class _Received(torch.autograd.Function):
    """A received activation as the result of an operation, without a copy: it is a leaf, which a layer could not change in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _StageModule(nn.Module):
    """The module that torch's schedules call: the model's forward, from this stage's entry to its end."""

    def __init__(self, runtime: PipelineRuntime, index: int) -> None:
        super().__init__()
        self._runtime, self._index = [runtime], index  # in a list: the model must not become a submodule

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        runtime = self._runtime[0]
        return (p for name, p in runtime.model.named_parameters() if self._index in runtime.stages_of_param[name])

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        return self._runtime[0].forward(self._index, received, int(index))


class _RecordedStage(pipelining.PipelineStage):
    """torch's stage, with static shapes, whose sends are recorded in the ledger. torch keeps one receive buffer for every micro-batch of a step;
    here a buffer exists from the posting of its receive until its micro-batch has used it."""

    def __init__(
        self, submodule: nn.Module, index: int, count: int, device: torch.device,
        input_specs: tuple[Tensor, ...], output_specs: tuple[Tensor, ...], group: Any, ledger: Ledger,
    ) -> None:  # fmt: skip
        super().__init__(submodule, index, count, device, input_args=input_specs, output_args=output_specs, group=group)
        self._ledger, self._input_specs, self._output_specs = ledger, input_specs, output_specs
        self._needs_grad = [t.requires_grad for t in input_specs], [t.requires_grad for t in output_specs]

    def _get_init_p2p_neighbors_ops(self) -> Any:
        """Drop torch 2.11's first messages to a neighbour stage on the same rank, for which gloo has no connection."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        has_backward, self.has_backward = self.has_backward, False  # torch 2.11 lets every buffer require grad, which indices cannot
        outputs = super()._prepare_forward_infra(*args, **kwargs)
        self.has_backward = has_backward
        for infos in () if self.is_first else self.args_recv_info.values():
            _require_grad(infos, self._needs_grad[0])
        for infos in self.args_recv_info.values():
            _free_buffers(infos)
        return outputs

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            _free_buffers(infos)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        _allocate_buffers(self.args_recv_info[fwd_chunk_id], self._input_specs, self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        for info, tensor in zip(self.args_recv_info[mb_index], prev_stage_outputs, strict=True):
            info.buffer = tensor.detach().requires_grad_(tensor.requires_grad)  # torch 2.11 lets every one require grad

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _free_buffers(self.args_recv_info[fwd_chunk_id])  # torch keeps the stage's inputs until backward
        return output

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if any(gradient is None for gradient in next_stage_bwd_outputs):  # torch sets the buffer of a missing gradient to zero
            _allocate_buffers(self.grad_recv_info[mb_index], self._output_specs, self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        if len(gradients) < len(self._needs_grad[0]):  # torch 2.11 leaves out inputs without gradient when it splits backward
            found = iter(gradients)
            self.bwd_cache[bwd_chunk_id] = tuple(next(found, None) if needed else None for needed in self._needs_grad[0])
        _free_buffers(self.grad_recv_info.get(bwd_chunk_id, ()))
        return result

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self._record_sends(ops, f"activations/{self.stage_index}")
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        if bwd_chunk_id in self.bwd_cache and not hasattr(self, "_get_grad_send_meta"):  # torch 2.11 refuses to send a missing gradient
            pairs = zip(self.bwd_cache[bwd_chunk_id], self._input_specs, strict=False)  # gradients of keyword arguments come after
            self.bwd_cache[bwd_chunk_id] = tuple(torch.zeros(t.shape, dtype=t.dtype, device=self.device) if g is None else g for g, t in pairs)
        if bwd_chunk_id in self.bwd_cache:  # a gradient has the strides of the last operation's backward, and gloo sends contiguous tensors
            self.bwd_cache[bwd_chunk_id] = tuple(None if g is None else g.contiguous() for g in self.bwd_cache[bwd_chunk_id])
        ops = _only_with_grad(super().get_bwd_send_ops(bwd_chunk_id), self._needs_grad[0])
        self._record_sends(ops, f"gradients/{self.stage_index}")
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        _allocate_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self._output_specs, self.device)
        return _only_with_grad(super().get_bwd_recv_ops(bwd_chunk_id), self._needs_grad[1])

    def _record_sends(self, ops: Any, name: str) -> None:
        for op in ops:
            self._ledger.add(name, "send", 2, op.tensor.nbytes)


def has_standard_strides(tensor: Tensor) -> bool:
    """Whether a tensor's strides are those of a new one, which torch 2.11 asks of what a stage sends. `is_contiguous` disregards dims of size one,
    so a slice of a single sample is contiguous with the strides of the whole."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def _allocate_buffers(infos: Any, specs: Sequence[Tensor], device: torch.device) -> None:
    """Give torch's receive infos new buffers. One without a buffer receives nothing. torch 2.11 computes on the buffers themselves, so those that
    require grad must still do so."""
    for info, spec in zip(infos, specs, strict=False):
        if getattr(info, "buffer", None) is not None:
            info.buffer = torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=info.buffer.requires_grad)


def _require_grad(infos: Any, needs_grad: Sequence[bool]) -> None:
    for info, needed in zip(infos, needs_grad, strict=True):
        info.buffer.requires_grad_(needed)


def _free_buffers(infos: Any) -> None:
    """Drop the buffers of torch's receive infos; an empty tensor stays, whose gradient torch clears."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = info.buffer.new_empty(0, requires_grad=info.buffer.requires_grad)


def _only_with_grad(ops: Any, needs_grad: list[bool]) -> Any:
    """The ops of tensors that require grad. torch 2.11 sends a gradient, which is dropped, for every other one too; later versions do not."""
    return list(itertools.compress(ops, needs_grad)) if len(ops) == len(needs_grad) else ops


def _placeholder(param: nn.Parameter) -> Tensor:
    """A tensor of the parameter's shape and dtype that takes no memory. It is NaN where there is one, so that a value that nobody should have used
    shows in the loss."""
    value = torch.zeros((), dtype=param.dtype, device=param.device)
    return (value.fill_(torch.nan) if param.is_floating_point() else value).expand(param.shape)


def _activation_in(tree: Any, activation: BoundaryActivation) -> Tensor:
    """A boundary activation among its source's inputs or outputs."""
    if not activation.at_module_input:
        return tensor_leaves(tree)[activation.position]
    found = input_leaves(tree)[activation.position]
    if found is None:
        raise RequestError(f"pipeline: {activation.source} is given None where it had a tensor when it was planned: plan with such a batch")
    return found


@dataclass(frozen=True)
class TensorMeta:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class StageShapes:
    """What one sample shape determines: shapes at stage boundaries, and the schedule."""

    skipped_calls: dict[str, tuple[SkippedCall, ...]] = field(default_factory=dict)  # module → its call, after those inside it
    boundary_metas: dict[str, TensorMeta] = field(default_factory=dict)
    loss: TensorMeta = TensorMeta((), torch.float32, True)
    loss_has_count: bool = False
    schedule: _PipelineSchedule | None = None  # for training


def _meta_of(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _meta_tensor(meta: TensorMeta) -> Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta").requires_grad_(meta.requires_grad)


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model's structure whose parameters and buffers have shapes only."""
    computed = (v for m in model.modules() for v in vars(m).values() if torch.is_tensor(v) and not v.is_leaf)
    memo: dict[int, Any] = {id(tensor): tensor.detach() for tensor in computed}  # what modules keep of an earlier pass cannot be copied
    for tensor in [*model.parameters(), *model.buffers()]:
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    return copy.deepcopy(model, memo)
