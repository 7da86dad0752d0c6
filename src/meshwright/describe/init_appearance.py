"""Makes the tensors of a recorded constructor look like tensors on the CPU to Python code: their device, and their values where it reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.describe.init_recording import DeferralError

_CPU, _META = torch.device("cpu"), torch.device("meta")


class Recorder(Protocol):
    """What the appearance asks of the recorder."""

    wants_meta: bool

    def is_deferred(self, tensor: Tensor) -> bool: ...

    def values(self, *tensors: Tensor) -> list[Tensor]: ...

    def refuse(self, reason: str) -> DeferralError: ...


class CpuAppearance(TorchFunctionMode):
    """Answers what a tensor's device would decide, for tensors that `recorder` knows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None and isinstance(args[0], Tensor) and self._recorder.is_deferred(args[0]):
            return answer(self._recorder, func, *args, **kwargs)
        if not kwargs or "device" not in kwargs or not _is_meta(kwargs["device"]):
            return func(*args, **kwargs)
        self._recorder.wants_meta = True
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.wants_meta = False


def _is_meta(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"


def _read(recorder: Recorder, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The call on the tensor's values."""
    (real,) = recorder.values(tensor)
    with torch._C._DisableTorchDispatch():
        return func(real, *args, **kwargs)


def _as_numpy(recorder: Recorder, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = _read(recorder, func, tensor.detach(), *args, **kwargs)
    found.setflags(write=False)  # a change of it would not change the tensor
    return found


def _refuse(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise recorder.refuse(f"Tensor.{getattr(func, '__name__', func)} needs a tensor with values")


def _to(recorder: Recorder, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Deferred tensors are on the CPU already; on meta, a tensor has no values."""
    given = kwargs.get("device", args[0] if args and isinstance(args[0], (str, torch.device)) else None)
    if given is None:
        return func(tensor, *args, **kwargs)
    if _is_meta(given):
        with torch._C._DisableTorchDispatch():
            return torch.empty_like(tensor, device=_META)
    if torch.device(given).type != "cpu":
        raise recorder.refuse(f"the constructor moves a tensor to {given}")
    if "device" in kwargs:
        return func(tensor, *args, **{**kwargs, "device": _META})
    return func(tensor, _META, *args[1:], **kwargs)


def _type(recorder: Recorder, func: Any, tensor: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None:
        with torch._C._DisableTorchDispatch():
            return func(torch.empty(0, dtype=tensor.dtype), **kwargs)
    if isinstance(dtype, torch.dtype):
        return func(tensor, dtype, **kwargs)
    with torch._C._DisableTorchDispatch():
        wanted = torch.empty(0).type(dtype).dtype
    return tensor.to(wanted)


def _new_tensor(recorder: Recorder, func: Any, tensor: Tensor, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    return torch.tensor(data, dtype=dtype or tensor.dtype, device=device, **kwargs)


def _new(recorder: Recorder, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], (list, tuple, np.ndarray)) and not isinstance(args[0], torch.Size):
        return torch.tensor(args[0], dtype=tensor.dtype)
    return func(tensor, *args, **kwargs)


def _indexed(recorder: Recorder, func: Any, tensor: Tensor, index: Any, *value: Any) -> Any:
    """Lists in an index become tensors on the tensor's device, where meta would lose their values."""
    if isinstance(index, tuple):
        return func(tensor, tuple(_as_index(item) for item in index), *value)
    return func(tensor, _as_index(index), *value)


def _as_index(item: Any) -> Any:
    is_numbers = isinstance(item, (list, range)) and all(isinstance(i, (int, np.integer)) for i in item)
    return torch.as_tensor(list(item) if is_numbers else item) if is_numbers or isinstance(item, np.ndarray) else item


def _data_ptr(recorder: Recorder, func: Any, tensor: Tensor) -> int:
    """An address that tells tensors apart as their own would."""
    return int(tensor.untyped_storage()._cdata) + int(tensor.storage_offset()) * tensor.element_size()


_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda recorder, func, tensor: _CPU,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda recorder, func, tensor: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda recorder, func, tensor: True,  # type: ignore[attr-defined]
    Tensor.cpu: lambda recorder, func, tensor, *args, **kwargs: tensor,
    Tensor.to: _to,
    Tensor.type: _type,
    Tensor.new_tensor: _new_tensor,
    Tensor.new: _new,
    Tensor.data_ptr: _data_ptr,
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _indexed,
    Tensor.tolist: _read,
    Tensor.__format__: _read,
    Tensor.numpy: _as_numpy,
    Tensor.__array__: _as_numpy,
    Tensor.share_memory_: _refuse,
    Tensor.pin_memory: _refuse,
    Tensor.__reduce_ex__: _refuse,
}
