"""Runs torch's own test suite of collectives and DDP (torch.testing's distributed_test) on backend `mpi` and on gloo, test by test.

    python bench/torch_distributed_tests.py [--backends gloo,mpi] [--ranks 3] [--only all_gather]

torch's tests need `pip install expecttest`. Many of them skip MPI because torch's own MPI backend lacks what they test: they run as for gloo.
All tests of a backend share one process group, as torch runs them for MPI. A test that fails on one rank or does not end may leave the ranks out of
step, so the job is started anew for the tests that follow. Tests that gloo passes and MPI does not are listed at the end (with tracebacks where
`--only` selects tests); the guide names those that are limits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).parent
SUITE = "torch.testing._internal.distributed.distributed_test"
LIMITS = {  # tests that do not run on MPI, by how their names begin, and why: the guide says the same
    "test_monitored_barrier": "limit: torch's monitored_barrier is for gloo",
    "test_barrier_timeout": "limit: a collective that a rank does not reach in time ends the job",
}
LIMIT_S = 90.0  # seconds for one test on an idle machine; DDP's longest take 10


def main(
    backends: Annotated[str, typer.Option(help="Backends, like gloo,mpi.")] = "gloo,mpi",
    ranks: Annotated[int, typer.Option(help="Ranks; torch's tests of subgroups need 3.")] = 3,
    only: Annotated[str, typer.Option(help="Only tests whose name contains this. The result is not kept.")] = "",
) -> None:
    """Run the suite; example: python bench/torch_distributed_tests.py --backends mpi --only all_gather."""
    outcomes = {backend: run_suite(backend, ranks, only) for backend in backends.split(",")}
    for backend, results in outcomes.items():
        print(f"{backend}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(r["outcome"] for r in results.values()).items())))
    regressions = {
        name: result["reason"]
        for name, result in outcomes.get("mpi", {}).items()
        if result["outcome"] in ("failed", "not run") and outcomes.get("gloo", {}).get(name, {}).get("outcome") == "passed"
    }
    for name, reason in regressions.items():
        print(f"  gloo passes, mpi does not: {name}: {reason}")
    if only:
        print("\n".join(f"{name}: {r['traceback']}" for results in outcomes.values() for name, r in results.items() if r["outcome"] == "failed"))
    elif len(outcomes) > 1:
        kept = {
            backend: {name: " ".join((r["outcome"], r["reason"])).strip() for name, r in results.items()} for backend, results in outcomes.items()
        }
        (HERE / "results" / "torch-distributed-tests.json").write_text(json.dumps({"ranks": ranks, "outcomes": kept}, indent=1) + "\n")


def run_suite(backend: str, ranks: int, only: str) -> dict[str, dict[str, str]]:
    """The outcome of every test: passed, skipped or failed, with its reason."""
    names = [name for name in test_names(backend, ranks) if only in name]
    limits = {name: reason for name in names for begin, reason in LIMITS.items() if backend == "mpi" and name.startswith(begin)}
    outcomes = {name: {"outcome": "not run", "reason": reason} for name, reason in limits.items()}
    remaining = [name for name in names if name not in limits]
    with tempfile.TemporaryDirectory() as folder:
        while remaining:
            finished = _run_job(backend, ranks, Path(folder), remaining, f"{backend} {len(outcomes)}/{len(outcomes) + len(remaining)}")
            for name, results in finished.items():
                outcomes[name] = _merge(results, ranks)
            remaining = [name for name in remaining if name not in outcomes]
    return outcomes


def _merge(results: list[dict[str, str]], ranks: int) -> dict[str, str]:
    """One outcome of a test: the worst over ranks; ranks that said nothing did not finish."""
    failed = [r for r in results if r["outcome"] == "failed"]
    if failed:
        return failed[0]
    if len(results) < ranks:
        return {"outcome": "failed", "reason": f"{ranks - len(results)} of {ranks} ranks did not finish", "traceback": ""}
    return next((r for r in results if r["outcome"] == "passed"), results[0])


def _run_job(backend: str, ranks: int, folder: Path, names: list[str], label: str) -> dict[str, list[dict[str, str]]]:
    """Run tests until one fails or stalls; returns the results of each test that was begun, by rank."""
    job = Path(tempfile.mkdtemp(dir=folder))
    (job / "names.json").write_text(json.dumps(names))
    suite = {"BACKEND": backend, "WORLD_SIZE": str(ranks), "TEMP_DIR": str(job)}
    environment = {**os.environ, **suite, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    program = [sys.executable, __file__, "--rank", str(job)]
    with (job / "log").open("w") as log:
        if backend == "mpi":
            from meshwright.launch.mpi_launcher import mpirun_command

            prefix, environment = mpirun_command(ranks, environment)
            commands = [([*prefix, *program], environment)]
        else:
            commands = [(program, {**environment, "RANK": str(rank)}) for rank in range(ranks)]
        processes = [subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True) for command, env in commands]
        _wait(processes, job, label)
    results: dict[str, list[dict[str, str]]] = {}
    for rank in range(ranks):
        file = job / f"results{rank}"
        for line in file.read_text().splitlines() if file.exists() else ():
            data = json.loads(line)
            results.setdefault(data.pop("name"), []).extend([data] if data else [])
    return results or {names[0]: []}


def _wait(processes: list[subprocess.Popen[bytes]], job: Path, label: str) -> None:
    """Wait until the job ends; kill it when no rank has written for LIMIT_S."""
    while any(p.poll() is None for p in processes):
        time.sleep(0.2)
        files = list(job.glob("results*"))
        latest = max((f.stat().st_mtime for f in files), default=job.stat().st_mtime)
        current = [f.read_text().splitlines()[-1] for f in files if f.stat().st_size]
        if current and sys.stderr.isatty():
            print(f"\r{label} {json.loads(current[0])['name']:70.70}", end="", file=sys.stderr)
        crashed = any(p.poll() not in (None, 0) for p in processes)
        if time.time() - latest > (5 if crashed else LIMIT_S):
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, 9)


def test_names(backend: str, ranks: int) -> list[str]:
    """Names of torch's tests, without those that torch has for CUDA."""
    os.environ.update({"WORLD_SIZE": str(ranks), "TEMP_DIR": tempfile.gettempdir()})
    tests = load_suite(backend).DistributedTest._DistTestBase
    return sorted(name for name in dir(tests) if name.startswith("test_") and "cuda" not in name and "nccl" not in name)


def load_suite(backend: str) -> Any:
    """A copy of torch's module of tests whose decorators skip what torch does not test on `backend`."""
    os.environ["BACKEND"] = backend  # torch reads it when the module is imported
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_rank(job: Path) -> None:
    """One rank: run each test in turn, write its outcome, and stop at the first failure."""
    import torch
    import torch.distributed as dist

    backend = os.environ["BACKEND"]
    torch.set_num_threads(1)
    if backend == "mpi":
        from meshwright.comm import mpi

        mpi.register(60)
        dist.init_process_group("mpi")
    else:
        dist.init_process_group(backend, init_method=f"file://{job}/store", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    from torch.testing._internal.common_utils import TestCase

    if dist.get_rank() == 0:
        for name in ("barrier", "test_dir", "init_dir"):
            (job / name).mkdir(exist_ok=True)
    dist.barrier()
    identity = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "file_name": f"{job}/file", "init_method": f"file://{job}/file"}
    suites = [load_suite(decorated) for decorated in dict.fromkeys((backend, "gloo"))]
    for suite in suites:
        suite.BACKEND = os.environ["BACKEND"] = backend  # what the tests themselves read
    cases = [(suite, type("Rank", (TestCase, suite.DistributedTest._DistTestBase), identity)) for suite in suites]

    with (job / f"results{dist.get_rank()}").open("a", buffering=1) as results:
        for name in json.loads((job / "names.json").read_text()):
            results.write(json.dumps({"name": name}) + "\n")
            for suite, case in cases:
                sys.modules[SUITE] = suite  # where pickle looks for the classes of a test
                outcome = _run_test(case(name))
                if outcome["outcome"] != "skipped":
                    break
            results.write(json.dumps({"name": name, **outcome}) + "\n")
            if outcome["outcome"] == "failed":
                os._exit(1)
            dist.barrier()
    dist.destroy_process_group()


class _Outcome(unittest.TestResult):
    """Keeps one outcome. Torch's decorators skip a test by `sys.exit` with a code of TEST_SKIPS, which unittest takes for an error."""

    def addError(self, test: Any, error: Any) -> None:
        from torch.testing._internal.common_distributed import TEST_SKIPS

        reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if isinstance(error[1], SystemExit) and error[1].code in reasons:
            self.addSkip(test, reasons[error[1].code])
        else:
            super().addError(test, error)


def _run_test(test: Any) -> dict[str, str]:
    result = _Outcome()
    test.run(result)
    problems = result.errors + result.failures
    if problems:
        lines = [line for line in problems[0][1].splitlines() if "Error" in line or "Exception" in line]
        return {"outcome": "failed", "reason": (lines or ["no reason"])[-1][:200], "traceback": problems[0][1][-3000:]}
    if result.skipped:
        return {"outcome": "skipped", "reason": result.skipped[0][1][:200]}
    return {"outcome": "passed", "reason": ""}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]))
    else:
        typer.run(main)
