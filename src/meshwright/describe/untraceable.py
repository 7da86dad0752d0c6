"""Why a model cannot be traced on fake tensors, and where in its code."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from meshwright.core.errors import RequestError

_OTHER_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # torch and Meshwright


class UntraceableError(RequestError):
    """A model that does not run on fake tensors: `reason` says what it does, and in which line."""

    def __init__(self, model: nn.Module, error: Exception) -> None:
        self.reason = describe_failure(error)
        meshes = "data parallelism and ZeRO alone can run it (--mesh dp=N or --mesh shard=N)"
        super().__init__(f"model {type(model).__name__} could not be traced, so {meshes}: {self.reason}")

    def __reduce__(self) -> tuple[type[RequestError], tuple[str]]:
        """What rank 0 sends to the others."""
        return RequestError, (str(self),)


def describe_failure(error: Exception) -> str:
    """What the model's code did, and its last line that ran: code of torch does not count."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHER_CODE)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, DataDependentOutputException):
        what = f"Python reads the value of a tensor in `{frames[-1].line}`" if frames else "Python reads the value of a tensor"
    elif isinstance(error, DynamicOutputShapeException):
        what = f"a size depends on values in `{frames[-1].line}`" if frames else "a size depends on values"
    else:
        what = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"{what} ({where})" if where else what
