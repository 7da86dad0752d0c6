"""From an nn.Module to a ModelProfile: runs its loss once on fake tensors, which have shapes and no memory, and records every operation. A model
that reads the values of tensors in Python cannot run on fakes: a copy of it runs on real tensors instead.

[Note: attributing backward]
A forward operation belongs to the layer whose forward is running. Autograd numbers the nodes it creates, so each layer owns the sequence numbers
assigned while it ran; a backward operation belongs to the layer that owns the node being executed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from meshwright.core.errors import RequestError
from meshwright.core.gc_control import gc_disabled
from meshwright.core.model import KernelKind, ModelProfile, Phase
from meshwright.core.task import Batch, Loss, Task
from meshwright.describe import fake_tensors
from meshwright.describe.convolution_workspace import ConvWorkspace, convolution_workspace
from meshwright.describe.cuda_autocast import CudaAutocast
from meshwright.describe.layer_profiles import PROBED_BATCHES, LayerTrace, buffer_specs, layer_profiles
from meshwright.describe.layers import Layer, find_layers, tied_parameter_names, training_batch_norms
from meshwright.describe.mincut_partitioner import MinCutPartitioner
from meshwright.describe.op_classification import flops_of, is_zero_cost, kernel_kind
from meshwright.describe.repeated_blocks import skip_repeated_blocks
from meshwright.describe.storage_lifetimes import StorageLifetimes
from meshwright.describe.untraceable import UntraceableError

# These read only the selected rows or elements, not the whole table.
_GATHER_OPS = {torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.gather, torch.ops.aten.index, torch.ops.aten.nll_loss_forward}


@gc_disabled
def trace_task(task: Task, *, precision: str = "fp32", attention: str = "flash", device: str = "cpu") -> ModelProfile:
    """Profile a task's model without allocating it, as it would run on the given `device` type."""
    model, mode = fake_tensors.cached_fake_model(task)
    make_batch = partial(fake_tensors.example_batch, task, precision=precision)
    options = task.name, precision, attention, device
    try:
        profile = _trace_profile(model, task.loss, make_batch, mode, *options)
    except UntraceableError as error:
        profile = _profile_by_running(task.build(), task.loss, make_batch, error, *options)
    return replace(profile, tokens_per_sample=task.tokens_per_sample)


@gc_disabled
def trace_module(
    model: nn.Module, loss: Loss, batch: Batch, *, name: str, precision: str = "fp32", attention: str = "flash", device: str = "cpu"
) -> ModelProfile:
    """Profile a live model on the shapes of one of its batches. Neither is modified."""
    mode, options = FakeTensorMode(allow_non_fake_inputs=True), (name, precision, attention, device)
    try:
        return _trace_profile(model, loss, partial(fake_tensors.example_batch_like, batch), mode, *options)
    except UntraceableError as error:
        return _profile_by_running(model, loss, partial(fake_tensors.samples_like, batch, model), error, *options)


def profile_parameters_only(model: nn.Module, name: str) -> ModelProfile:
    """A profile of a live model without a loss: parameters are exact, everything else is zero."""
    layers = layer_profiles(model, find_layers(model), {}, {})
    return ModelProfile(name, layers, 1, layers, attention="unknown", buffers=buffer_specs(model), batch_norms=training_batch_norms(model))


def _profile_by_running(
    model: nn.Module, loss: Loss, make_batch: Callable[[int], Batch], error: UntraceableError, name: str, precision: str, attention: str, device: str
) -> ModelProfile:
    """Profile a model that cannot be traced: two steps of it on real samples. The model is not modified."""
    with torch.random.fork_rng():
        try:
            profile = _trace_profile(model, loss, make_batch, nullcontext(), name, precision, attention, device)
        except UntraceableError as failure:
            raise RequestError(f"model {name} can be neither traced nor run: {failure.reason}") from failure
    return replace(profile, untraceable=error.reason)


def _trace_profile(
    model: nn.Module, loss: Loss, make_batch: Callable[[int], Batch], mode: FakeTensorMode | nullcontext[None], name: str, precision: str,
    attention: str, device: str,
) -> ModelProfile:  # fmt: skip
    layers = find_layers(model)
    runs = [_trace_step(model, layers, loss, make_batch, batch, mode, precision, attention, device) for batch in PROBED_BATCHES]
    (first, counted_loss), (second, _) = runs
    fp64 = precision == "fp64"
    low = layer_profiles(model, layers, first, second, fp64=fp64)
    slopes = layer_profiles(model, layers, first, second, slope=True, fp64=fp64)
    tied, buffers = tied_parameter_names(model), buffer_specs(model, fp64)
    with mode:
        few, more = (sum(_bytes(t) for t in pytree.tree_leaves(make_batch(n)) if torch.is_tensor(t)) for n in PROBED_BATCHES)
    known = tied, counted_loss, buffers, float(more - few), training_batch_norms(model)
    return ModelProfile(name, low, PROBED_BATCHES[0], slopes, precision, attention, None, *known)


def _trace_step(
    model: nn.Module, layers: list[Layer], loss: Loss, make_batch: Callable[[int], Batch], batch: int,
    mode: FakeTensorMode | nullcontext[None], precision: str, attention: str, device: str,
) -> tuple[dict[str, LayerTrace], bool]:  # fmt: skip
    """Run one forward and backward, on fakes or on the model's own tensors; return each layer's trace, and whether the loss is (sum, count)."""
    is_fake = isinstance(mode, FakeTensorMode)
    with ExitStack() as stack:
        stack.enter_context(mode)
        fakes = stack.enter_context(fake_tensors.fake_parameters(model, precision) if is_fake else fake_tensors.copied_parameters(model))
        inputs = make_batch(batch)
        recorder = _ProfileRecorder([*fakes.values(), *(t for t in pytree.tree_leaves(inputs) if torch.is_tensor(t))], device)
        stack.enter_context(_layer_hooks(layers, recorder))
        stack.enter_context(_release_finished_grads(fakes.values(), recorder.lifetimes))
        representative_of: dict[str, str] = {}
        if is_fake:  # a skipped block's outputs have no values
            stack.enter_context(skip_repeated_blocks(layers, representative_of, recorder.make_marker))
        stack.enter_context(fake_tensors.silence_torch_logging())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.on_saved_tensor, lambda t: t))
        stack.enter_context(recorder)
        stack.enter_context(_patched_attention(recorder) if attention == "flash" else sdpa_kernel(SDPBackend.MATH))
        try:
            with ExitStack() as casts:
                if precision in fake_tensors.AUTOCAST_DTYPES:
                    casts.enter_context(torch.autocast("cpu", dtype=fake_tensors.AUTOCAST_DTYPES[precision]))
                    casts.enter_context(CudaAutocast() if device == "cuda" else nullcontext())
                value = loss(model, inputs)
            recorder.phase = "backward"
            (value[0] if isinstance(value, tuple) else value).backward()
        except RequestError:
            raise
        except Exception as error:
            raise UntraceableError(model, error) from error
    for name, size in recorder.partitioner.rematerialized_bytes().items():
        recorder.layer_traces[name].rematerialized_bytes = float(size)
    for name, representative in representative_of.items():
        recorder.layer_traces[name] = recorder.layer_traces[representative]
    for name in recorder.entered_layers.intersection(recorder.layer_traces):
        recorder.layer_traces[name] = replace(recorder.layer_traces[name], is_entered=True)
    return recorder.layer_traces, isinstance(value, tuple)


class _ProfileRecorder(TorchDispatchMode):
    """Records every operation that reaches a kernel under the layer it belongs to."""

    def __init__(self, constants: Any, device: str) -> None:
        super().__init__()
        self.device = device
        self.phase: Phase = "forward"
        self.layer_traces: dict[str, LayerTrace] = {"": LayerTrace()}
        self.stack: list[str] = [""]
        self.entered_layers: set[str] = set()  # layers of which a module was called outside of the layer's own call
        self.modules: list[str] = []  # stack of running modules that have parameters of their own
        self._sequence_starts: list[int] = [0]  # first autograd sequence number of each run of nodes …
        self._node_layers: list[str] = [""]  # … the layer that owns the run …
        self._activation_layers: list[str] = [""]  # … and the layer whose activations it works on (see `_assign_loose_saved`)
        self._constants = {t.untyped_storage()._cdata for t in constants}
        self._counted_storages = set(self._constants)
        self._pointwise: set[int] = set()  # storages written by element-wise operations
        self._product_storages: set[int] = set()  # storages that matmuls, convolutions and attention produced in forward
        self._last_layer = ""  # the layer whose forward ended last
        self._loose_saved: list[tuple[int, int, int]] = []  # saved outside all layers since then: (storage, bytes, fusible bytes)
        self._loose_ops_start = 0  # operations outside all layers up to then
        self.lifetimes, self.partitioner = StorageLifetimes(self._on_free), MinCutPartitioner(self._constants)

    def enter_layer(self, name: str) -> None:
        self.stack.append(name)
        self.layer_traces.setdefault(name, LayerTrace())
        self._assign_loose_saved()
        self._start_node_run()

    def leave_layer(self, output: Any) -> None:
        self._last_layer = self.stack.pop()
        self.layer_traces[self._last_layer].output_bytes += sum(_bytes(t) for t in pytree.tree_leaves(output) if torch.is_tensor(t))
        self._loose_ops_start = len(self.layer_traces[""].live_bytes)
        self._start_node_run()

    def enter_module(self, layer: str, name: str, *_: object) -> None:
        self.modules.append(name)
        if name and layer not in self.stack:
            self.entered_layers.add(layer)

    def leave_module(self, *_: object) -> None:
        self.modules.pop()

    def _assign_loose_saved(self) -> None:
        """Attribute what the model's own code saved between two layers to the earlier one: a pipeline stage ends there, and backward frees it there.
        What follows the last layer, such as the loss, stays separate."""
        loose, layer = self.layer_traces[""], self.layer_traces[self._last_layer]
        if loose is not layer:
            layer.live_bytes += [size + layer.saved_bytes for size in loose.live_bytes[self._loose_ops_start :]]
            del loose.live_bytes[self._loose_ops_start :]
            for storage, size, fusible in self._loose_saved:
                loose.saved_bytes, loose.fusible_bytes = loose.saved_bytes - size, loose.fusible_bytes - fusible
                layer.saved_bytes, layer.fusible_bytes = layer.saved_bytes + size, layer.fusible_bytes + fusible
                self.lifetimes.reassign_saver(storage, self._last_layer)
                self.partitioner.reassign_saver(storage, self._last_layer)
            self._activation_layers[-1] = self._last_layer
        self._loose_saved = []

    def _start_node_run(self) -> None:
        self._sequence_starts.append(torch._C._autograd._get_sequence_nr())
        self._node_layers.append(self.stack[-1])
        self._activation_layers.append(self.stack[-1])

    def _on_free(self, storage: int) -> None:
        for storages in (self._counted_storages, self._pointwise, self._product_storages):
            storages.discard(storage)
        self.partitioner.forget(storage)

    def _current_layer(self, layers: list[str] | None = None) -> str:
        """The running layer; in backward, the layer in `layers` that the running autograd node belongs to."""
        layers = layers or self._node_layers
        if self.phase == "forward":
            return self.stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        run = bisect_right(self._sequence_starts, node._sequence_nr()) - 1
        return layers[min(run, len(layers) - 1)]

    def make_marker(self, output: Tensor) -> Callable[[Tensor], None]:
        """A function that marks a skipped block's substitute outputs as the representative's `output` is marked."""
        pointwise = output.untyped_storage()._cdata in self._pointwise

        def mark(substitute: Tensor) -> None:
            if pointwise:
                self.lifetimes.track(substitute.untyped_storage())
                self._pointwise.add(substitute.untyped_storage()._cdata)

        return mark

    def on_saved_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._counted_storages:
            layer = self._current_layer()
            self.lifetimes.mark_saved(storage, layer)
            self.partitioner.mark_saved(storage, layer)
            self._counted_storages.add(storage._cdata)
            fusible = storage.nbytes() if storage._cdata in self._pointwise else 0
            trace = self.layer_traces[layer]
            trace.saved_bytes += storage.nbytes()
            trace.fusible_bytes += fusible
            if self.modules:
                trace.saved_by[self.modules[-1]] += storage.nbytes()
            if not layer and self.phase == "forward":
                self._loose_saved.append((storage._cdata, storage.nbytes(), fusible))
        return tensor

    def record_kernel(
        self, kind: KernelKind, flops: float, bytes_moved: float, tensors: Iterable[Tensor] = (), workspace: ConvWorkspace = (0.0, 0.0)
    ) -> None:
        """Record one call. Its workspace is what it needs beyond parameters and saved activations, plus its library's scratch memory."""
        trace = self.layer_traces[self._current_layer()]
        trace.kernels.append((kind, self.phase, flops, bytes_moved))
        activation_layer = self._current_layer(self._activation_layers)
        memory_trace = self.layer_traces[activation_layer]
        if workspace[1]:
            memory_trace.single_sample_extra[len(memory_trace.live_bytes)] = workspace[1]
        memory_trace.live_bytes.append(float(self.lifetimes.live_bytes_for(activation_layer)) + workspace[0])
        if kind not in ("memory", "special"):
            unsaved = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors) if s._cdata not in self._counted_storages}
            trace.matmul_workspace_bytes = max(trace.matmul_workspace_bytes, float(sum(unsaved.values())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        storages = [t.untyped_storage() for t in pytree.tree_leaves(out) if torch.is_tensor(t) and t.layout is torch.strided]
        for storage in storages:
            if storage._cdata not in self._constants:
                self.lifetimes.track(storage)
        if not is_zero_cost(func):
            tensors = [t for t in pytree.tree_leaves((args, kwargs, out)) if torch.is_tensor(t) and t.layout is torch.strided]
            flops = flops_of(func, args, kwargs, out)
            kind = kernel_kind(str(func._overloadpacket), flops, max((t.dim() for t in tensors), default=0))
            if kind == "special":
                flops = float(max(t.numel() for t in tensors))
            moved = pytree.tree_leaves(out) if func._overloadpacket in _GATHER_OPS else tensors
            workspace = (0.0, 0.0)
            if kind.startswith("conv"):
                weight = args[2 if "backward" in func.name() else 1]
                moved = [t for t in tensors if t.dim() > 1 and t.shape != weight.shape]  # the weight stays in the cache, and so does its gradient
                workspace = convolution_workspace(func, args, out) if self.device == "cpu" else workspace
            self.record_kernel(kind, flops, float(sum({id(t): _bytes(t) for t in moved if torch.is_tensor(t)}.values())), tensors, workspace)
            inputs = [t.untyped_storage() for t in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t) and t.layout is torch.strided]
            pointwise = kind in ("memory", "special")
            if self.phase == "forward":
                self.partitioner.record_op(storages, inputs, self._current_layer(), pointwise and torch.Tag.nondeterministic_seeded not in func.tags)
            elif not pointwise:
                self.partitioner.mark_read_by_matmul(inputs)
            written = {s._cdata for s in storages}
            self._pointwise = self._pointwise | written if pointwise else self._pointwise - written
            if func._schema.is_mutable and self._product_storages & written:
                self.layer_traces[self._current_layer()].has_inplace_ops = True
            elif not pointwise:
                self.record_product_outputs(storages)
        return out

    def record_product_outputs(self, storages: Iterable[Any]) -> None:
        """Record a matmul's results: what selective activation checkpointing would save."""
        if self.phase == "forward":
            outputs = {s._cdata: s.nbytes() for s in storages if s._cdata not in self._product_storages}
            self._product_storages.update(outputs)
            self.layer_traces[self._current_layer()].expensive_output_bytes += sum(outputs.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _FlashAttention(TorchFunctionMode):
    """Prices scaled_dot_product_attention as a flash kernel, which never stores the S² scores: that is what a device will run."""

    def __init__(self, recorder: _ProfileRecorder, original: Any) -> None:
        super().__init__()
        self.recorder, self.original = recorder, original

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.attend if func is self.original else func)(*args, **(kwargs or {}))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: Any = 0, is_causal: bool = False, **_: Any) -> Any:
        return _FlashCost.apply(query, key, value, self.recorder, is_causal)


class _FlashCost(torch.autograd.Function):
    """Saves what a flash kernel saves (q, k, v, output, log-sum-exp) and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recorder: _ProfileRecorder, causal: bool) -> Tensor:
        # Kernels give the output the query's strides, so that merging heads afterwards copies nothing.
        out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
        if not isinstance(q, FakeTensor):  # a model that runs may read what follows from it
            with _disable_current_modes():
                out.zero_()
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.recorder, ctx.kind = recorder, "causal" if causal else "attention"
        recorder.record_product_outputs(t.untyped_storage() for t in (out, sums))
        recorder.partitioner.record_op([t.untyped_storage() for t in (out, sums)], (), recorder._current_layer(), recomputable=False)
        recorder.record_kernel(ctx.kind, float(sdpa_flop_count(*_repeat_kv_shapes(q, k, v))), float(sum(map(_bytes, (q, k, v, out, sums)))))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        ctx.recorder.partitioner.mark_read_by_matmul(t.untyped_storage() for t in (q, k, v, out, sums))
        flops = sdpa_backward_flop_count(_as_4d(tuple(out.shape)), *_repeat_kv_shapes(q, k, v))
        ctx.recorder.record_kernel(ctx.kind, float(flops), 2.0 * sum(map(_bytes, (q, k, v, out))))
        make = torch.empty_like if isinstance(q, FakeTensor) else torch.zeros_like
        return make(q), make(k), make(v), None, None


def _repeat_kv_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes with key and value heads repeated to the query's: older FLOP counters do not know grouped heads."""
    return _as_4d(tuple(q.shape)), _as_4d((*q.shape[:-2], *k.shape[-2:])), _as_4d((*q.shape[:-2], *v.shape[-2:]))


def _as_4d(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape as batch, heads, positions, width, as the counters require. Attention may have fewer or more leading dims."""
    lead = shape[:-2]
    return (math.prod(lead[:-1]), lead[-1], *shape[-2:]) if lead else (1, 1, *shape[-2:])


@contextmanager
def _patched_attention(recorder: _ProfileRecorder) -> Iterator[None]:
    """Replace scaled_dot_product_attention by name as well: a function mode is off inside the functions that it handles, such as torch's own
    modules."""
    original = F.scaled_dot_product_attention
    with _FlashAttention(recorder, original) as mode:
        F.scaled_dot_product_attention = mode.attend
        try:
            yield
        finally:
            F.scaled_dot_product_attention = original


@contextmanager
def _layer_hooks(layers: list[Layer], recorder: _ProfileRecorder) -> Iterator[None]:
    """Notify the recorder when the forward of each layer, and of each of its modules with parameters of its own, begins and ends."""
    with ExitStack() as stack:
        for layer in (layer for layer in layers if not layer.own_parameters_only):
            for name, module in layer.module.named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    stack.enter_context(module.register_forward_pre_hook(partial(recorder.enter_module, layer.name, name)))
                    stack.enter_context(module.register_forward_hook(recorder.leave_module))
            stack.enter_context(layer.module.register_forward_pre_hook(lambda *_, name=layer.name: recorder.enter_layer(name)))
            stack.enter_context(layer.module.register_forward_hook(lambda _m, _a, output: recorder.leave_layer(output)))
        yield


@contextmanager
def _release_finished_grads(fakes: Iterable[Tensor], lifetimes: StorageLifetimes) -> Iterator[None]:
    """Stop counting accumulated gradients: they belong to their parameter, not to a step's workspace."""

    def on_grad_accumulated(param: Tensor) -> None:
        assert param.grad is not None
        if param.grad.layout is torch.strided:
            lifetimes.stop_counting(param.grad.untyped_storage())

    with ExitStack() as stack:
        for tensor in fakes:
            if tensor.requires_grad:
                stack.enter_context(tensor.register_post_accumulate_grad_hook(on_grad_accumulated))
        yield
