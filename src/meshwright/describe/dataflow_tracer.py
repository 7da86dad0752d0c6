"""From an nn.Module to its `Dataflow`: runs its loss once on fake tensors and follows every logical dim (see [Note: logical dims])."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.core.dataflow import BatchTensor, Dataflow, LayerKind, ModuleCall, Operation, SizedCallSite, SizeRead, Value
from meshwright.core.errors import RequestError
from meshwright.core.gc_control import gc_disabled
from meshwright.core.sized_calls import sized_call
from meshwright.core.task import Batch, Loss, Task
from meshwright.describe.attention_decompose import decomposed_attention
from meshwright.describe.block_copying import copy_repeated_blocks
from meshwright.describe.dim_unification import DimMismatchError, LogicalDim, dim_size, factors_of, new_dim, unify
from meshwright.describe.fake_tensors import (
    AUTOCAST_DTYPES,
    assume_unpacked_sequences,
    cached_fake_model,
    example_batch,
    example_batch_like,
    fake_parameters,
    silence_torch_logging,
)
from meshwright.describe.propagation_rules import RuleContext, TensorDims, attention_rule, find_rule, unknown_rule
from meshwright.describe.size_reads import record_size_reads
from meshwright.describe.trace_records import DataflowTrace, ModuleFrame, TracedOp, TracedTensor

_TRACED_BATCH = 2
_OPAQUE_FUNCTION = (
    "multi_head_attention_forward"  # runs Python calls that a function mode does not see; reached only where the attention cannot be decomposed
)


@gc_disabled
def trace_dataflow(task: Task, precision: str = "fp32", *, copy_repeated: bool = True) -> Dataflow:
    """The dataflow of a task's model, without allocating it. `copy_repeated`: of equal blocks only two are traced, and the others copied."""
    model, mode = cached_fake_model(task)
    return _trace_loss(model, task.loss, lambda: example_batch(task, _TRACED_BATCH, precision), mode, precision, copy_repeated)


def trace_module_dataflow(model: nn.Module, loss: Loss, batch: Batch, precision: str = "fp32", *, copy_repeated: bool = True) -> Dataflow:
    """The dataflow of a live model on the shapes of one of its batches. Neither is modified."""
    return _trace_loss(
        model, loss, lambda: example_batch_like(batch, _TRACED_BATCH), FakeTensorMode(allow_non_fake_inputs=True), precision, copy_repeated
    )


def _trace_loss(
    model: nn.Module, loss: Loss, make_batch: Callable[[], Batch], mode: FakeTensorMode, precision: str, copy_repeated: bool = True
) -> Dataflow:
    with ExitStack() as stack:
        stack.enter_context(mode)
        fakes = stack.enter_context(fake_parameters(model, precision))
        stack.enter_context(silence_torch_logging())
        stack.enter_context(assume_unpacked_sequences())
        stack.enter_context(torch.autocast("cpu", dtype=AUTOCAST_DTYPES[precision]) if precision in AUTOCAST_DTYPES else nullcontext())
        batch = make_batch()
        recorder = _DataflowRecorder(fakes)
        stack.enter_context(decomposed_attention(model))
        stack.enter_context(_module_hooks(model, recorder))
        if copy_repeated:
            stack.enter_context(copy_repeated_blocks(model, recorder))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.on_saved_tensor, lambda t: t))
        stack.enter_context(recorder)
        stack.enter_context(_SizedCallRecorder(recorder))
        try:
            recorder.record_loss(loss(model, batch))
        except RequestError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise RequestError(f"model {type(model).__name__} could not be traced for tensor parallelism: {reason[0][:200]}") from error
        return recorder.build_dataflow(batch)


class _DataflowRecorder(TorchDispatchMode):
    """Records every operation that reaches a kernel, and applies its propagation rule."""

    def __init__(self, fakes: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.trace = DataflowTrace()
        self._ids: dict[int, int] = {}
        self._kept_alive: list[torch.Tensor] = []  # keeps ids unique: a freed tensor's id would be reused
        self.frames: list[ModuleFrame] = [ModuleFrame("", "other", [], 0)]
        self.paused = False  # while a copied block allocates its outputs
        self.current_call = -1
        self.opaque_name = ""  # name of the running function whose inner operations have no rules
        self.function = ""
        for name, tensor in fakes.items():
            self.trace.values[self.value_index(tensor)].parameter = name

    # -- tensors --

    def value_index(self, tensor: torch.Tensor) -> int:
        """The tensor's index in the trace; a tensor not seen before (an input, a constant) gets new dims."""
        with torch._C.DisableTorchFunction():  # these reads are not the model's own size reads
            found = self._ids.get(id(tensor))
            if found is None:
                found = self._register(tensor, [new_dim(n) for n in tensor.shape])
            self.trace.values[found].needs_grad |= tensor.requires_grad
            return found

    def _register(self, tensor: torch.Tensor, dims: TensorDims) -> int:
        self._kept_alive.append(tensor)
        self.trace.values.append(TracedTensor(tuple(tensor.shape), dims, tensor.element_size(), tensor.is_floating_point()))
        self._ids[id(tensor)] = len(self.trace.values) - 1
        return self._ids[id(tensor)]

    def bind_value(self, tensor: torch.Tensor, value: int) -> None:
        """Assign a newly allocated tensor to a value that the trace already contains."""
        self._kept_alive.append(tensor)
        self._ids[id(tensor)] = value

    def dims_of(self, tensor: torch.Tensor) -> TensorDims:
        return self.trace.values[self.value_index(tensor)].dims

    # -- operations --

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        inputs = [self.value_index(t) for t in given]
        out = func(*args, **kwargs)
        outs = _tensors(out)
        if not outs or func.namespace == "prim":
            return out
        rule = unknown_rule if self.opaque_name else find_rule(func)
        name = self.opaque_name or func._overloadpacket.__name__
        names = [argument.name for argument in func._schema.arguments]
        named = {"reduction": 1} if "reduction" in names else {}  # losses default to the mean
        named |= {**dict(zip(names, args, strict=False)), **kwargs}
        self.record_op(name, inputs, outs, lambda scene: rule(scene, args, kwargs, outs), given, named)
        return out

    def record_op(
        self,
        name: str,
        inputs: list[int],
        outs: Sequence[torch.Tensor],
        rule: Callable[[RuleContext], list[TensorDims]],
        input_tensors: Sequence[torch.Tensor],
        arguments: dict[str, Any],
    ) -> None:
        """Record one operation under its rule. If the rule fails or its dims do not match the output's, fall back to `unknown_rule`."""
        scene = RuleContext(self.dims_of, arguments)
        try:
            found = rule(scene)
            if any(tuple(map(dim_size, dims)) != tuple(out.shape) for dims, out in zip(found, outs, strict=True)):
                raise DimMismatchError
            outputs = [self._register_output(out, dims) for out, dims in zip(outs, found, strict=True)]
        except DimMismatchError:
            scene = RuleContext(self.dims_of, arguments)
            outputs = [self._register_output(out, dims) for out, dims in zip(outs, unknown_rule(scene, input_tensors, {}, outs), strict=True)]
        source = self.current_call, self.function, _op_constants(name, arguments)
        self.trace.ops.append(
            TracedOp(name, self.frames[-1].module, inputs, outputs, scene.contracted_dims, scene.unsharded_dims, source, scene.window)
        )

    def _register_output(self, tensor: torch.Tensor, dims: TensorDims) -> int:
        known = self._ids.get(id(tensor))
        if known is None:
            return self._register(tensor, dims)
        for old, new in zip(self.trace.values[known].dims, dims, strict=True):  # in-place: the same tensor gets further constraints
            unify(old, new)
        return known

    def record_size_read(self, tensor: torch.Tensor, dims: Iterable[int]) -> None:
        """Record that the model's code read these sizes of a tensor."""
        value = self.value_index(tensor)
        self.trace.reads.update(SizeRead(value, dim, len(self.trace.ops)) for dim in dims)

    def on_saved_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        for frame in self.frames:
            frame.last_saved_op = len(self.trace.ops)
        return tensor

    # -- modules --

    def enter_module(self, module: str, kind: LayerKind, args: Any) -> None:
        self.frames.append(ModuleFrame(module, kind, [self.value_index(t) for t in _tensors(args)], len(self.trace.ops)))

    def leave_module(self, output: Any) -> None:
        frame = self.frames.pop()
        outputs = tuple(self.value_index(t) for t in _tensors(output))
        done = len(self.trace.ops)
        self.trace.modules.append(ModuleCall(frame.module, frame.kind, tuple(frame.inputs), outputs, frame.first_op, done, frame.last_saved_op))
        if not frame.module:
            self.trace.outputs = outputs

    # -- the result --

    def record_loss(self, loss: Any) -> None:
        self.trace.loss = tuple(self.value_index(t) if torch.is_tensor(t) else -1 for t in pytree.tree_leaves(loss))

    def build_dataflow(self, batch: Batch) -> Dataflow:
        book = self.trace
        numbers: dict[int, int] = {}
        sizes: list[int] = []

        def logical_dim_index(strand: LogicalDim) -> int:
            if id(strand) not in numbers:
                numbers[id(strand)] = len(sizes)
                sizes.append(strand.size)
            return numbers[id(strand)]

        def dim_indices(dim: Sequence[LogicalDim]) -> tuple[int, ...]:
            return tuple(logical_dim_index(s) for s in factors_of(dim))

        def unique_indices(strands: Sequence[LogicalDim]) -> tuple[int, ...]:
            return tuple(set(dim_indices(strands)))

        values = tuple(Value(v.shape, tuple(dim_indices(d) for d in v.dims), v.needs_grad, v.parameter, v.itemsize, v.floating) for v in book.values)
        operations = tuple(
            Operation(
                o.name,
                o.module,
                tuple(o.inputs),
                tuple(o.outputs),
                unique_indices(o.contracted_dims),
                unique_indices(o.unsharded_dims),
                *o.call_site,
                o.window,
            )
            for o in book.ops
        )
        fields = tuple(self._batch_fields(batch))
        reads = tuple(sorted(book.reads, key=lambda r: (r.before_operation, r.value, r.dim)))
        return Dataflow(
            _TRACED_BATCH, tuple(sizes), values, operations, tuple(book.modules), tuple(book.calls), book.outputs, fields, book.loss, reads
        )

    def _batch_fields(self, batch: Batch) -> Iterator[BatchTensor]:
        for leaf, (path, tensor) in enumerate(pytree.tree_leaves_with_path(batch)):
            if torch.is_tensor(tensor):
                yield BatchTensor(leaf, pytree.keystr(path).strip("[]'") or "batch", self._ids.get(id(tensor), -1))


class _SizedCallRecorder(TorchFunctionMode):
    """Records the calls in the model's code that contain sizes, and records attention as one operation."""

    def __init__(self, recorder: _DataflowRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        if func is F.scaled_dot_product_attention:
            return _record_attention(recorder, *args, **kwargs)
        name = getattr(func, "__name__", "")
        sized = sized_call(name, args, kwargs)
        before = recorder.current_call, recorder.opaque_name, recorder.function
        recorder.function = name
        if name == _OPAQUE_FUNCTION:
            recorder.opaque_name = "multi_head_attention" + " with need_weights=True" * bool(kwargs.get("need_weights", True))
        if sized is not None:
            recorder.trace.calls.append(SizedCallSite(recorder.frames[-1].module, name, sized.sizes, sized.dim, sized.dims))
            recorder.current_call = len(recorder.trace.calls) - 1
        else:
            recorder.current_call = -1
        try:
            out = func(*args, **kwargs)
        finally:
            recorder.current_call, recorder.opaque_name, recorder.function = before
        return record_size_reads(func, args, out, recorder.record_size_read)


def _record_attention(
    recorder: _DataflowRecorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Record attention as one operation with its own rule, whichever kernel would run it."""
    given = [t for t in (query, key, value, attn_mask) if t is not None]
    inputs = [recorder.value_index(t) for t in given]
    out = _ShapeOnlyAttention.apply(query, key, value)
    recorder.record_op("attention", inputs, [out], lambda scene: attention_rule(scene, query, key, value, attn_mask, out), given, {})
    return out  # type: ignore[no-any-return]


class _ShapeOnlyAttention(torch.autograd.Function):
    """A tensor of the right shape that depends on query, key and value."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError


def _op_constants(name: str, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Arguments of an operation that planners need beyond its operands."""
    if name == "slice":
        dim, start, size = arguments.get("dim", 0), arguments.get("start") or 0, arguments["self"].shape
        dim %= len(size)
        return dim, start + size[dim] if start < 0 else start, arguments.get("step", 1)
    if name == "arange":
        found = arguments.get("start", 0), arguments.get("step", 1)
        return found if all(isinstance(n, int) for n in found) else ()
    return (arguments["reduction"],) if isinstance(arguments.get("reduction"), int) else ()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if torch.is_tensor(t)]


def _layer_kind(module: nn.Module) -> LayerKind:
    """The layer's kind: linear and conv layers, whose partial results the runtime can complete across ranks, bias included; and embedding tables
    that may be on other ranks."""
    if isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf")):
        return "linear"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv"
    if isinstance(module, nn.EmbeddingBag):
        return "bag"
    return "embedding" if isinstance(module, nn.Embedding) else "other"


@contextmanager
def _module_hooks(model: nn.Module, recorder: _DataflowRecorder) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in model.named_modules():
            kind = _layer_kind(module)
            before = module.register_forward_pre_hook(lambda _m, a, k, n=name, kind=kind: recorder.enter_module(n, kind, (a, k)), with_kwargs=True)
            after = module.register_forward_hook(lambda _m, _a, output: recorder.leave_module(output))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield
