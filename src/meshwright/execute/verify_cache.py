"""Which plans have been verified for which models: one small JSON file for each fingerprint in the cache folder. A file that cannot be read or
written only costs another verification."""

from __future__ import annotations

import hashlib
import inspect
import marshal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.core.cache import cache_folder
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.serialization import dump_json, from_data, read_json, to_data, write_json
from meshwright.core.task import Batch, Loss
from meshwright.core.verification import Verification
from meshwright.describe.layers import behavior_signature

# What a plan computes does not depend on these: names, and how fast and on which of several equal devices it runs.
_NOT_IN_FINGERPRINT = ("model", "global_batch", "device_order", "threads", "version")


def fingerprint(plan: Plan, model: nn.Module, optimizer: type[torch.optim.Optimizer] | str, inputs: str, loss_fn: Loss) -> str:
    """A hash of everything that decides what a plan computes: the code of the model, the loss, the optimizer and of Meshwright's runtime, the module
    tree with its settings, the shapes and dtypes of parameters, buffers and `inputs`, the plan, and torch."""
    tensors = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in (*model.named_parameters(), *model.named_buffers())]
    data = {key: value for key, value in to_data(plan).items() if key not in _NOT_IN_FINGERPRINT}
    data["rank_devices"] = [device.partition(":")[0] for device in plan.rank_devices]
    parts = [
        torch.__version__, _runtime_code(), behavior_signature(model), str(getattr(model, "config", "")), repr(tensors), inputs,
        optimizer if isinstance(optimizer, str) else _code_of(optimizer), dump_json(data, sort_keys=True),
        *sorted({_code_of(c) for m in model.modules() for c in type(m).__mro__}), *_code_of_function(loss_fn),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def describe_inputs(batch: Batch) -> str:
    """Structure, shapes and dtypes of a batch, whatever its number of samples."""
    leaves, spec = pytree.tree_flatten(batch)
    return f"{spec} {[(tuple(t.shape[1:]), str(t.dtype)) if torch.is_tensor(t) else type(t).__name__ for t in leaves]}"


def load_verification(environ: Mapping[str, str], key: str) -> Verification | None:
    try:
        return replace(from_data(Verification, read_json(_path(environ, key)), key), is_cached=True)
    except (RequestError, OSError):
        return None


def save_verification(environ: Mapping[str, str], key: str, found: Verification) -> None:
    """Keep a verdict, without the comparisons. A plan that failed or was not verified is tried again."""
    if found.verdict not in ("equal", "inexact", "wrong"):
        return
    path = _path(environ, key)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, replace(found, comparisons=()), private=True)
    except (OSError, RequestError):
        return


def _path(environ: Mapping[str, str], key: str) -> Path:
    return cache_folder(environ) / "verified" / f"{key}.json"


# -- code --


def _code_of(cls: type) -> str:
    """A class's name and the hash of the file that defines it, with the functions that it calls there; torch's own are in torch's version."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
        return name
    try:
        return f"{name} {_hash_file(inspect.getfile(cls))}"
    except (TypeError, OSError):  # defined in a notebook, or by exec
        return f"{name} {_hash_codes(f.__code__ for f in vars(cls).values() if hasattr(f, '__code__'))}"


def _code_of_function(function: Any) -> Iterator[str]:
    """What a loss computes: its file or its code, the object that it is a method of, and the numbers and functions that it encloses."""
    while isinstance(function, partial):
        yield repr([a for a in (*function.args, *function.keywords.items()) if isinstance(a, (int, float, str, bool, tuple))])
        function = function.func
    if (owner := getattr(function, "__self__", None)) is not None:
        yield _code_of(type(owner))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        yield f"{type(function).__module__}.{type(function).__qualname__}"
        return
    try:
        yield f"{getattr(function, '__qualname__', '')} {_hash_file(code.co_filename)}"
    except OSError:
        yield _hash_codes([code])
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        yield repr(value) if isinstance(value, (int, float, str, bool)) else getattr(value, "__qualname__", type(value).__qualname__)


def _hash_codes(codes: Iterable[CodeType]) -> str:
    return hashlib.sha256(b"".join(marshal.dumps(code) for code in codes)).hexdigest()


@cache
def _hash_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@cache
def _runtime_code() -> str:
    """A hash of the code that applies plans: it may change without a new version while it is developed."""
    package = Path(__file__).parent.parent
    files = sorted(f for folder in ("core", "comm", "describe", "execute") for f in (package / folder).rglob("*.py"))
    return hashlib.sha256("".join(_hash_file(str(f)) for f in files).encode()).hexdigest()
