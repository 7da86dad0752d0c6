"""torch's own functions that read gradients (`clip_grad_norm_`, `clip_grad_value_`, `GradScaler`) on models whose gradients are split over ranks.

[Note: what is replaced in torch]
Under ZeRO a parameter has no `.grad`, because the optimizer steps flat shards; under tensor and expert parallelism a rank's `.grad` is a part of the
whole. torch's functions would find no gradients, or the norm of a part, and say nothing. The functions are decorated, and the decorator's closure
holds the function that runs. That one is replaced, once and not before a plan needs it, so that a script may have imported the name at any time.
The replacement calls torch's own function unless a parameter belongs to such a plan. `GradScaler` is told by one method whether gradients are
finite; ranks must agree about it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.core.errors import RequestError
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.flat_buffer import norm_parts
from meshwright.schedule.buckets import ParamReplication, Slot

_owners = WeakIdKeyDictionary()  # a weak reference to the ShardedGradients of a model, by the parameters that a script may hold
_KEPT_BY_OPTIMIZER = "_meshwright_sharded_gradients"
_is_replaced = False
_calls_torch = False  # while torch's own function runs, which calls the others


class ShardedGradients:
    """The gradients of a model of which this rank holds parts."""

    def __init__(self, applied: AppliedPlan, originals: dict[str, weakref.ref[nn.Parameter]]) -> None:
        """`originals` are the parameters by name as they were before the plan was applied, which may have replaced them."""
        self.applied = applied
        params = dict(applied.model.named_parameters())
        # A parameter that a script may hold → those of the model that it stands for: itself, its replacement, or those in a flat shard.
        self._model_params = WeakIdKeyDictionary({p: (p,) for p in params.values()})
        for name, ref in originals.items():
            if (original := ref()) is not None and name in params:
                self._model_params[original] = (params[name],)
        for bucket in applied.gradient_sync.buckets if applied.gradient_sync is not None else ():
            for shard in bucket.optimizer_shards:
                self._model_params[shard.param] = tuple(bucket.params[i] for i in shard.slots)
        if applied.optimizer_offload is not None:
            for param in applied.optimizer_offload.device_parameters:
                self._model_params[applied.optimizer_offload.host_copy(param)] = self._model_params.get(param, (param,))
        for param in self._model_params:
            _owners[param] = weakref.ref(self)
        setattr(applied.optimizer, _KEPT_BY_OPTIMIZER, self)

    def pieces(self, params: Iterable[nn.Parameter]) -> list[tuple[Tensor, int]]:
        """This rank's gradients of `params`, final, each with the number of ranks along tp and ep that hold the same."""
        if self.applied.gradient_sync is not None:
            self.applied.gradient_sync.finish()
        wanted = {id(p): p for param in params for p in self._model_params[param]}
        if self.applied.gradient_sync is not None and self.applied.plan.memory.zero:
            return list(self._shard_pieces(wanted))
        replication = self.applied.replication()
        return [(p.grad, replication.get(id(p), ParamReplication()).copies) for p in wanted.values() if p.grad is not None]

    def _shard_pieces(self, wanted: dict[int, nn.Parameter]) -> Iterator[tuple[Tensor, int]]:
        """The parts of flat shards' gradients that are of wanted parameters. Padding is left out: nobody would clear a NaN in it."""
        assert self.applied.gradient_sync is not None
        for bucket in self.applied.gradient_sync.buckets:
            for shard in bucket.optimizer_shards:
                if (grad := shard.param.grad) is not None:
                    start = bucket.slices.start + shard.start
                    for low, high in _runs(bucket.layout.slots[i] for i in shard.slots if id(bucket.params[i]) in wanted):
                        low, high = (min(max(x - start, 0), grad.numel()) for x in (low, high))
                        yield grad[low:high], bucket.layout.replication.copies

    def reduce_norm(self, pieces: Sequence[tuple[Tensor, int]], norm_type: float) -> Tensor:
        """The norm over all ranks, to the power of its type where that is finite."""
        applied, is_max = self.applied, math.isinf(norm_type)
        total = _power_sum(pieces, norm_type, applied.plan.device)
        axes = ["tp", "ep", *(["shard"] if applied.plan.memory.zero else [])]
        for axis in axes:
            applied.groups.get(axis).sync.all_reduce(total, f"norm/{axis}", "max" if is_max else "sum").wait()
        return total


def follow_sharded_gradients(applied: AppliedPlan, originals: dict[str, weakref.ref[nn.Parameter]]) -> None:
    """Make torch's functions right for this model, if its gradients are split over ranks or its optimizer is on the host."""
    sharded, mesh = applied.plan.memory.zero and applied.gradient_sync is not None, applied.plan.mesh
    if mesh.pp > 1 or (not sharded and mesh.degree("tp") == mesh.ep == 1 and applied.optimizer_offload is None):
        return
    ShardedGradients(applied, originals)
    _replace_functions()
    if sharded or applied.optimizer_offload is not None:
        _zero_shards_too(applied)


def _zero_shards_too(applied: AppliedPlan) -> None:
    """Make `model.zero_grad` clear the gradients that the optimizer steps, which are not those of the model's own parameters."""
    model, optimizer = applied.model, applied.optimizer
    zero_own = model.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        zero_own(set_to_none)
        optimizer.zero_grad(set_to_none)

    model.zero_grad = zero_grad  # type: ignore[method-assign]


def _runs(slots: Iterable[Slot]) -> list[tuple[int, int]]:
    """(start, end) of the stretches of a flat buffer that these slots fill."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        start = runs.pop()[0] if runs and runs[-1][1] == slot.offset else slot.offset
        runs.append((start, slot.offset + slot.numel))
    return runs


# -- torch's functions --


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of parameters of which some belong to sharded models."""
    pieces = list(_pieces_by_owner(parameters))
    norm_type = float(norm_type)
    parts = [owner.reduce_norm(of, norm_type) if owner is not None else _power_sum(of, norm_type) for owner, of in pieces]
    stacked = torch.stack([part.to(parts[0]) for part in parts])
    norm = stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped.")
    _scale([grad for _, of in pieces for grad, _ in of], max_norm, norm)
    return norm


@torch.no_grad()
def clip_grads_with_norm_(parameters: Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
    """`torch.nn.utils.clip_grads_with_norm_`, likewise."""
    _scale([grad for _, of in _pieces_by_owner(parameters) for grad, _ in of], max_norm, total_norm)


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """`torch.nn.utils.clip_grad_value_`, likewise."""
    for _, of in _pieces_by_owner(parameters):
        for grad, _ in of:
            grad.clamp_(-clip_value, clip_value)


def _pieces_by_owner(parameters: Iterable[Tensor]) -> Iterator[tuple[ShardedGradients | None, list[tuple[Tensor, int]]]]:
    """Gradients by the model that they belong to; None stands for everything that is not sharded."""
    by_owner: dict[ShardedGradients | None, list[Any]] = {}
    for param in parameters:
        by_owner.setdefault(_owner(param), []).append(param)
    for owner, params in by_owner.items():
        yield owner, owner.pieces(params) if owner is not None else [(p.grad, 1) for p in params if p.grad is not None]


def _owner(param: Tensor) -> ShardedGradients | None:
    reference = _owners.get(param)
    return reference() if reference is not None else None


def _power_sum(pieces: Sequence[tuple[Tensor, int]], norm_type: float, device: str | torch.device = "cpu") -> Tensor:
    """The sum of absolute values to the power of `norm_type`, of which a gradient with n copies counts 1/n; the largest value for infinity."""
    parts = [(part, copies) for grad, copies in pieces if grad.numel() for part in norm_parts(grad)]
    grads = [part for part, _ in parts]
    dtype = torch.promote_types(pieces[0][0].dtype if pieces else torch.float32, torch.float32)
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack([n.to(device=grads[0].device, dtype=dtype) for n in torch._foreach_norm(grads, norm_type)])
    if math.isinf(norm_type):
        return norms.max()
    copies = torch.tensor([n for _, n in parts], dtype=dtype, device=norms.device)
    return (norms**norm_type / copies).sum()


def _scale(grads: list[Tensor], max_norm: float, norm: Tensor) -> None:
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))


def check_total_norm(tensors: Sequence[Tensor]) -> None:
    """`torch.nn.utils.get_total_norm` is given gradients and no parameters, so it cannot be made right."""
    grads = {id(param.grad) for param in _owners if param.grad is not None and _owner(param) is not None}
    if any(_owner(param) for param in _owners) and (not tensors or any(id(t) in grads for t in tensors)):
        raise RequestError("get_total_norm: this rank holds a part of the gradients: run.clip_grad_norm_(float('inf')) returns the norm of all")


# -- replacing them --


def _replace_functions() -> None:
    global _is_replaced
    if not _is_replaced:
        _is_replaced = True
        _replace("clip_grad_norm_", clip_grad_norm_)
        _replace("_clip_grads_with_norm_", clip_grads_with_norm_)
        _replace("clip_grad_value_", clip_grad_value_)
        _replace("_get_total_norm", None)
        _replace_unscale(GradScaler)


def _replace(name: str, function: Callable[..., Any] | None) -> None:
    """Let `torch.nn.utils.clip_grad.NAME` call `function` if one of its parameters is of a sharded model; refuse if there is none."""
    wrapper: Any = getattr(clip_grad, name, None)
    names = wrapper.__code__.co_freevars if hasattr(wrapper, "__code__") else ()
    cells = dict(zip(names, wrapper.__closure__ or (), strict=True))
    original = cells["func"].cell_contents if "func" in cells else wrapper
    first_argument = "tensors" if function is None else "parameters"

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        global _calls_torch
        given = kwargs.pop(first_argument) if first_argument in kwargs else args[0]
        tensors, others = [given] if torch.is_tensor(given) else list(given), args[1:]
        if not _calls_torch and function is None:
            check_total_norm(tensors)
        if function is not None and any(_owner(t) is not None for t in tensors):
            if "func" not in cells:
                raise RequestError(f"{name}: torch {torch.__version__} cannot be told that ranks hold parts: call run.clip_grad_norm_(max_norm)")
            return function(tensors, *others, **kwargs)
        before, _calls_torch = _calls_torch, True
        try:
            return original(tensors, *others, **kwargs)
        finally:
            _calls_torch = before

    if "func" in cells:
        cells["func"].cell_contents = dispatch
        return
    for module in (torch.nn.utils, clip_grad):  # a torch whose functions are made in another way: refuse by name
        for public in (name, name.removeprefix("_")):
            if hasattr(module, public):
                setattr(module, public, dispatch)


def _replace_unscale(scaler: Any) -> None:
    """Let a `GradScaler` look at the gradients that a prepared optimizer steps, and let ranks agree whether they are finite."""
    original = getattr(scaler, "_unscale_grads_", None)

    def unscale(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        gradients: ShardedGradients | None = getattr(optimizer, _KEPT_BY_OPTIMIZER, None)
        if gradients is None:
            return original(self, optimizer, *args, **kwargs)  # type: ignore[misc]
        stepped = SimpleNamespace(param_groups=[{"params": list(gradients.applied.optimizer_parameters())}])
        flags = list(original(self, stepped, *args, **kwargs).values())  # type: ignore[misc]
        device = gradients.applied.plan.device
        found_inf = torch.stack([torch.zeros((), device=device), *(flag.to(device) for flag in flags)]).max()
        gradients.applied.groups.world.sync.all_reduce(found_inf, "found_inf", "max").wait()
        return {found_inf.device: found_inf}

    if original is not None:
        scaler._unscale_grads_ = unscale
        return
    for name in ("unscale_", "step"):  # a torch whose scaler works in another way
        setattr(scaler, name, _refusing_scaler(getattr(scaler, name)))


def _refusing_scaler(method: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled() and hasattr(optimizer, _KEPT_BY_OPTIMIZER):
            raise RequestError(
                f"GradScaler of torch {torch.__version__} cannot be told that ranks hold parts of the gradients: use --mesh dp=N and zero=0"
            )
        return method(self, optimizer, *args, **kwargs)

    return refuse
