"""The progress page of a rank: a small file, mapped by the rank, which writes into it what it does, and by its supervisor, which reads it.

[Note: writing without a lock]
The rank writes each field with one store of a packed struct, about half a microsecond, and never waits. The supervisor may read between two stores,
and so see a number that is newer than the name beside it; it looks again a tenth of a second later, and decides nothing by one look.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

PHASES = ("build", "load", "compile", "step", "data", "validation", "save", "profile", "end")
WARM_STEPS = 3  # the first steps of a process allocate, fault pages in and compile: their durations say nothing
RING = 128  # steps whose durations are kept
_CALLS = 64  # collectives whose names are kept
_NAME_BYTES = 56
_HEAD = struct.Struct("=qqqqqqqq")  # the fields of Progress up to `calls_per_step`
_STEP = struct.Struct("=qff")  # step, seconds, own seconds
_CALL = struct.Struct(f"=q{_NAME_BYTES}s")  # number, operation and name
_STEPS_AT = _HEAD.size
_CALLS_AT = _STEPS_AT + RING * _STEP.size
SIZE = _CALLS_AT + _CALLS * _CALL.size


@dataclass(frozen=True)
class Progress:
    """What a page says at one moment."""

    pid: int = 0  # 0: the rank has not begun to write
    phase: str = "build"
    step: int = -1
    changed_ns: int = 0  # CLOCK_MONOTONIC, which is one for all processes of a machine
    steps_done: int = 0  # by this process
    calls: int = 0  # collectives begun so far; the last one's number
    step_calls: int = 0  # of them before this step
    calls_per_step: int = 0  # in the last step that was done
    seconds: tuple[float, ...] = ()  # of the last steps that were warm, without what torch.compile took
    own_seconds: Mapping[int, float] = field(default_factory=dict)  # by step: until its last reduction of gradients began; waits for a core left out
    names: Mapping[int, str] = field(default_factory=dict)  # of the last collectives, by number: operation, a space, name


class ProgressPage:
    """The rank's side of its page. Without a file it keeps the numbers to itself."""

    def __init__(self, path: Path | None = None) -> None:
        self._map: mmap.mmap | bytearray = _map_file(path) if path is not None else bytearray(SIZE)
        self._pid, self._phase = os.getpid(), 0
        self._step, self._steps_done, self._calls, self._step_calls, self._calls_per_step = -1, 0, 0, 0, 0
        self._began = self._own_end = self._entered = self._compiled = 0  # ns; the last is the time of compilation in this step
        self._schedstat = _open_schedstat()
        self._waited = self._own_waited = 0  # ns that this rank's main thread has waited for a core, at the begin of the step and at `_own_end`
        self._encoded: dict[tuple[str, str], bytes] = {}
        self.last_own_seconds: float | None = None  # of the last step
        self.enter("build")

    def enter(self, phase: str) -> str:
        """Begin a phase; returns the one before."""
        before, self._phase = PHASES[self._phase], PHASES.index(phase)
        now = time.monotonic_ns()
        if before == "compile":
            self._compiled += now - self._entered
        self._entered = now
        self._write_head(now)
        return before

    def begin_step(self, step: int) -> None:
        self._step, self._phase, self._step_calls = step, PHASES.index("step"), self._calls
        self._began = self._own_end = time.monotonic_ns()
        self._compiled, self._waited = 0, self._core_wait()
        self._write_head(self._began)

    def begin_collective(self, name: str, op: str) -> None:
        """Note a collective that begins. The rank's own part of the step lasts until its last reduction of gradients is begun."""
        if (encoded := self._encoded.get((name, op))) is None:
            encoded = self._encoded[name, op] = f"{op} {name}".encode()[:_NAME_BYTES]
        self._calls += 1
        _CALL.pack_into(self._map, _CALLS_AT + self._calls % _CALLS * _CALL.size, self._calls, encoded)
        now = time.monotonic_ns()
        if name.startswith("grads/"):
            self._own_end, self._own_waited = now, self._core_wait()
        self._write_head(now)

    def end_step(self, phase: str = "data") -> None:
        now = time.monotonic_ns()
        if self._own_end == self._began:
            self._own_end, self._own_waited = now, self._core_wait()
        self.last_own_seconds = own = max(self._own_end - self._began - (self._own_waited - self._waited), 0) / 1e9
        _STEP.pack_into(self._map, _STEPS_AT + self._steps_done % RING * _STEP.size, self._step, (now - self._began - self._compiled) / 1e9, own)
        self._steps_done += 1
        self._phase, self._calls_per_step = PHASES.index(phase), self._calls - self._step_calls
        self._write_head(now)

    def _core_wait(self) -> int:
        return int(os.pread(self._schedstat, 100, 0).split()[1]) if self._schedstat >= 0 else 0

    def close(self) -> None:
        if self._schedstat >= 0:
            os.close(self._schedstat)

    def _write_head(self, now: int) -> None:
        counts = (self._steps_done, self._calls, self._step_calls, self._calls_per_step)
        _HEAD.pack_into(self._map, 0, self._pid, self._phase, self._step, now, *counts)


class PageReader:
    """The supervisor's side of a page, which it makes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("wb") as file:
            file.truncate(SIZE)
        self._map = _map_file(path)

    def head(self) -> Progress:
        """The page without its lists: cheap enough to read ten times a second."""
        pid, phase, *rest = _HEAD.unpack_from(self._map, 0)
        return Progress(pid, PHASES[phase], *rest)

    def read(self) -> Progress:
        head = self.head()
        steps = sorted(_STEP.unpack_from(self._map, _STEPS_AT + i * _STEP.size) for i in range(min(head.steps_done, RING)))
        warm = steps[max(min(WARM_STEPS - (head.steps_done - len(steps)), len(steps) - 1), 0) :]
        calls = [_CALL.unpack_from(self._map, _CALLS_AT + i * _CALL.size) for i in range(_CALLS)]
        names = {number: name.rstrip(b"\0").decode(errors="replace") for number, name in calls if number}
        return replace(head, seconds=tuple(s for _, s, _ in warm), own_seconds={step: own for step, _, own in steps}, names=names)

    def close(self) -> None:
        self._map.close()


def _open_schedstat() -> int:
    """What Linux says of the times of this process's main thread; -1 elsewhere."""
    try:
        return os.open("/proc/self/schedstat", os.O_RDONLY)
    except OSError:
        return -1


def _map_file(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)
