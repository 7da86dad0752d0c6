"""While rank 0 of an external launcher probes and plans, the other ranks wait for as long as it lives, and say so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from meshwright.core.errors import RunError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "meshwright/planned"
_LINE_INTERVAL_S = 30.0


def announce_plan(store: Store | None) -> None:
    """Called by rank 0 when it has planned, or has failed to."""
    if store is not None:
        store.set(_KEY, "done")


def await_plan(store: Store | None) -> None:
    """Called by the other ranks. RunError if rank 0 has ended: then its store is gone. Over MPI there is no store, ranks wait in MPI_Init, and mpirun
    ends them when rank 0 ends."""
    while store is not None:
        try:
            store.wait([_KEY], timedelta(seconds=_LINE_INTERVAL_S))
            return
        except dist.DistNetworkError:
            raise RunError("rank 0 ended while it planned, and this rank waited for it: its own messages say why") from None
        except dist.DistStoreError:
            continue  # the timeout


@contextmanager
def waiting_lines(log: Callable[[str], None]) -> Iterator[None]:
    """Log a line every 30 s until the block ends."""
    ended, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(_LINE_INTERVAL_S):
            log(f"waiting for rank 0, which measures this machine and plans ({time.monotonic() - start:.0f} s so far)")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
