"""Writes the files of one rank while it runs: its events, and on rank 0 the metrics of each step. What a full disk does not take is dropped."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.core.errors import RequestError
from meshwright.core.event import Event, Fault
from meshwright.core.serialization import to_data
from meshwright.observe.sinks import JsonlSink, MetricsSink


class Recorder:
    """The writer of one rank's events and metrics. It appends, so that a resumed run continues in the same files."""

    def __init__(self, folder: Path, rank: int, sinks: Sequence[MetricsSink] = (), generation: int = 0) -> None:
        """`sinks` also receive rank 0's metrics, beside metrics.jsonl; the recorder closes them."""
        self.rank, self.generation = rank, generation
        self._dropped, self._warned = 0, False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"cannot make the run folder {folder}: {error.strerror}; choose another with --run-dir") from None
        self._events = JsonlSink(folder / f"events-{rank}.jsonl")
        self._metrics: list[MetricsSink] = [JsonlSink(folder / "metrics.jsonl"), *sinks] if rank == 0 else []

    # `kind` is positional-only, so that `data` may hold a Fault's own `kind`.
    def event(self, kind: str, /, step: int = -1, **data: Any) -> None:
        """Append one event, stamped with the time and this rank. A "start" event also holds pid and host, by which a dead run is detected."""
        if kind == "start":
            data = {"pid": os.getpid(), "host": socket.gethostname(), **data}
        self._write(self._events, to_data(Event(time.time(), self.rank, kind, step, data, self.generation)))

    def fault(self, fault: Fault, step: int = -1) -> None:
        """Append a fault, possibly of another rank: a killed rank cannot write its own."""
        self.event("fault", step, **to_data(fault))

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Append one step's or validation's record; the time is added if missing. Ranks other than 0 write nothing."""
        stamped = {"time": time.time(), **record}
        for sink in self._metrics:
            self._write(sink, stamped)

    def _write(self, sink: MetricsSink, record: Mapping[str, Any]) -> None:
        """Write one record, or drop it: a full disk does not stop training. The first loss is said; when space returns, the number is an event."""
        try:
            sink.write(record)
        except OSError as error:
            self._dropped += 1
            if not self._warned:
                self._warned = True
                with contextlib.suppress(OSError):  # stderr may be on the same disk
                    reason = (error.strerror or str(error)).lower()
                    print(f"meshwright: rank {self.rank}: {reason}: metrics and events are dropped, training goes on", file=sys.stderr, flush=True)
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self.event("dropped", records=dropped)
            self._dropped = dropped if self._dropped else 0

    def close(self) -> None:
        for sink in (self._events, *self._metrics):
            with contextlib.suppress(OSError):
                sink.close()
        self._metrics = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
