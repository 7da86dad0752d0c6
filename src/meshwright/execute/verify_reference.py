"""One device's part of verifying a plan: copies of a model and its optimizer, and the loss, gradients and module outputs of a plain run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.task import Batch, Loss
from meshwright.execute.memory_runtime import RandomKeys
from meshwright.execute.verify_truncation import Truncation, copy_truncated

Autocast = Callable[[], AbstractContextManager[None]]
_RANDOM_DIFFERENCE = 1e-5  # of a loss, relative: beyond what kernels whose sums have no fixed order explain
_NOISE = 0.02  # added to parameters whose elements are all alike
_STAND_IN_RATE = 1e-3  # for a learning rate of zero, with which no step could be compared
_WHOLE = Truncation()
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


class NotVerifiableError(Exception):
    """Why a model cannot be verified; training may go on."""


# -- copies --


def copy_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device | None = None, truncation: Truncation = _WHOLE
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of the model and of its optimizer, which steps the copy, on another device if one is given. Its dropout modules drop nothing.
    Parameters whose elements are all alike (biases of zero, gains of one) get other values, the same in every copy: they would hide what a plan
    does with them."""
    try:
        copied, stepper = copy_truncated(model, optimizer, truncation)
    except OUT_OF_MEMORY:
        raise
    except Exception as error:
        raise NotVerifiableError(f"{type(model).__name__} cannot be copied ({first_line(error)})") from error
    for key, value in vars(optimizer).items():  # torch copies only the state of its own base class
        if key not in vars(stepper) and key != "step" and not key.startswith("_optimizer_"):
            setattr(stepper, key, value)
    if device is not None and any(p.device != device for p in copied.parameters()):
        copied.to(device)
        stepper.load_state_dict(stepper.state_dict())  # moves its states to where its parameters are
    for group in stepper.param_groups:
        if "lr" in group and float(group["lr"]) == 0.0:
            group["lr"] = group.get("initial_lr") or _STAND_IN_RATE
    for module in copied.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
        module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for index, parameter in enumerate(copied.parameters()):
            if parameter.is_floating_point() and parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                parameter.add_(noise.to(parameter), alpha=_NOISE)
    return copied, stepper


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the state of torch's, Python's and numpy's generators at the end."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


class NoDropout(TorchFunctionMode):
    """Switches off dropout that a model calls as a function; `is_used` says whether it does. Not in layers that backward recomputes: torch runs
    backward without such modes."""

    _DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout, torch.dropout_)

    def __init__(self) -> None:
        super().__init__()
        self.is_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS:
            self.is_used |= (args[1] if len(args) > 1 else kwargs.get("p", 0.5)) > 0.0
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            self.is_used |= (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs if len(args) > 4 else {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


# -- module outputs --


@dataclass(frozen=True)
class SampleNorms:
    """The norm of a module's output for each sample of its first call, and the number of elements in one sample's part."""

    norms: Tensor
    numel: int


class OutputRecorder:
    """Records the norms of every module's first output, in the order in which modules end."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        self.outputs: dict[str, SampleNorms] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _m, _a, out, name=name: self._record(name, out, samples))

    @torch.no_grad()
    def _record(self, name: str, output: Any, samples: int) -> None:
        tensor = next((t for t in pytree.tree_leaves(output) if torch.is_tensor(t)), None)
        if name in self.outputs or tensor is None or not tensor.is_floating_point() or not tensor.numel() or tensor.numel() % samples:
            return
        per_sample = tensor.detach().reshape(samples, -1)
        self.outputs[name] = SampleNorms(torch.linalg.vector_norm(per_sample, dim=1, dtype=torch.float64).cpu(), per_sample.shape[1])


# -- a plain run --


@dataclass(frozen=True)
class Reference:
    """What a plain loop computes on one device, on the CPU."""

    loss: float
    gradients: Mapping[str, Tensor | None]  # by parameter; None for one that the loss does not use
    outputs: Mapping[str, SampleNorms] = field(default_factory=dict)
    changed: Mapping[str, Tensor] = field(default_factory=dict)  # parameters that forward itself has changed (an embedding's max_norm)
    calls_dropout: bool = False  # as a function, not as a module

    def gradient_norm(self, names: Iterable[str]) -> float:
        """The norm over the gradients of some parameters."""
        gradients = [g for g in map(self.gradients.get, names) if g is not None]
        return float(sum(torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in gradients)) ** 0.5


def run_reference(model: nn.Module, loss_fn: Loss, batch: Batch, samples: int, autocast: Autocast, seed: int) -> Reference:
    """Run the loss of a copied model once. Nothing else may change: parameters of other models get no gradients."""
    RandomKeys(model).set(seed, 0, 0)
    recorder = OutputRecorder(model, samples)
    versions = {name: p._version for name, p in model.named_parameters()}
    with NoDropout() as mode, _only(model), autocast():
        value = loss_fn(model, batch)
    loss = value[0] / value[1] if isinstance(value, tuple) else value
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if loss.dim() or not loss.requires_grad:
        raise NotVerifiableError("the loss is no scalar that depends on the model's parameters")
    _refuse_other_leaves(loss, params)
    gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    on_cpu = {n: None if g is None else (g.to_dense() if g.is_sparse else g).detach().cpu() for n, g in zip(params, gradients, strict=True)}
    changed = {name: p.detach().cpu() for name, p in model.named_parameters() if p._version != versions[name]}
    return Reference(float(loss.detach()), on_cpu, recorder.outputs, changed, mode.is_used)


@contextmanager
def _only(model: nn.Module) -> Iterator[None]:
    """Refuse the call of a module that is not part of the copied model and has a state that the call could change."""
    own = {id(m) for m in model.modules()}

    def check(module: nn.Module, _: Any) -> None:
        if id(module) in own:
            return
        if any(p.requires_grad for p in module.parameters()) or (module.training and next(module.buffers(), None) is not None):
            raise NotVerifiableError(f"the loss also runs {type(module).__name__}, which is not part of the model")

    handle = register_module_forward_pre_hook(check)  # before the module's own hooks, which may communicate
    try:
        yield
    finally:
        handle.remove()


def _refuse_other_leaves(loss: Tensor, params: Mapping[str, Tensor]) -> None:
    """Raise if backward would reach a trainable tensor that is not a parameter of the copy."""
    own, pending, seen = {id(p) for p in params.values()}, [loss.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            raise NotVerifiableError(f"the loss trains a tensor of shape {tuple(leaf.shape)} that is not a parameter of the model")
        pending.extend(parent for parent, _ in node.next_functions)


def refuse_random_model(run: Callable[[], Reference]) -> Reference:
    """The result of `run`. Raises if it draws random numbers that change the loss."""
    before = _random_state()
    first = run()
    if _random_state() != before:
        torch.manual_seed(1)
        random.seed(1)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(1)
        if abs(run().loss - first.loss) > _RANDOM_DIFFERENCE * abs(first.loss):
            raise NotVerifiableError("the model draws random numbers in forward")
    return first


def _random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    device = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b""
    drawn = numpy.random.get_state() if numpy is not None else ()
    return torch.get_rng_state().numpy().tobytes(), device, random.getstate(), *(x.tobytes() if hasattr(x, "tobytes") else x for x in drawn)


def first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
