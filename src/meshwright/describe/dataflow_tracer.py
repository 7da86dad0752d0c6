"""From an nn.Module to its `Dataflow`: runs its loss once on fake tensors and follows every logical dim (see [Note: logical dims])."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.core.dataflow import BatchTensor, Dataflow, LayerKind, ModuleCall, Operation, SizedCallSite, SizeRead, Value
from meshwright.core.errors import RequestError
from meshwright.core.gc_control import gc_disabled
from meshwright.core.sized_calls import sized_call
from meshwright.core.task import Batch, Loss, Task
from meshwright.describe import fake_tensors
from meshwright.describe.attention_decompose import decomposed_attention
from meshwright.describe.block_copying import copy_repeated_blocks
from meshwright.describe.dim_unification import DimMismatchError, LogicalDim, dim_size, factors_of, new_dim, unify
from meshwright.describe.layers import layer_kind
from meshwright.describe.propagation_rules import RuleContext, TensorDims, attention_rule, find_rule, tensor_leaves, unknown_rule
from meshwright.describe.size_reads import record_size_reads
from meshwright.describe.trace_records import DataflowTrace, ModuleFrame, TracedOp, TracedTensor
from meshwright.describe.untraceable import UntraceableError

_TRACED_BATCH = 2
_NEGLIGIBLE = 1e-5  # a number that keeps a divisor from being zero
_SUM_REDUCTION = 2  # torch's number for it in the arguments of a loss
# Runs Python calls that a function mode does not see; reached only where the attention cannot be decomposed.
_OPAQUE_FUNCTION = "multi_head_attention_forward"


@gc_disabled
def trace_dataflow(task: Task, precision: str = "fp32", *, copy_repeated: bool = True) -> Dataflow:
    """The dataflow of a task's model, without allocating it. `copy_repeated`: of equal blocks only two are traced, and the others copied."""
    model, mode = fake_tensors.cached_fake_model(task)
    return _trace_loss(model, task.loss, lambda size: fake_tensors.example_batch(task, size, precision), mode, precision, copy_repeated)


def trace_module_dataflow(model: nn.Module, loss: Loss, batch: Batch, precision: str = "fp32", *, copy_repeated: bool = True) -> Dataflow:
    """The dataflow of a live model on the shapes of one of its batches. Neither is modified."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return _trace_loss(model, loss, lambda size: fake_tensors.example_batch_like(batch, size), mode, precision, copy_repeated)


def _trace_loss(
    model: nn.Module, loss: Loss, make_batch: Callable[[int], Batch], mode: FakeTensorMode, precision: str, copy_repeated: bool
) -> Dataflow:
    dataflow, numbers = _run_loss(model, loss, partial(make_batch, _TRACED_BATCH), mode, precision, copy_repeated)
    if not _may_scale_with_batch(dataflow, numbers):
        return dataflow
    _, others = _run_loss(model, loss, partial(make_batch, _TRACED_BATCH + 1), mode, precision, copy_repeated)
    return _with_batch_powers(dataflow, numbers, others)


def _run_loss(
    model: nn.Module, loss: Loss, make_batch: Callable[[], Batch], mode: FakeTensorMode, precision: str, copy_repeated: bool
) -> tuple[Dataflow, list[float | None]]:
    """The dataflow of one run, and the number that each operation multiplies or divides by."""
    autocast_dtype = fake_tensors.AUTOCAST_DTYPES.get(precision)
    with ExitStack() as stack:
        stack.enter_context(mode)
        fakes = stack.enter_context(fake_tensors.fake_parameters(model, precision))
        stack.enter_context(fake_tensors.silence_torch_logging())
        stack.enter_context(fake_tensors.assume_unpacked_sequences())
        stack.enter_context(torch.autocast("cpu", dtype=autocast_dtype) if autocast_dtype else nullcontext())
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
            raise UntraceableError(model, error) from error
        return recorder.build_dataflow(batch), [op.factor for op in recorder.trace.ops]


def _may_scale_with_batch(dataflow: Dataflow, numbers: list[float | None]) -> bool:
    """Whether it matters which numbers are the batch size: some sum has no dims left, or a mean is multiplied by a multiple of the batch size."""
    for op, number in zip(dataflow.operations, numbers, strict=True):
        is_sum = op.name == "sum" or (op.name.endswith(("loss", "loss_forward", "logits")) and op.int_args[:1] == (_SUM_REDUCTION,))
        is_multiple = number is not None and number >= _TRACED_BATCH and number % _TRACED_BATCH == 0
        if (is_sum or is_multiple) and not dataflow.values[op.outputs[0]].shape:
            return True
    return False


def _with_batch_powers(dataflow: Dataflow, numbers: list[float | None], others: list[float | None]) -> Dataflow:
    """The dataflow with the power of the batch size in every factor: `others` are the factors at a batch of one sample more."""
    if len(numbers) != len(others):
        return dataflow

    def with_power(op: Operation, number: float | None, other: float | None) -> Operation:
        if number == other or not number or not other:
            return op
        power = round(math.log(abs(other / number)) / math.log((_TRACED_BATCH + 1) / _TRACED_BATCH))
        return replace(op, int_args=(power,))

    return replace(dataflow, operations=tuple(map(with_power, dataflow.operations, numbers, others)))


class _DataflowRecorder(TorchDispatchMode):
    """Records every operation that reaches a kernel, and applies its propagation rule."""

    def __init__(self, fakes: dict[str, Tensor]) -> None:
        super().__init__()
        self.trace = DataflowTrace()
        self._ids: dict[int, int] = {}
        self._kept_alive: list[Tensor] = []  # keeps ids unique: a freed tensor's id would be reused
        self.frames: list[ModuleFrame] = [ModuleFrame("", "other", [], 0)]
        self.paused = False  # while a copied block allocates its outputs
        self.current_call = -1
        self._absent = -1
        self.opaque_name = ""  # name of the running function whose inner operations have no rules
        self.function = ""
        for name, tensor in fakes.items():
            self.trace.values[self.value_index(tensor)].parameter = name

    # -- tensors --

    def value_index(self, tensor: Tensor) -> int:
        """The tensor's index in the trace; a tensor not seen before (an input, a constant) gets new dims."""
        with torch._C.DisableTorchFunction():  # these reads are not the model's own size reads
            index = self._ids.get(id(tensor))
            if index is None:
                index = self._register(tensor, [new_dim(n) for n in tensor.shape])
            self.trace.values[index].needs_grad |= tensor.requires_grad
            return index

    def _register(self, tensor: Tensor, dims: TensorDims) -> int:
        self.bind_value(tensor, len(self.trace.values))
        self.trace.values.append(TracedTensor(tuple(tensor.shape), dims, tensor.element_size(), tensor.is_floating_point()))
        return self._ids[id(tensor)]

    def _absent_value(self) -> int:
        """The value that stands for every None among a module's inputs. No operation uses it."""
        if self._absent < 0:
            self._absent = len(self.trace.values)
            self.trace.values.append(TracedTensor((), []))
        return self._absent

    def bind_value(self, tensor: Tensor, value: int) -> None:
        """Let a new tensor stand for this value of the trace."""
        self._kept_alive.append(tensor)
        self._ids[id(tensor)] = value

    def dims_of(self, tensor: Tensor) -> TensorDims:
        return self.trace.values[self.value_index(tensor)].dims

    # -- operations --

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        operands = tensor_leaves((args, kwargs))
        inputs = [self.value_index(t) for t in operands]
        out = func(*args, **kwargs)
        outs = tensor_leaves(out)
        if not outs or func.namespace == "prim":
            return out
        rule = unknown_rule if self.opaque_name else find_rule(func)
        name = self.opaque_name or func._overloadpacket.__name__
        names = [argument.name for argument in func._schema.arguments]
        arguments = {"reduction": 1} if "reduction" in names else {}  # losses default to the mean
        arguments |= {**dict(zip(names, args, strict=False)), **kwargs}
        self.record_op(name, operands, inputs, outs, arguments, lambda context: rule(context, args, kwargs, outs))
        return out

    def record_op(
        self, name: str, operands: list[Tensor], inputs: list[int], outs: list[Tensor], arguments: dict[str, Any],
        rule: Callable[[RuleContext], list[TensorDims]],
    ) -> None:  # fmt: skip
        """Record one operation under its rule. If the rule fails or its dims do not match the output's, fall back to `unknown_rule`."""
        context = RuleContext(self.dims_of, arguments)
        try:
            dims = rule(context)
            if any(tuple(map(dim_size, d)) != tuple(out.shape) for d, out in zip(dims, outs, strict=True)):
                raise DimMismatchError
            outputs = list(map(self._register_output, outs, dims))
        except DimMismatchError:
            context = RuleContext(self.dims_of, arguments)
            outputs = list(map(self._register_output, outs, unknown_rule(context, operands, {}, outs)))
        call_site = self.current_call, self.function, _op_constants(name, arguments)
        stated = context.contracted_dims, context.unsharded_dims, call_site, context.window, _factor(name, arguments)
        self.trace.ops.append(TracedOp(name, self.frames[-1].module, inputs, outputs, *stated))

    def _register_output(self, tensor: Tensor, dims: TensorDims) -> int:
        index = self._ids.get(id(tensor))
        if index is None or self.trace.values[index].shape != tuple(tensor.shape):  # a tensor may change its own shape (squeeze_)
            return self._register(tensor, dims)
        for old, new in zip(self.trace.values[index].dims, dims, strict=True):  # in-place: the same tensor gets further constraints
            unify(old, new)
        return index

    def record_size_read(self, tensor: Tensor, dims: Iterable[int]) -> None:
        """Record that the model's code read these sizes of a tensor."""
        value = self.value_index(tensor)
        self.trace.reads.update(SizeRead(value, dim, len(self.trace.ops), self.frames[-1].module) for dim in dims)

    def on_saved_tensor(self, tensor: Tensor) -> Tensor:
        for frame in self.frames:
            frame.last_saved_op = len(self.trace.ops)
        return tensor

    # -- modules --

    def enter_module(self, module: str, kind: LayerKind, args: Any) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(args) if leaf is None or torch.is_tensor(leaf)]
        inputs = [self._absent_value() if leaf is None else self.value_index(leaf) for leaf in leaves]
        self.frames.append(ModuleFrame(module, kind, inputs, len(self.trace.ops)))

    def leave_module(self, output: Any) -> None:
        frame = self.frames.pop()
        outputs = tuple(self.value_index(t) for t in tensor_leaves(output))
        end_op = len(self.trace.ops)
        self.trace.modules.append(ModuleCall(frame.module, frame.kind, tuple(frame.inputs), outputs, frame.first_op, end_op, frame.last_saved_op))
        if not frame.module:
            self.trace.outputs = outputs

    # -- the result --

    def record_loss(self, loss: Any) -> None:
        self.trace.loss = tuple(self.value_index(t) if torch.is_tensor(t) else -1 for t in pytree.tree_leaves(loss))

    def build_dataflow(self, batch: Batch) -> Dataflow:
        trace = self.trace
        indices: dict[LogicalDim, int] = {}  # of all logical dims, in the order of their first use

        def indices_of(dim: Sequence[LogicalDim]) -> tuple[int, ...]:
            return tuple(indices.setdefault(s, len(indices)) for s in factors_of(dim))

        def build_operation(op: TracedOp) -> Operation:
            contracted, unsharded = (tuple(set(indices_of(dims))) for dims in (op.contracted_dims, op.unsharded_dims))
            return Operation(op.name, op.module, tuple(op.inputs), tuple(op.outputs), contracted, unsharded, *op.call_site, op.window)

        values = tuple(Value(v.shape, tuple(map(indices_of, v.dims)), v.needs_grad, v.parameter, v.itemsize, v.floating) for v in trace.values)
        operations = tuple(map(build_operation, trace.ops))
        sizes = tuple(s.size for s in indices)
        fields = tuple(self._batch_fields(batch))
        reads = tuple(sorted(trace.reads, key=lambda r: (r.before_operation, r.value, r.dim, r.module)))
        modules, calls = tuple(trace.modules), tuple(trace.calls)
        return Dataflow(_TRACED_BATCH, sizes, values, operations, modules, calls, trace.outputs, fields, trace.loss, reads)

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
        outer = recorder.current_call, recorder.opaque_name, recorder.function
        recorder.current_call, recorder.function = -1, name
        if name == _OPAQUE_FUNCTION:
            recorder.opaque_name = "multi_head_attention" + " with need_weights=True" * bool(kwargs.get("need_weights", True))
        if sized is not None:
            recorder.current_call = len(recorder.trace.calls)
            recorder.trace.calls.append(SizedCallSite(recorder.frames[-1].module, name, sized.sizes, sized.dim, sized.dims))
        try:
            out = func(*args, **kwargs)
        finally:
            recorder.current_call, recorder.opaque_name, recorder.function = outer
        return record_size_reads(func, args, out, recorder.record_size_read)


def _record_attention(recorder: _DataflowRecorder, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **__: Any) -> Tensor:
    """Record attention as one operation with its own rule, whichever kernel would run it. Parameters are named as torch names them."""
    operands = [t for t in (query, key, value, attn_mask) if t is not None]
    inputs = [recorder.value_index(t) for t in operands]
    out = _ShapeOnlyAttention.apply(query, key, value)
    recorder.record_op("attention", operands, inputs, [out], {}, lambda context: attention_rule(context, query, key, value, attn_mask))
    return out  # type: ignore[no-any-return]


class _ShapeOnlyAttention(torch.autograd.Function):
    """A tensor of the right shape that depends on query, key and value."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


def _op_constants(name: str, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Arguments of an operation that planners need beyond its operands."""
    if name == "slice":
        dim, start, size = arguments.get("dim", 0), arguments.get("start") or 0, arguments["self"].shape
        dim %= len(size)
        return dim, start + size[dim] if start < 0 else start, arguments.get("step", 1)
    if name == "arange":
        constants = arguments.get("start", 0), arguments.get("step", 1)
        return constants if all(isinstance(n, int) for n in constants) else ()
    if name == "convolution":
        return (arguments["groups"],)
    if "batch_norm" in name:
        return (int(bool(arguments.get("training", arguments.get("train", name.endswith("with_update"))))),)
    if name.rstrip("_") in ("add", "sub") and isinstance(number := arguments.get("other"), (int, float)):
        return (int(abs(number) > _NEGLIGIBLE),)
    if not isinstance(arguments.get("reduction"), int):
        return ()
    return (arguments["reduction"], *([arguments.get("ignore_index", -100)] if name.startswith("nll_loss") else []))


def _factor(name: str, arguments: dict[str, Any]) -> float | None:
    """The number that an operation multiplies by; None if there is none."""
    number = arguments.get("other")
    if name.rstrip("_") not in ("mul", "div") or isinstance(number, bool) or not isinstance(number, (int, float)) or not number:
        return None
    return float(number) if name.startswith("mul") else 1.0 / number


@contextmanager
def _module_hooks(model: nn.Module, recorder: _DataflowRecorder) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in model.named_modules():
            kind = layer_kind(module)
            enter = module.register_forward_pre_hook(lambda _m, a, k, n=name, kind=kind: recorder.enter_module(n, kind, (a, k)), with_kwargs=True)
            stack.enter_context(enter)
            stack.enter_context(module.register_forward_hook(lambda _m, _a, output: recorder.leave_module(output)))
        yield
