"""Fixtures: one pool of four warm workers serves every test that needs processes, and one made-up calibration every test that plans here."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import threading
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
    """What tests measure stays out of the user's calibrations and does not come from them, nor from another worker of pytest-xdist. Every process
    that a test starts is given the same place."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        os.environ["XDG_CACHE_HOME"] = made = tempfile.mkdtemp(prefix="meshwright-tests-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
    else:
        os.environ["XDG_CACHE_HOME"] = str(Path(os.environ["XDG_CACHE_HOME"]) / worker)


_own_cache()
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would every process of a test


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where warm workers are, and where commands are given: paths are the same to both."""
    return tmp_path_factory.mktemp("ground")


@pytest.fixture(scope="session")
def fork_server(ground: Path) -> Iterator[ForkServer]:
    """A warm process to fork from; tests' own modules are importable in its workers."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    with contextlib.chdir(ground):
        made = ForkServer(1, {**os.environ, "PYTHONPATH": path}, ("meshwright.orchestrate.rank_entrypoints",))
    yield made
    made.close()


class Pool:
    """Workers that are made again after a call that failed."""

    def __init__(self, fork_server: ForkServer, size: int) -> None:
        self.fork_server, self.size = fork_server, size
        self.workers: WorkerPool | None = None

    def run(self, target: str, *, world: int, timeout_s: float = 120, **kwargs: Any) -> list[Any]:
        if self.workers is None:
            self.workers = WorkerPool(self.fork_server, self.size)
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
def pool(fork_server: ForkServer) -> Iterator[Pool]:
    made = Pool(fork_server, 4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def large_pool(fork_server: ForkServer) -> Iterator[Pool]:
    """Eight workers, for meshes of three axes."""
    made = Pool(fork_server, 8)
    yield made
    made.close()


@pytest.fixture(scope="session")
def measured() -> Callable[[], None]:
    """This machine has a calibration, a made-up one: what tests plan does not depend on how busy it is. Call it to undo what runs have added."""
    from meshwright.core.calibration import AlphaBetaModel, Calibration, Rates
    from meshwright.describe.discover import discover
    from meshwright.orchestrate import calibrate

    def rates(ranks: int) -> Rates:
        operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
        calls = {f"{backend}/{op}": AlphaBetaModel(5e-4, 1e9) for backend in ("gloo", "nccl") for op in operations} if ranks > 1 else {}
        return Rates(ranks, 1, {"matmul/fp32": ((1e4, 2e9), (1e8, 3e10))}, ((1e4, 1e10), (1e8, 1e10)), 5e-6, calls, 0.3, 300_000_000)

    cluster = discover(os.environ)
    known = Calibration(cluster.nodes[0].name, cluster.devices[0].name, "2026-01-01T00:00:00+00:00", tuple(map(rates, (1, 2, 3, 4, 8))))

    def restore() -> None:
        assert calibrate.save_to_cache(known, cluster, os.environ)

    restore()
    return restore


@pytest.fixture
def command(
    fork_server: ForkServer, ground: Path, measured: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:  # fmt: skip
    """A command line in this process, with ranks from the warm one: what it prints, as a user's would, without the imports of two more processes."""
    from meshwright.cli.main import main
    from meshwright.orchestrate import Orchestrator

    monkeypatch.setattr(Orchestrator, "fork_server", lambda *_, **__: fork_server)

    monkeypatch.chdir(ground)

    def run(*words: str, expect: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == expect, err[-3000:]
        return out, err

    return run
