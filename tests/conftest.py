"""Fixtures: one pool of four warm workers serves every test that needs processes, and one cache of calibrations every test that plans."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from meshwright.launch import ForkServer, RankFailure, WorkerPool

HERE = Path(__file__).parent
pytest.register_assert_rewrite("tests.procs.plan_cases")
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
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where warm workers are, and where commands are given: paths are the same to both."""
    return tmp_path_factory.mktemp("ground")


@pytest.fixture(scope="session")
def nursery(ground: Path) -> Iterator[ForkServer]:
    """A warm process to fork from; tests' own modules are importable in its workers."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    with contextlib.chdir(ground):
        made = ForkServer(1, {**os.environ, "PYTHONPATH": path}, ("meshwright.orchestrate.rank_entrypoints",))
    yield made
    made.close()


class Pool:
    """Workers that are made again after a call that failed."""

    def __init__(self, nursery: ForkServer, size: int) -> None:
        self.nursery, self.size = nursery, size
        self.workers: WorkerPool | None = None

    def run(self, target: str, *, world: int, timeout_s: float = 120, **kwargs: Any) -> list[Any]:
        if self.workers is None:
            self.workers = WorkerPool(self.nursery, self.size)
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
def pool(nursery: ForkServer) -> Iterator[Pool]:
    made = Pool(nursery, 4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def large_pool(nursery: ForkServer) -> Iterator[Pool]:
    """Eight workers, for meshes of three axes."""
    made = Pool(nursery, 8)
    yield made
    made.close()


@pytest.fixture(scope="session")
def measured(nursery: ForkServer) -> None:
    """This machine is measured once for all commands of the session: by whichever worker of pytest-xdist asks first, while the other waits."""
    from meshwright.describe.discover import discover
    from meshwright.orchestrate import calibrate

    with (Path(os.environ["XDG_CACHE_HOME"]) / "measuring").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = discover(os.environ)
        if calibrate.load_cached(cluster, os.environ) is None:
            calibrate.save_to_cache(calibrate.probe(cluster, nursery, log_progress=lambda _: None), cluster, os.environ)


@pytest.fixture
def command(
    nursery: ForkServer, ground: Path, measured: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:  # fmt: skip
    """A command line in this process, with ranks from the warm one: what it prints, as a user's would, without the imports of two more processes."""
    from meshwright.cli.main import main
    from meshwright.orchestrate import Orchestrator

    monkeypatch.setattr(Orchestrator, "fork_server", lambda *_, **__: nursery)

    monkeypatch.chdir(ground)

    def run(*words: str, expect: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == expect, err[-3000:]
        return out, err

    return run
