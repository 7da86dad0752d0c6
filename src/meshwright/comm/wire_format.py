"""Converts tensors that a backend cannot take directly: to bytes, to a wider dtype, or to a contiguous copy. Each fallback is reported once."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.core.backends import backend_traits

Finish = Callable[[], object]

_WIDER_DTYPE = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_warned: set[str] = set()


def warn_fallback(backend: str, missing: str, fallback: str, rank: int) -> None:
    """Print a fallback once per process, and only on rank 0."""
    text = f"meshwright: {backend} has no {missing}: {fallback}"
    if text not in _warned:
        _warned.add(text)
        if rank == 0:
            print(text, file=sys.stderr)


class WireFormat:
    """The conversions that one backend needs, given the dtypes and devices that it supports."""

    def __init__(self, backend: str, rank: int, dtypes: set[torch.dtype] | None = None) -> None:
        self._backend, self._rank = backend, rank
        traits = backend_traits(backend)
        self._dtypes = dtypes or ({getattr(torch, name) for name in traits.dtypes} if traits.dtypes is not None else None)
        self._by_host = "cuda" not in traits.devices

    def accepts(self, tensor: Tensor) -> bool:
        """Whether the backend takes the tensor without conversion, as it nearly always does."""
        return tensor.is_contiguous() and self.supports_dtype(tensor.dtype)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        return self._dtypes is None or dtype in self._dtypes

    def send_tensor(self, tensor: Tensor) -> Tensor:
        """The tensor to send in an operation that only moves data."""
        if self.accepts(tensor):
            return tensor
        dense = tensor.contiguous()
        return dense if self.supports_dtype(tensor.dtype) else self._as_bytes(dense)

    def receive_tensor(self, tensor: Tensor) -> tuple[Tensor, Finish | None]:
        """The tensor to receive into, and what to call once the data has arrived."""
        if self.accepts(tensor):
            return tensor, None
        dense = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        wire = dense if self.supports_dtype(tensor.dtype) else self._as_bytes(dense)
        return wire, None if dense is tensor else lambda: tensor.copy_(dense)

    def host_send_tensor(self, tensor: Tensor) -> Tensor:
        """The tensor to send point to point. Gloo sends only from host memory, even if its collectives take device memory."""
        wire = self.send_tensor(tensor)
        if not (self._by_host and wire.is_cuda):
            return wire
        warn_fallback(self._backend, "messages from a GPU's memory", "sent from the host's", self._rank)
        return wire.cpu()

    def host_receive_tensor(self, tensor: Tensor) -> tuple[Tensor, Finish | None]:
        """The tensor to receive a point-to-point message into, and what to call once it has arrived."""
        if not (self._by_host and tensor.is_cuda):
            return self.receive_tensor(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return host if self.supports_dtype(tensor.dtype) else self._as_bytes(host), lambda: tensor.copy_(host)

    def rows_on_wire(self, tensor: Tensor) -> int:
        """Rows of the converted tensor for one row of the tensor."""
        if self.supports_dtype(tensor.dtype):
            return 1
        return tensor.element_size() * (tensor.numel() // tensor.shape[0] if tensor.shape[0] else 1)

    def reduction_tensor(self, tensor: Tensor, op: str) -> tuple[Tensor, str, Finish | None]:
        """The tensor to reduce instead, the operation to reduce it with, and what to call once it is reduced."""
        if self.accepts(tensor) and tensor.dtype != torch.bool:
            return tensor, op, None
        if tensor.dtype == torch.bool:  # as bytes of 0 and 1, `any` is their maximum and `all` their minimum
            if op == "mean":
                raise mean_error(tensor.dtype)
            work = tensor.to(torch.uint8, memory_format=torch.contiguous_format)
            op = {"sum": "max", "product": "min"}.get(op, op)
        elif tensor.is_complex() and not self.supports_dtype(tensor.dtype):
            if op not in ("sum", "mean"):
                raise ValueError(f"op='{op}' is not defined for {tensor.dtype}: use sum or mean")
            real = torch.view_as_real(tensor.contiguous())
            return real, op, None if tensor.is_contiguous() else lambda: tensor.copy_(torch.view_as_complex(real))
        elif not self.supports_dtype(tensor.dtype):
            wider = _WIDER_DTYPE.get(tensor.dtype, torch.float32 if tensor.is_floating_point() else torch.int64)
            warn_fallback(self._backend, f"reduction of {_dtype_name(tensor.dtype)}", f"done in {_dtype_name(wider)}", self._rank)
            work = tensor.to(wider, memory_format=torch.contiguous_format)
        else:
            work = tensor.contiguous()
        return work, op, lambda: tensor.copy_(work)

    def _as_bytes(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in (torch.bool, torch.complex64, torch.complex128):
            warn_fallback(self._backend, _dtype_name(tensor.dtype), "sent as bytes", self._rank)
        return tensor.view(-1).view(torch.uint8)


def mean_error(dtype: torch.dtype) -> ValueError:
    return ValueError(f"op='mean' is not defined for {dtype}: convert the tensor to a floating-point dtype")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
