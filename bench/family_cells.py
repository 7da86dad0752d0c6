"""One cell of the sweep in `families.py`, on one rank: a model under a plan, four AdamW steps, beside the same steps on one device."""

from __future__ import annotations

import contextlib
import copy
import random
import time
import warnings
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import meshwright as mw
from family import BATCH, Family, Loss
from family_models import all_families, build
from meshwright.core.errors import RequestError
from meshwright.core.sample_coupling import describe_inexactness

MESHES = {"dp": {"mesh": "dp=2"}, "zero3": {"mesh": "shard=2", "zero": 3}, "tp": {"mesh": "tp=2"}, "pp": {"mesh": "pp=2"}}
STEPS, LEARNING_RATE = 4, 1e-3
TOLERANCE = 1e-4  # relative, of losses and gradient norms; wider where rounding changes them on one device
_MAX_NOISE = 1e-4  # a model that makes more of rounding is compared in float64
_families: dict[str, Family] = {}
_references: dict[str, tuple[nn.Module, Any, Loss, list[float], list[float]]] = {}  # model, batch, loss, expected numbers, tolerances


def families() -> dict[str, Family]:
    if not _families:
        _families.update({family.key: family for family in all_families()})
    return _families


def reference(rank: int, world: int, init_method: str, key: str) -> dict[str, Any]:
    """Build a model and train it on one device; what `run_cell` compares with. Says why a model is not in the sweep."""
    torch.set_num_threads(1)
    started = time.monotonic()
    _references.clear()
    try:
        model, batch, loss = build(families()[key])
        expected = _train_alone(model, batch, loss, seed=0)
        if not all(np.isfinite(expected)):
            raise ValueError("not finite on one device")
        if not np.allclose(expected, _train_alone(model, batch, loss, seed=1), rtol=1e-6):
            raise ValueError("draws random numbers")
        if sum(p.requires_grad for p in model.parameters()) == 0:
            raise ValueError("nothing to train")
    except Exception as error:
        return {"built": False, "why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    noise = _rounding_noise(model, batch, loss, expected)
    if max(noise) > _MAX_NOISE:
        with contextlib.suppress(Exception):  # some models cast to float32
            exact = copy.deepcopy(model).double(), pytree.tree_map(_as_float64, batch)
            expected_64 = _train_alone(*exact, loss, seed=0)
            (model, batch), expected, noise = exact, expected_64, _rounding_noise(*exact, loss, expected_64)
    _references[key] = (model, batch, loss, expected, [max(TOLERANCE, 20 * n) for n in noise])
    return {
        "built": True, "class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters()), "noise": max(noise),
        "precision": _precision(model),
        "batch_norm": any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()), "seconds": time.monotonic() - started,
    }  # fmt: skip


def run_cell(rank: int, world: int, init_method: str, key: str, cell: str) -> dict[str, Any]:
    """{"status": equal, inexact (and said so), wrong or refused, …}; whatever else goes wrong raises."""
    model, batch, loss, expected, tolerances = _references[key]
    started = time.monotonic()
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        model = copy.deepcopy(model)
        decision: list[Any] = [_exact_plan(model, batch, loss, world, cell)] if rank == 0 else [None]
        dist.broadcast_object_list(decision, src=0)
        if isinstance(decision[0], str):
            return {"status": "refused", "why": decision[0], "seconds": time.monotonic() - started}
        full = {name: p.numel() for name, p in model.named_parameters()}
        _seed(0)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
        try:
            run = mw.prepare(model, optimizer, [batch] * STEPS, loss_fn=loss, plan=decision[0], clip=1e9)
        except RequestError as error:
            status = "wrong" if "is wrong for this model" in str(error) else "refused"  # what verification says
            return {"status": status, "difference": float("nan"), "why": str(error), "seconds": time.monotonic() - started}
        found: list[float] = []
        for part in run.loader:
            try:
                result = run.session.step(part, loss, total=run.loader.global_batch)
            except RequestError as error:
                return {"status": "refused", "why": str(error), "seconds": time.monotonic() - started}
            assert result.grad_norm is not None
            found += [float(result.loss), float(result.grad_norm)]
        differences = _differences(expected, found)
        equal = all(d <= t for d, t in zip(differences, tolerances, strict=True))
        units = decision[0].memory.units
        inside = {n: p for n, p in model.named_parameters() if not units or any(n.startswith(f"{unit}.") for unit in units)}
        cut = sum(full[n] for n, p in inside.items() if p.numel() < full[n]) / max(sum(full[n] for n in inside), 1)
        said = describe_inexactness(decision[0])
        numbers = {} if equal else {"why": said, "expected": expected, "found": found, "tolerances": tolerances}
        seconds = time.monotonic() - started
        status = "equal" if equal else "inexact" if said else "wrong"
        return {"status": status, "difference": max(differences), "cut": cut, "plan": decision[0].summary(), "seconds": seconds, **numbers}
    finally:
        dist.destroy_process_group()


def _rounding_noise(model: nn.Module, batch: Any, loss: Loss, expected: list[float]) -> list[float]:
    """What rounding makes of each number: samples in another order, and other last bits in the parameters. It grows with the steps."""
    order = torch.arange(BATCH).flip(0)
    turned = pytree.tree_map(lambda t: t[order] if torch.is_tensor(t) else t, batch)
    others = _train_alone(model, turned, loss, seed=0), _train_alone(_rounded(model), batch, loss, seed=0)
    return list(accumulate(map(max, *(_differences(expected, other) for other in others)), max))


def _as_float64(leaf: Any) -> Any:
    return leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf


def _precision(model: nn.Module) -> str:
    return "fp64" if any(p.dtype == torch.float64 for p in model.parameters()) else "fp32"


def _exactly(model: nn.Module, batch: Any, loss: Loss, cell: str) -> dict[str, Any]:
    """What makes a model exact that runs BatchNorm: statistics over all data ranks, and one micro-batch."""
    if not _runs_batch_norm(model, batch, loss):
        return {}
    return {"batch_norm": "sync"} if cell in ("dp", "zero3") else {"micro_batches": 1}


def _runs_batch_norm(model: nn.Module, batch: Any, loss: Loss) -> bool:
    """Whether the loss depends on BatchNorm in training: a vision tower has it that text alone does not reach."""
    called: list[nn.Module] = []
    trial = copy.deepcopy(model)
    for module in trial.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            module.register_forward_hook(lambda module, inputs, output: called.append(module))
    with torch.no_grad():
        loss(trial, batch)
    return bool(called)


def _exact_plan(model: nn.Module, batch: Any, loss: Loss, world: int, cell: str) -> Any:
    """The best plan, and of a pipeline whose micro-batches the model would compare, the best that keeps a batch together: data ranks cannot."""
    constraints = {**MESHES[cell], **_exactly(model, batch, loss, cell)}
    plan = _plan(model, batch, loss, world, **constraints)
    if cell == "pp" and not isinstance(plan, str) and describe_inexactness(plan):
        return _plan(model, batch, loss, world, **constraints, samples="together")
    return plan


def _plan(model: nn.Module, batch: Any, loss: Loss, world: int, mesh: str, **constraints: Any) -> Any:
    """The best plan on a mesh, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = mw.plan_for(model, batch, loss, world=world, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
            return replace(plan, memory=replace(plan.memory, precision=_precision(model)))
    except RequestError as error:
        return str(error)


def _train_alone(model: nn.Module, batch: Any, loss: Loss, seed: int) -> list[float]:
    """The losses and gradient norms of four steps in a plain loop."""
    model = copy.deepcopy(model)
    _seed(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, numbers = torch.optim.AdamW(parameters, lr=LEARNING_RATE), []
    for _ in range(STEPS):
        value = loss(model, batch)
        value.backward()
        norms: list[Tensor] = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
        numbers += [float(value.detach()), float(torch.stack(norms).norm())]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def _rounded(model: nn.Module) -> nn.Module:
    """The model with other last bits in its parameters."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.is_floating_point()):
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randn_like(parameter))
    return model


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _differences(expected: list[float], found: list[float]) -> list[float]:
    """Relative differences; a tenth of them for gradient norms, which amplify rounding."""
    pairs = zip(expected, found, strict=True)
    parts = [abs(a - b) / max(abs(a), 1e-6) * (0.1 if i % 2 else 1.0) for i, (a, b) in enumerate(pairs)]
    return [float("inf") if part != part else part for part in parts]
