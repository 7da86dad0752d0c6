"""From an nn.Module to its dataflow: run its loss once on fake tensors and follow every strand (see [Note: strands])."""

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

from meshwright.core.calls import sized_call
from meshwright.core.collector import uncollected
from meshwright.core.errors import RequestError
from meshwright.core.strand import Call, Field, Flow, LayerKind, ModuleCall, Operation, Read, Value
from meshwright.core.task import Batch, Loss, Task
from meshwright.describe.attention import composed_attention
from meshwright.describe.book import Book, Frame, Noted, Op
from meshwright.describe.fakes import LOW, built, example, example_like, on_fakes, quiet, unpacked
from meshwright.describe.reads import watch_sizes
from meshwright.describe.rules import Dims, Scene, attention, find_rule, unknown
from meshwright.describe.strands import Strand, UntiedError, fresh, leaves, length, tie
from meshwright.describe.unroll import unrolled

_SAMPLES = 2
_OPAQUE = "multi_head_attention_forward"  # composed in Python of calls that a function mode does not see; here where it cannot be done plainly


@uncollected
def trace_flow(task: Task, precision: str = "fp32", *, fold: bool = True) -> Flow:
    """The dataflow of a task's model, without allocating it. `fold`: of equal blocks only two are traced, and the others copied."""
    model, mode = built(task)
    return _trace(model, task.loss, lambda: example(task, _SAMPLES, precision), mode, precision, fold)


def trace_module_flow(model: nn.Module, loss: Loss, batch: Batch, precision: str = "fp32", *, fold: bool = True) -> Flow:
    """The dataflow of a live model on the shapes of one of its batches. Neither is touched."""
    return _trace(model, loss, lambda: example_like(batch, _SAMPLES), FakeTensorMode(allow_non_fake_inputs=True), precision, fold)


def _trace(model: nn.Module, loss: Loss, make_batch: Callable[[], Batch], mode: FakeTensorMode, precision: str, fold: bool = True) -> Flow:
    with ExitStack() as stack:
        stack.enter_context(mode)
        fakes = stack.enter_context(on_fakes(model, precision))
        stack.enter_context(quiet())
        stack.enter_context(unpacked())
        stack.enter_context(torch.autocast("cpu", dtype=LOW[precision]) if precision in LOW else nullcontext())
        batch = make_batch()
        recorder = _Recorder(fakes)
        stack.enter_context(composed_attention(model))
        stack.enter_context(_watched(model, recorder))
        if fold:
            stack.enter_context(unrolled(model, recorder))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda t: t))
        stack.enter_context(recorder)
        stack.enter_context(_Calls(recorder))
        try:
            recorder.returned(loss(model, batch))
        except RequestError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise RequestError(f"model {type(model).__name__} could not be traced for tensor parallelism: {reason[0][:200]}") from error
        return recorder.flow(batch)


class _Recorder(TorchDispatchMode):
    """Sees every operation that reaches a kernel and applies its rule."""

    def __init__(self, fakes: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.book = Book()
        self._ids: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # alive, or their addresses would be used again
        self.frames: list[Frame] = [Frame("", "other", [], 0)]
        self.muted = False  # while the copy of a block makes what it gives
        self.call = -1
        self.opaque = ""  # the name of what is running, where its parts are not looked at
        self.function = ""
        for name, tensor in fakes.items():
            self.book.values[self.number(tensor)].parameter = name

    # -- tensors --

    def number(self, tensor: torch.Tensor) -> int:
        """Its place in the book; a tensor never seen before (an input, a constant) has dims of its own."""
        with torch._C.DisableTorchFunction():  # what we ask of it is not what the model's code asks
            found = self._ids.get(id(tensor))
            if found is None:
                found = self._note(tensor, [fresh(n) for n in tensor.shape])
            self.book.values[found].needs_grad |= tensor.requires_grad
            return found

    def _note(self, tensor: torch.Tensor, dims: Dims) -> int:
        self._kept.append(tensor)
        self.book.values.append(Noted(tuple(tensor.shape), dims, tensor.element_size(), tensor.is_floating_point()))
        self._ids[id(tensor)] = len(self.book.values) - 1
        return self._ids[id(tensor)]

    def adopt(self, tensor: torch.Tensor, value: int) -> None:
        """A tensor made for a value that is in the book already."""
        self._kept.append(tensor)
        self._ids[id(tensor)] = value

    def dims(self, tensor: torch.Tensor) -> Dims:
        return self.book.values[self.number(tensor)].dims

    # -- operations --

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.muted:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        inputs = [self.number(t) for t in given]
        out = func(*args, **kwargs)
        outs = _tensors(out)
        if not outs or func.namespace == "prim":
            return out
        rule = unknown if self.opaque else find_rule(func)
        name = self.opaque or func._overloadpacket.__name__
        names = [argument.name for argument in func._schema.arguments]
        named = {"reduction": 1} if "reduction" in names else {}  # losses are means unless they say otherwise
        named |= {**dict(zip(names, args, strict=False)), **kwargs}
        self.record(name, inputs, outs, lambda scene: rule(scene, args, kwargs, outs), given, named)
        return out

    def record(
        self, name: str, inputs: list[int], outs: Sequence[torch.Tensor], rule: Callable[[Scene], list[Dims]], given: Sequence[torch.Tensor],
        named: dict[str, Any],
    ) -> None:  # fmt: skip
        """One operation under its rule. A rule that fails, or whose dims are not the output's, is as good as none."""
        scene = Scene(self.dims, named)
        try:
            found = rule(scene)
            if any(tuple(map(length, dims)) != tuple(out.shape) for dims, out in zip(found, outs, strict=True)):
                raise UntiedError
            outputs = [self._made(out, dims) for out, dims in zip(outs, found, strict=True)]
        except UntiedError:
            scene = Scene(self.dims, named)
            outputs = [self._made(out, dims) for out, dims in zip(outs, unknown(scene, given, {}, outs), strict=True)]
        source = self.call, self.function, _numbers(name, named)
        self.book.ops.append(Op(name, self.frames[-1].module, inputs, outputs, scene.sums, scene.binds, source, scene.window))

    def _made(self, tensor: torch.Tensor, dims: Dims) -> int:
        known = self._ids.get(id(tensor))
        if known is None:
            return self._note(tensor, dims)
        for old, new in zip(self.book.values[known].dims, dims, strict=True):  # in place: the same tensor, of which more is known now
            tie(old, new)
        return known

    def read(self, tensor: torch.Tensor, dims: Iterable[int]) -> None:
        """The model's code looked at these of a tensor's sizes."""
        value = self.number(tensor)
        self.book.reads.update(Read(value, dim, len(self.book.ops)) for dim in dims)

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        for frame in self.frames:
            frame.kept = len(self.book.ops)
        return tensor

    # -- modules --

    def enter(self, module: str, kind: LayerKind, given: Any) -> None:
        self.frames.append(Frame(module, kind, [self.number(t) for t in _tensors(given)], len(self.book.ops)))

    def leave(self, output: Any) -> None:
        frame = self.frames.pop()
        outputs = tuple(self.number(t) for t in _tensors(output))
        done = len(self.book.ops)
        self.book.modules.append(ModuleCall(frame.module, frame.kind, tuple(frame.inputs), outputs, frame.first, done, frame.kept))
        if not frame.module:
            self.book.outputs = outputs

    # -- the result --

    def returned(self, loss: Any) -> None:
        self.book.loss = tuple(self.number(t) if torch.is_tensor(t) else -1 for t in pytree.tree_leaves(loss))

    def flow(self, batch: Batch) -> Flow:
        book = self.book
        numbers: dict[int, int] = {}
        sizes: list[int] = []

        def index(strand: Strand) -> int:
            if id(strand) not in numbers:
                numbers[id(strand)] = len(sizes)
                sizes.append(strand.size)
            return numbers[id(strand)]

        def flat(dim: Sequence[Strand]) -> tuple[int, ...]:
            return tuple(index(s) for s in leaves(dim))

        def several(strands: Sequence[Strand]) -> tuple[int, ...]:
            return tuple(set(flat(strands)))

        values = tuple(Value(v.shape, tuple(flat(d) for d in v.dims), v.needs_grad, v.parameter, v.itemsize, v.floating) for v in book.values)
        operations = tuple(
            Operation(o.name, o.module, tuple(o.inputs), tuple(o.outputs), several(o.sums), several(o.binds), *o.source, o.window) for o in book.ops
        )
        fields = tuple(self._fields(batch))
        reads = tuple(sorted(book.reads, key=lambda r: (r.at, r.value, r.dim)))
        return Flow(_SAMPLES, tuple(sizes), values, operations, tuple(book.modules), tuple(book.calls), book.outputs, fields, book.loss, reads)

    def _fields(self, batch: Batch) -> Iterator[Field]:
        for leaf, (path, tensor) in enumerate(pytree.tree_leaves_with_path(batch)):
            if torch.is_tensor(tensor):
                yield Field(leaf, pytree.keystr(path).strip("[]'") or "batch", self._ids.get(id(tensor), -1))


class _Calls(TorchFunctionMode):
    """Notes the calls in the model's code that hold sizes, and keeps attention in one piece."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        if func is F.scaled_dot_product_attention:
            return _attention(recorder, *args, **kwargs)
        name = getattr(func, "__name__", "")
        sized = sized_call(name, args, kwargs)
        before = recorder.call, recorder.opaque, recorder.function
        recorder.function = name
        if name == _OPAQUE:
            recorder.opaque = "multi_head_attention" + " with need_weights=True" * bool(kwargs.get("need_weights", True))
        if sized is not None:
            recorder.book.calls.append(Call(recorder.frames[-1].module, name, sized.sizes, sized.dim, sized.dims))
            recorder.call = len(recorder.book.calls) - 1
        else:
            recorder.call = -1
        try:
            out = func(*args, **kwargs)
        finally:
            recorder.call, recorder.opaque, recorder.function = before
        return watch_sizes(func, args, out, recorder.read)


def _attention(
    recorder: _Recorder, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """One operation with a rule of its own, whatever kernel would run it."""
    given = [t for t in (query, key, value, attn_mask) if t is not None]
    inputs = [recorder.number(t) for t in given]
    out = _Attended.apply(query, key, value)
    recorder.record("attention", inputs, [out], lambda scene: attention(scene, query, key, value, attn_mask, out), given, {})
    return out  # type: ignore[no-any-return]


class _Attended(torch.autograd.Function):
    """A tensor of the right shape that depends on query, key and value."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError


def _numbers(name: str, named: dict[str, Any]) -> tuple[int, ...]:
    """What planners ask about an operation beyond its operands."""
    if name == "slice":
        dim, start, size = named.get("dim", 0), named.get("start") or 0, named["self"].shape
        dim %= len(size)
        return dim, start + size[dim] if start < 0 else start, named.get("step", 1)
    if name == "arange":
        found = named.get("start", 0), named.get("step", 1)
        return found if all(isinstance(n, int) for n in found) else ()
    return (named["reduction"],) if isinstance(named.get("reduction"), int) else ()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if torch.is_tensor(t)]


def _kind(module: nn.Module) -> LayerKind:
    """Layers whose products the run knows how to complete over ranks, bias and all; and tables that it can look up elsewhere."""
    if isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf")):
        return "linear"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv"
    if isinstance(module, nn.EmbeddingBag):
        return "bag"
    return "embedding" if isinstance(module, nn.Embedding) else "other"


@contextmanager
def _watched(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in model.named_modules():
            kind = _kind(module)
            before = module.register_forward_pre_hook(lambda _m, a, k, n=name, kind=kind: recorder.enter(n, kind, (a, k)), with_kwargs=True)
            after = module.register_forward_hook(lambda _m, _a, output: recorder.leave(output))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield
