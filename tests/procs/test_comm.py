"""The communication layer: every backend against a reference computed on one process, and torch's engines over MPI equal to those over gloo."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.mpi_launcher import mpirun_command
from tests.procs import collectives, contract, mpi_job

HERE = Path(__file__).parent


def start(folder: Path, *arguments: str) -> list[Any]:
    """One mpirun for all checks; what each rank found."""
    command, environ = mpirun_command(4, {"OMP_NUM_THREADS": "1"})
    done = subprocess.run([*command, sys.executable, str(HERE / "mpi_job.py"), str(folder), *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def over_mpi(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start(tmp_path_factory.mktemp("mpi"))


def all_held(found: list[tuple[int, list[str]]]) -> None:
    assert [wrong for _, wrong in found] == [[]] * 4
    assert min(count for count, _ in found) > 1000


def test_threads_conform() -> None:
    all_held(collectives.over_threads(full=False))


def test_gloo_conforms(pool: Any) -> None:
    all_held(pool.run("procs.collectives:over_gloo", world=4, full=False))


def test_shared_memory_conforms(pool: Any) -> None:
    all_held(pool.run("procs.collectives:over_shared", world=4, full=False))


@pytest.mark.parametrize(("node", "goes"), [(-1, True), (1, False)])
def test_all_ranks_go_by_two_levels_or_none(pool: Any, node: int, goes: bool) -> None:
    """Where one node cannot share memory, ranks of the other do not wait for it."""
    assert pool.run("procs.collectives:two_level_without_memory_on", world=4, node=node) == [goes] * 4


def test_mpi_conforms(over_mpi: list[dict[str, Any]]) -> None:
    all_held([tuple(found["conform"]) for found in over_mpi])


def test_mpi_beyond_what_it_can_count(over_mpi: list[dict[str, Any]]) -> None:
    assert [found["counts"] for found in over_mpi] == [[]] * 4


@pytest.mark.parametrize("what", ["contract", "sync calls", "comm sync", "futures", "pairwise", "two groups"])
def test_mpi_calls(over_mpi: list[dict[str, Any]], what: str) -> None:
    assert [found[what] for found in over_mpi] == [[]] * 4


def test_memory_of_mpis_calls_is_kept(over_mpi: list[dict[str, Any]]) -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc can be told to keep memory")
    assert [found["faults"] for found in over_mpi] == [[]] * 4


def test_torchs_own_calls_over_mpi(over_mpi: list[dict[str, Any]]) -> None:
    assert [found["calls"] for found in over_mpi] == [[]] * 4


@pytest.fixture(scope="module")
def over_gloo(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    found: list[dict[str, list[float]]] = pool.run("procs.contract:engines_over_gloo", world=4, folder=str(tmp_path_factory.mktemp("gloo")))
    return found


@pytest.mark.parametrize("engine", contract.ENGINES)
def test_an_engine_trains_over_mpi_as_over_gloo(engine: str, over_mpi: list[dict[str, Any]], over_gloo: list[dict[str, list[float]]]) -> None:
    for mine, other in zip(over_mpi, over_gloo, strict=True):
        assert mine["engines"][engine] == pytest.approx(other[engine], rel=1e-9 if engine == contract.LOSSY else 1e-12)
        if engine != contract.LOSSY:
            assert mine["engines"][engine] == pytest.approx(contract.serial(), rel=1e-9)


@pytest.mark.parametrize("plan", mpi_job.PLANS)
def test_a_plan_whose_calls_are_routed_equals_gloo(plan: str, over_mpi: list[dict[str, Any]]) -> None:
    for found in over_mpi:
        alone, routed = found["routed"][plan]
        for key in ("losses", "norms", "state"):
            assert routed[key] == pytest.approx(alone[key], rel=1e-9, abs=1e-12)
        assert (routed["started"], routed["ledger"]) == (alone["started"], alone["ledger"])


@pytest.mark.prove
def test_every_dtype_conforms(pool: Any, tmp_path: Path) -> None:
    all_held(collectives.over_threads(full=True))
    all_held(pool.run("procs.collectives:over_gloo", world=4, timeout_s=300, full=True))
    all_held(pool.run("procs.collectives:over_shared", world=4, timeout_s=300, full=True))
    all_held([tuple(found["conform"]) for found in start(tmp_path, "full")])
