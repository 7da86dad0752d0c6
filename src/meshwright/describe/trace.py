"""From an nn.Module to a ModelProfile: run its loss once on fake tensors, which have shapes and no memory, and write down every operation.

[Note: attributing backward]
A forward operation belongs to the layer whose forward is running. Autograd numbers the nodes it creates, so each layer owns the
numbers handed out while it ran; a backward operation belongs to the layer that owns the node being executed.
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
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from meshwright.core.collector import uncollected
from meshwright.core.errors import RequestError
from meshwright.core.model import KernelKind, ModelProfile, Phase
from meshwright.core.task import Batch, Loss, Task
from meshwright.describe.casts import CudaCasts
from meshwright.describe.convolutions import Scratch, convolution_scratch
from meshwright.describe.fakes import LOW, built, example, example_like, on_fakes, quiet
from meshwright.describe.fold import folded
from meshwright.describe.fused import Fused
from meshwright.describe.layers import Layer, find_layers, tied_names
from meshwright.describe.lifetimes import Lifetimes
from meshwright.describe.operations import flops_of, is_free, kind_of
from meshwright.describe.tally import PROBED_BATCHES, Tally, buffers_of, layer_profiles, padded

# These read only the rows or elements that they pick, not the whole table.
_GATHERS = {torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.gather, torch.ops.aten.index, torch.ops.aten.nll_loss_forward}


@uncollected
def trace_task(task: Task, *, precision: str = "fp32", attention: str = "flash", device: str = "cpu") -> ModelProfile:
    """Profile a task's model without allocating it, as it would run on a kind of `device`."""
    model, mode = built(task)
    profile = _trace(model, task.loss, lambda batch: example(task, batch, precision), mode, task.name, precision, attention, device)
    return replace(profile, tokens_per_sample=task.tokens_per_sample)


@uncollected
def trace_module(
    model: nn.Module, loss: Loss, batch: Batch, *, name: str, precision: str = "fp32", attention: str = "flash", device: str = "cpu"
) -> ModelProfile:
    """Profile a live model on the shapes of one of its batches. Neither is touched."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return _trace(model, loss, lambda size: example_like(batch, size), mode, name, precision, attention, device)


def parameters_only(model: nn.Module, name: str) -> ModelProfile:
    """A profile of a live model whose loss is not known yet: parameters are exact, everything else is zero."""
    layers = layer_profiles(model, find_layers(model), {}, {})
    return ModelProfile(name, layers, 1, layers, attention="unknown", buffers=buffers_of(model))


def _trace(
    model: nn.Module, loss: Loss, example: Callable[[int], Batch], mode: FakeTensorMode, name: str, precision: str, attention: str, device: str
) -> ModelProfile:
    layers = find_layers(model)
    runs = [_run(model, layers, loss, example, batch, mode, precision, attention, device) for batch in PROBED_BATCHES]
    first, second = (padded(run, layers) for run, _ in runs)
    doubled = precision == "fp64"
    low = layer_profiles(model, layers, first, second, doubled=doubled)
    slopes = layer_profiles(model, layers, first, second, slope=True, doubled=doubled)
    return ModelProfile(
        name,
        low,
        PROBED_BATCHES[0],
        slopes,
        precision,
        attention,
        None,
        tied_names(model),
        runs[0][1],
        buffers_of(model, doubled),
        _sample_bytes(example, mode),
    )


def _run(
    model: nn.Module, layers: list[Layer], loss: Loss, example: Callable[[int], Batch], batch: int,
    mode: FakeTensorMode, precision: str, attention: str, device: str,
) -> tuple[dict[str, Tally], bool]:  # fmt: skip
    """One forward and backward on fakes; what each layer did, and whether the loss came with a count."""
    with ExitStack() as stack:
        stack.enter_context(mode)
        fakes = stack.enter_context(on_fakes(model, precision))
        inputs = example(batch)
        recorder = _Recorder([*fakes.values(), *(t for t in pytree.tree_leaves(inputs) if torch.is_tensor(t))], device)
        stack.enter_context(_watched(layers, recorder))
        stack.enter_context(_collected(fakes.values(), recorder.lifetimes))
        stands_for: dict[str, str] = {}
        stack.enter_context(folded(layers, stands_for, recorder.alike))
        stack.enter_context(quiet())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda t: t))
        stack.enter_context(recorder)
        stack.enter_context(_flash_everywhere(recorder) if attention == "flash" else sdpa_kernel(SDPBackend.MATH))
        try:
            with ExitStack() as casts:
                if precision in LOW:
                    casts.enter_context(torch.autocast("cpu", dtype=LOW[precision]))
                    casts.enter_context(CudaCasts() if device == "cuda" else nullcontext())
                value = loss(model, inputs)
            recorder.counted_loss = isinstance(value, tuple)
            total = value[0] if isinstance(value, tuple) else value
            recorder.phase = "backward"
            total.backward()
        except RequestError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise RequestError(f"model {type(model).__name__} could not be traced on a batch of {batch}: {reason[0][:200]}") from error
    for name, size in recorder.fused.remade().items():
        recorder.tallies[name].remade = float(size)
    for name, speaker in stands_for.items():
        recorder.tallies[name] = recorder.tallies[speaker]
    return recorder.tallies, recorder.counted_loss


class _Recorder(TorchDispatchMode):
    """Sees every operation that reaches a kernel, and files it under the layer it belongs to."""

    def __init__(self, constants: Any, device: str) -> None:
        super().__init__()
        self.device = device
        self.phase: Phase = "forward"
        self.counted_loss = False
        self.tallies: dict[str, Tally] = {"": Tally()}
        self.stack: list[str] = [""]
        self.modules: list[str] = []  # at work, of those with parameters of their own
        self._starts: list[int] = [0]  # first autograd number of each run of nodes …
        self._owners: list[str] = [""]  # … and the layer that owns it …
        self._holders: list[str] = [""]  # … and the one whose activations it works on (see `_settle_loose`)
        self._constants = {t.untyped_storage()._cdata for t in constants}
        self._seen = set(self._constants)
        self._pointwise: set[int] = set()  # storages that element-wise work wrote
        self._dear: set[int] = set()  # storages that products, convolutions and attention gave in forward
        self._left = ""  # the layer that was left last
        self._loose: list[tuple[int, int, int]] = []  # what was saved since outside of all layers: storage, bytes, of these fusible
        self._since = 0  # and how many operations outside of all layers there had been
        self.lifetimes, self.fused = Lifetimes(self._forget), Fused(self._constants)

    def enter(self, name: str) -> None:
        self.stack.append(name)
        self.tallies.setdefault(name, Tally())
        self._settle_loose()
        self._mark()

    def leave(self, output: Any) -> None:
        self._left = self.stack.pop()
        self.tallies[self._left].output += sum(_bytes(t) for t in pytree.tree_leaves(output) if torch.is_tensor(t))
        self._since = len(self.tallies[""].beside)
        self._mark()

    def begin(self, name: str, *_: object) -> None:
        self.modules.append(name)

    def end(self, *_: object) -> None:
        self.modules.pop()

    def _settle_loose(self) -> None:
        """What the model's own code saved between two layers counts for the one before: there it is cut, and there backward is done with it.
        What comes after the last, such as the loss, stays by itself."""
        own, then = self.tallies[""], self.tallies[self._left]
        if own is not then:
            then.beside += [there + then.saved for there in own.beside[self._since :]]
            del own.beside[self._since :]
            for storage, size, fusible in self._loose:
                own.saved, own.fusible = own.saved - size, own.fusible - fusible
                then.saved, then.fusible = then.saved + size, then.fusible + fusible
                self.lifetimes.handed_on(storage, self._left)
                self.fused.handed_on(storage, self._left)
            self._holders[-1] = self._left
        self._loose = []

    def _mark(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self.stack[-1])
        self._holders.append(self.stack[-1])

    def _forget(self, storage: int) -> None:
        for known in (self._seen, self._pointwise, self._dear):
            known.discard(storage)
        self.fused.forget(storage)

    def _layer(self, owners: list[str] | None = None) -> str:
        """The layer at work."""
        owners = owners or self._owners
        if self.phase == "forward":
            return self.stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        at = bisect_right(self._starts, node._sequence_nr()) - 1
        return owners[min(at, len(owners) - 1)]

    def alike(self, known: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """What to do with tensors that stand for what a folded block would have made, which is like `known`."""
        pointwise = known.untyped_storage()._cdata in self._pointwise

        def mark(made: torch.Tensor) -> None:
            if pointwise:
                self.lifetimes.born(made.untyped_storage())
                self._pointwise.add(made.untyped_storage()._cdata)

        return mark

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            layer = self._layer()
            self.lifetimes.saved(storage, layer)
            self.fused.saved(storage, layer)
            self._seen.add(storage._cdata)
            fusible = storage.nbytes() if storage._cdata in self._pointwise else 0
            self.tallies[layer].saved += storage.nbytes()
            self.tallies[layer].fusible += fusible
            if self.modules:
                self.tallies[layer].saved_by[self.modules[-1]] += storage.nbytes()
            if not layer and self.phase == "forward":
                self._loose.append((storage._cdata, storage.nbytes(), fusible))
        return tensor

    def record(self, kind: KernelKind, flops: float, moved: float, tensors: Iterable[torch.Tensor] = (), scratch: Scratch = (0.0, 0.0)) -> None:
        """One call. What it needs beyond parameters and saved activations is its workspace, and so is what its library takes meanwhile."""
        layer = self._layer()
        tally = self.tallies[layer]
        tally.kernels.append((kind, self.phase, flops, moved))
        holder = self._layer(self._holders)
        held = self.tallies[holder]
        if scratch[1]:
            held.lone[len(held.beside)] = scratch[1]
        held.beside.append(float(self.lifetimes.beside(holder)) + scratch[0])
        if kind not in ("memory", "special"):
            fresh = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors) if s._cdata not in self._seen}
            tally.hard = max(tally.hard, float(sum(fresh.values())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        storages = [t.untyped_storage() for t in pytree.tree_leaves(out) if torch.is_tensor(t) and t.layout is torch.strided]
        for storage in storages:
            if storage._cdata not in self._constants:
                self.lifetimes.born(storage)
        if not is_free(func):
            tensors = [t for t in pytree.tree_leaves((args, kwargs, out)) if torch.is_tensor(t) and t.layout is torch.strided]
            flops = flops_of(func, args, kwargs, out)
            kind = kind_of(str(func._overloadpacket), flops, max((t.dim() for t in tensors), default=0))
            if kind == "special":
                flops = float(max(t.numel() for t in tensors))
            read = pytree.tree_leaves(out) if func._overloadpacket in _GATHERS else tensors
            scratch = (0.0, 0.0)
            if kind.startswith("conv"):
                read = _samples(func, args, tensors)
                scratch = convolution_scratch(func, args, out) if self.device == "cpu" else scratch
            self.record(kind, flops, float(sum({id(t): _bytes(t) for t in read if torch.is_tensor(t)}.values())), tensors, scratch)
            inputs = [t.untyped_storage() for t in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t) and t.layout is torch.strided]
            soft = kind in ("memory", "special")
            if self.phase == "forward":
                self.fused.made(storages, inputs, self._layer(), soft and torch.Tag.nondeterministic_seeded not in func.tags)
            elif not soft:
                self.fused.read(inputs)
            made = {s._cdata for s in storages}
            self._pointwise = self._pointwise | made if soft else self._pointwise - made
            if func._schema.is_mutable and self._dear & made:
                self.tallies[self._layer()].overwrites = True
            elif not soft:
                self.give(storages)
        return out

    def give(self, storages: Iterable[Any]) -> None:
        """A product's results: what selective recomputation would keep."""
        if self.phase == "forward":
            fresh = {s._cdata: s.nbytes() for s in storages if s._cdata not in self._dear}
            self._dear.update(fresh)
            self.tallies[self._layer()].dear += sum(fresh.values())


def _samples(func: Any, args: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a convolution reads and writes sample by sample: not the weight, which stays in the cache, nor its gradient."""
    weight = args[2 if "backward" in func.name() else 1]
    return [t for t in tensors if t.dim() > 1 and t.shape != weight.shape]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _FlashAttention(TorchFunctionMode):
    """Costs scaled_dot_product_attention as the kernel that never holds the S² scores, which is what a device will run."""

    def __init__(self, recorder: _Recorder, watched: Any) -> None:
        super().__init__()
        self.recorder, self.watched = recorder, watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not self.watched:
            return func(*args, **kwargs)
        return _flash(self.recorder, *args, **kwargs)


def _flash(
    recorder: _Recorder, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, **_: Any,
) -> Any:  # fmt: skip
    return _FlashCost.apply(query, key, value, recorder, is_causal)


class _FlashCost(torch.autograd.Function):
    """Saves what a flash kernel saves (q, k, v, output, log-sum-exp) and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recorder: _Recorder, causal: bool) -> torch.Tensor:
        # Kernels lay their output out as the query is, so that merging heads afterwards copies nothing.
        out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.recorder, ctx.kind = recorder, "causal" if causal else "attention"
        recorder.give(t.untyped_storage() for t in (out, sums))
        recorder.fused.made([t.untyped_storage() for t in (out, sums)], (), recorder._layer(), again=False)
        recorder.record(ctx.kind, float(sdpa_flop_count(*_heads(q, k, v))), float(sum(map(_bytes, (q, k, v, out, sums)))))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        ctx.recorder.fused.read(t.untyped_storage() for t in (q, k, v, out, sums))
        flops = sdpa_backward_flop_count(_four(tuple(out.shape)), *_heads(q, k, v))
        ctx.recorder.record(ctx.kind, float(flops), 2.0 * sum(map(_bytes, (q, k, v, out))))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes with key and value heads repeated to the query's: older counters know no grouped heads."""
    return _four(tuple(q.shape)), _four((*q.shape[:-2], *k.shape[-2:])), _four((*q.shape[:-2], *v.shape[-2:]))


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Batch, heads, positions, width: what the counters want. Attention may have fewer or more leading dimensions."""
    lead = shape[:-2]
    return (math.prod(lead[:-1]), lead[-1], *shape[-2:]) if lead else (1, 1, *shape[-2:])


@contextmanager
def _flash_everywhere(recorder: _Recorder) -> Iterator[None]:
    """A function mode is off inside the functions that it sees, so torch's own modules are given the stand-in by name."""

    theirs = F.scaled_dot_product_attention
    with _FlashAttention(recorder, theirs):
        F.scaled_dot_product_attention = partial(_flash, recorder)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = theirs


@contextmanager
def _watched(layers: list[Layer], recorder: _Recorder) -> Iterator[None]:
    """Tell the recorder when each layer's forward begins and ends, and that of each module in it with parameters of its own."""
    with ExitStack() as stack:
        for layer in layers:
            for name, module in [] if layer.owner else layer.module.named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    begins = module.register_forward_pre_hook(partial(recorder.begin, name))
                    ends = module.register_forward_hook(recorder.end)
                    stack.callback(begins.remove)
                    stack.callback(ends.remove)
            if not layer.owner:
                before = layer.module.register_forward_pre_hook(lambda *_, name=layer.name: recorder.enter(name))
                after = layer.module.register_forward_hook(lambda _m, _a, output: recorder.leave(output))
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield


@contextmanager
def _collected(fakes: Iterable[torch.Tensor], lifetimes: Lifetimes) -> Iterator[None]:
    """A gradient that is complete is its parameter's: nothing of a step's workspace."""

    def done(param: torch.Tensor) -> None:
        assert param.grad is not None
        if param.grad.layout is torch.strided:
            lifetimes.handed_over(param.grad.untyped_storage())

    hooks = [t.register_post_accumulate_grad_hook(done) for t in fakes if t.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _sample_bytes(example: Callable[[int], Batch], mode: FakeTensorMode) -> float:
    with mode:
        few, more = (sum(_bytes(t) for t in pytree.tree_leaves(example(n)) if torch.is_tensor(t)) for n in PROBED_BATCHES)
    return float(more - few)
