"""Fixtures: one pool of four warm workers serves every test that needs processes, and one cache of calibrations every test that plans."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from meshwright.launch import Nursery, RankFailure, Workers

HERE = Path(__file__).parent
pytest.register_assert_rewrite("tests.procs.spread")
settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")
Run = Callable[..., list[Any]]


def _own_cache() -> None:
    """What tests measure stays out of the user's calibrations and does not come from them; who starts first measures for all. Workers of
    pytest-xdist, and every process that a test starts, are given the same place."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["XDG_CACHE_HOME"] = made = tempfile.mkdtemp(prefix="meshwright-tests-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)


_own_cache()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A warm process to fork from; tests' own modules are importable in its workers."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    made = Nursery(1, {**os.environ, "PYTHONPATH": path})
    yield made
    made.close()


class Pool:
    """Workers that are made again after a call that failed."""

    def __init__(self, nursery: Nursery, size: int) -> None:
        self.nursery, self.size = nursery, size
        self.workers: Workers | None = None

    def run(self, target: str, *, world: int, timeout_s: float = 120, **kwargs: Any) -> list[Any]:
        if self.workers is None:
            self.workers = Workers(self.nursery, self.size)
        try:
            return self.workers.call(target, kwargs, world=world, timeout_s=timeout_s)
        except RankFailure as failure:
            self.workers.close()
            self.workers = None
            if failure.fault.traceback:
                failure.add_note(failure.fault.traceback)
            raise

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


@pytest.fixture(scope="session")
def pool(nursery: Nursery) -> Iterator[Pool]:
    made = Pool(nursery, 4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def large_pool(nursery: Nursery) -> Iterator[Pool]:
    """Eight workers, for meshes of three axes."""
    made = Pool(nursery, 8)
    yield made
    made.close()
