"""A rank's side of the watch over it: opens its progress page, and keeps it right while torch.compile compiles and when its stack is asked for."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._dynamo.callback import callback_handler

from meshwright.core.progress_page import ProgressPage
from meshwright.launch.progress_watch import STACK_SIGNAL, page_file, stack_file


@contextmanager
def open_progress(folder: str | None, rank: int) -> Iterator[ProgressPage]:
    """The page of this rank in the supervisor's folder; without one, nobody reads it."""
    if folder is None:
        yield ProgressPage()
        return
    page = ProgressPage(page_file(Path(folder), rank))
    before: list[str] = []

    def start(_: Any) -> None:
        before.append(page.enter("compile"))

    def end(_: Any) -> None:
        page.enter(before.pop())

    with stack_file(Path(folder), rank).open("w") as stacks:
        faulthandler.register(STACK_SIGNAL, stacks)
        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)
        try:
            yield page
        finally:
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)
            page.enter("end")
            page.close()
            faulthandler.unregister(STACK_SIGNAL)
