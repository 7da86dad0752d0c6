"""The supervisor's watch over ranks that write progress pages: it finds the rank that hangs and asks all ranks where they stand."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from meshwright.core.event import Fault
from meshwright.core.progress_page import PageReader, Progress
from meshwright.launch.hang_detection import HangDetector, Look, SlowRank, describe_hang, find_slow_rank

HANG = "hang"  # the kind of the fault
STACK_SIGNAL = signal.SIGUSR2
_LOOK_INTERVAL_S = 0.1
_SLOW_INTERVAL_S = 1.0
_STACK_WAIT_S = 1.0
_FRAME = re.compile(r'  File "(.+)", line (\d+|\?\?\?) in (.+)')
_OUTERMOST = (" in train_rank", " in serve_calls")
_LIBRARIES = (str(Path(os.__file__).parent), str(Path(__file__).parents[1]), "<")  # where frames begin that are not the user's own


def page_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.page"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack on STACK_SIGNAL."""
    return folder / f"rank-{rank}.stack"


class ProgressWatch:
    """Watches the ranks of one call. `limit_s` is the time without progress that is a hang: None: by the duration of steps; 0: there is no watch."""

    def __init__(self, limit_s: float | None, say_slow: Callable[[SlowRank], None] | None = None) -> None:
        """`say_slow` is told once of each rank that is slow; None: nobody looks for one."""
        self._limit_s, self._say_slow = limit_s, say_slow
        self._pages: dict[int, PageReader] = {}
        self._folder = Path()

    def begin(self, folder: Path, world: int) -> Path:
        """Make the pages of a call, in a new folder, which the ranks are told of."""
        folder.mkdir(mode=0o700)
        self._folder, self._detector = folder, HangDetector(self._limit_s)
        self._pages = {rank: PageReader(page_file(folder, rank)) for rank in range(world)}
        self._next_look = self._next_slow_look = 0.0
        self._slow: set[int] = set()
        return folder

    def look(self, ranks: Collection[int]) -> Fault | None:
        """The fault of the rank that hangs, if one of `ranks`, which have not answered yet, does. Cheap: call it as often as you like."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_INTERVAL_S
        if self._say_slow is not None and now >= self._next_slow_look:
            self._next_slow_look = now + _SLOW_INTERVAL_S
            self._find_slow_rank()
        if self._limit_s == 0:
            return None
        looks = {rank: _look_at(page.head()) for rank, page in self._pages.items() if rank in ranks}
        hang = self._detector.look(now, looks, lambda rank: self._pages[rank].read().seconds)
        if hang is None:
            return None
        pages = {rank: self._pages[rank].read() for rank in ranks}
        stacks = self.stacks(ranks)
        at = f"; it stands at {where}" if (where := standing_line(stacks.get(hang.rank, ""))) else ""
        return Fault(time.time(), hang.rank, "stopped" if hang.is_stopped else HANG, f"{describe_hang(hang, pages)}{at}", describe_stacks(stacks))

    def stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """The main thread's stack of each rank, innermost frame first. A rank that is stopped, or has ended, gives none."""
        asked = {rank: self._pages[rank].head().pid for rank in ranks}
        asked = {rank: pid for rank, pid in asked.items() if pid and stack_file(self._folder, rank).exists()}
        for pid in asked.values():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, STACK_SIGNAL)
        found: dict[int, str] = {}
        before: dict[int, str] = {}
        deadline = time.monotonic() + _STACK_WAIT_S
        while len(found) < len(asked) and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank in asked.keys() - found.keys():
                with suppress(OSError):
                    text = stack_file(self._folder, rank).read_text(errors="replace")
                    if text and text == before.get(rank):  # all is written
                        found[rank] = main_stack(text)
                    before[rank] = text
        return dict(sorted(found.items()))

    def _find_slow_rank(self) -> None:
        assert self._say_slow is not None
        slow = find_slow_rank({rank: page.read().own_seconds for rank, page in self._pages.items()})
        if slow is not None and slow.rank not in self._slow:
            self._slow.add(slow.rank)
            self._say_slow(slow)

    def close(self) -> None:
        for page in self._pages.values():
            page.close()
        self._pages = {}


def _look_at(progress: Progress) -> Look:
    """A rank's page with what the kernel says of its main thread."""
    state, waited_ns = "", 0
    with suppress(OSError, IndexError, ValueError):
        state = Path(f"/proc/{progress.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        waited_ns = int(Path(f"/proc/{progress.pid}/schedstat").read_text().split()[1])
    return Look(progress, state, waited_ns / 1e9)


# -- what faulthandler writes --


def main_stack(dump: str) -> str:
    """The frames of the main thread, which faulthandler writes last, without those that start every rank."""
    blocks = [block for block in dump.split("\n\n") if "(most recent call first)" in block]
    frames = [line for line in blocks[-1].splitlines() if _FRAME.match(line)] if blocks else []
    return "\n".join(takewhile(lambda line: not line.endswith(_OUTERMOST), frames))


def standing_line(stack: str) -> str:
    """'model.py:41 in forward': the innermost line of the user's own code, or the innermost line of all."""
    frames = [match for line in stack.splitlines() if (match := _FRAME.match(line))]
    own = [match for match in frames if not match[1].startswith(_LIBRARIES) and "/site-packages/" not in match[1]]
    return "".join(f"{Path(match[1]).name}:{match[2]} in {match[3]}" for match in (own or frames)[:1])


def describe_stacks(stacks: Mapping[int, str]) -> str:
    """The stack of each rank, under the line where it stands."""
    return "\n".join(f"rank {rank} stands at {standing_line(stack)}; innermost call first:\n{stack}" for rank, stack in stacks.items() if stack)
