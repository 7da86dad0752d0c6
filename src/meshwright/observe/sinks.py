"""Metrics sinks: a JSONL file always, TensorBoard and Prometheus on request."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import RequestError
from meshwright.core.serialization import dump_json
from meshwright.observe.formatting import finite_or_none


class MetricsSink(Protocol):
    """A destination of metrics records. `write` must not hold on to the record; it raises OSError if the record is lost."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends one JSON object per line. Each line is one `write` system call: a killed process loses at most the line being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}; choose another folder with --run-dir") from None
        self._torn = not self._ends_with_newline()  # a killed process or a full disk left half a line: the next record must not be appended to it

    def write(self, record: Mapping[str, Any]) -> None:
        self._append(dump_json(record, default=_to_json_value, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, line: bytes) -> None:
        assert self._file >= 0, f"{self._path} is closed: no record can be written to it"
        line = b"\n" + line if self._torn else line
        written = os.write(self._file, line)
        if written < len(line):
            self._torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def _ends_with_newline(self) -> bool:
        length = os.fstat(self._file).st_size
        return length == 0 or os.pread(self._file, 1, length - 1) == b"\n"


class TensorBoardSink:
    """Writes every number of a record as a TensorBoard scalar."""

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        """`first_step`, of a run that goes on: what earlier writers wrote of it and of later steps is not shown."""
        module: Any = _import_optional("torch.utils.tensorboard", "TensorBoard")
        self._writer = module.SummaryWriter(log_dir=str(folder), purge_step=first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        for key, value in _numeric_fields(record).items():
            self._writer.add_scalar(f"train/{key}", value, global_step=record.get("step"), walltime=record.get("time"))

    def close(self) -> None:
        self._writer.close()


class PrometheusSink:
    """Serves every number of the last record as a gauge on http://127.0.0.1:port/metrics, for this machine only; port 0 takes a free one."""

    def __init__(self, port: int) -> None:
        self._module: Any = _import_optional("prometheus_client", "Prometheus")
        self._registry = self._module.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            # 127.0.0.1: access from outside needs a proxy with authentication in front.
            self._server, self._thread = self._module.start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except (OSError, OverflowError) as error:
            raise RequestError(f"cannot serve Prometheus metrics on 127.0.0.1:{port}: {error}; choose another port with prometheus_port") from None
        self.address, self.port = self._server.server_address[:2]  # as the system bound it

    def write(self, record: Mapping[str, Any]) -> None:
        for key, value in {**_numeric_fields(record), "step": record.get("step", -1)}.items():
            if key not in self._gauges:
                self._gauges[key] = self._module.Gauge(f"meshwright_{key}", f"{key} of the last step", registry=self._registry)
            self._gauges[key].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def open_sinks(folder: Path, tensorboard: bool = False, prometheus_port: int | None = None, first_step: int | None = None) -> list[MetricsSink]:
    """The optional sinks that a run requests; TensorBoard writes to `folder/tensorboard`."""
    sinks: list[MetricsSink] = [TensorBoardSink(folder / "tensorboard", first_step)] if tensorboard else []
    return sinks if prometheus_port is None else [*sinks, PrometheusSink(prometheus_port)]


def _import_optional(module: str, product: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RequestError(f"{product} output needs a package that is not installed: pip install 'meshwright[viz]'") from None


def _numeric_fields(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, without step and time; NaNs stay, because both tools show them."""
    return {k: v for k, v in record.items() if k not in ("step", "time") and (finite_or_none(v) is not None or isinstance(v, float))}


def _to_json_value(value: Any) -> Any:
    """Scalars of numpy and torch as numbers, anything else as text: an odd value in a record must not stop training."""
    try:
        number = value.item()
        return None if isinstance(number, float) and finite_or_none(number) is None else number
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no scalar: another type, or more than one element
        return str(value)
