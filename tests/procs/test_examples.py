"""The examples run as their docstrings print them. The first three reach the same losses on one device and on two ranks, and so do
those that communicate by hand, in every way that they offer."""

from __future__ import annotations

import ast
import csv
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.launch.mpi_launcher import mpirun_command

EXAMPLES = Path(__file__).parents[2] / "examples"
STARTERS = {
    "python": [sys.executable],
    "meshwright": [sys.executable, "-m", "meshwright.cli.main"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "mpirun": [],
}


def printed_commands(file: Path) -> list[str]:
    """The indented lines of a docstring that start a program, without the words after them."""
    text = ast.get_docstring(ast.parse(file.read_text()), clean=False) or ""
    lines = re.findall(rf"^    ((?:{'|'.join(STARTERS)}) .*)$", text, re.MULTILINE)
    return [re.split(r" {2,}", line)[0] for line in lines]


COMMANDS = [command for file in sorted(EXAMPLES.glob("0*.py")) for command in printed_commands(file)]
SCRIPTS = [command for command in COMMANDS if re.search(r"0[23]_\w+\.py(?!:)", command)]
BY_HAND = [command for command in COMMANDS if re.search(r"0[56]_", command)]


@pytest.fixture(scope="module")
def root(ground: Path) -> Path:
    """Looks like the checkout's root, so that commands work as printed, and takes the runs that they write."""
    (ground / "examples").symlink_to(EXAMPLES)
    return ground


def run(command: str, root: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    if program == "meshwright" and arguments[1].endswith(".py") and "--nproc" not in arguments:
        arguments[2:2] = ["--nproc", "2"]  # however many cores there are
    # One thread a rank: a plain script may otherwise take every core of the machine that runs the tests.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = STARTERS[program]
    if program == "mpirun":
        (_, ranks, _), arguments = arguments[:3], arguments[3:]  # -n RANKS python
        start, environ = mpirun_command(int(ranks), environ)
        start = [*start, sys.executable]
    done = subprocess.run([*start, *arguments], cwd=root, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """Training and validation loss of every epoch; a second rank that printed would make the list longer."""
    return [float(number) for pair in re.findall(r"loss ([\d.]+), validation ([\d.]+)", done.stdout) for number in pair]


@pytest.fixture(scope="module")
def plain(root: Path) -> list[float]:
    found = losses(run("python examples/01_plain.py", root))
    assert len(found) == 6  # three epochs
    assert found[-1] < 0.3 < found[1]  # it learns
    return found


def test_every_example_prints_how_to_run_it() -> None:
    files = {file.name for file in EXAMPLES.glob("0*.py")}
    assert files == {re.search(r"\d\d_\w+\.py", command)[0] for command in COMMANDS}  # type: ignore[index]
    told = (EXAMPLES / "README.md").read_text()
    assert all(name in told for name in files)


@pytest.mark.parametrize("command", SCRIPTS)
def test_same_losses_as_the_plain_script(command: str, root: Path, plain: list[float]) -> None:
    done = run(command, root)
    assert losses(done) == pytest.approx(plain, rel=1e-4, abs=2e-5)  # printed to five places
    if command.startswith("meshwright"):
        assert "2 ranks finished" in done.stderr


def test_a_script_with_its_own_loop(root: Path, tmp_path: Path) -> None:
    """At most six lines differ; one rank prints what the plain script prints, two print the same up to rounding; all save a whole model."""

    def epochs(command: str, out: str) -> tuple[str, list[float]]:
        printed = re.findall(r"^epoch .*$", run(f"{command} --out {tmp_path / out}", root).stdout, re.MULTILINE)
        return "\n".join(printed), [float(number) for line in printed for number in re.findall(r"(?:loss|val|acc|lr) ([\d.]+)", line)]

    plain, own = ((EXAMPLES / name).read_text().split('"""', 2)[2].splitlines() for name in ("08_script_plain.py", "09_script_own_loop.py"))
    assert len([line for line in difflib.ndiff(plain, own) if line.startswith("+ ") and line != "+ "]) <= 6
    text, numbers = epochs("python examples/08_script_plain.py", "plain.pt")
    assert len(numbers) == 16 and numbers[-2] > 0.8  # it learns
    assert epochs("python examples/09_script_own_loop.py", "one.pt")[0] == text
    assert epochs("meshwright train examples/09_script_own_loop.py --nproc 2 --mesh shard=2 --set zero=1 --", "two.pt")[1] == pytest.approx(
        numbers, rel=0.02, abs=2e-3
    )
    states = [torch.load(tmp_path / f"{name}.pt") for name in ("plain", "one", "two")]
    assert all({name: t.shape for name, t in state.items()} == {name: t.shape for name, t in states[0].items()} for state in states)


@pytest.fixture(scope="module")
def one_process(root: Path) -> list[float]:
    """Steps 1 to 10 of the VAE in float64."""
    found = steps(run("python examples/05_vae_data_parallel.py --dtype float64", root).stdout)
    assert len(found) == 10
    assert found[-1] < found[0] - 5  # it learns
    return found


def steps(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("command", BY_HAND)
def test_by_hand_equals_one_process(command: str, pool: Any, one_process: list[float]) -> None:
    """The ranks and arguments of every printed command, on warm workers."""
    words = shlex.split(command)
    path = next(word for word in words if word.endswith(".py"))
    arguments = [word for word in words[words.index(path) + 1 :] if word != "--"]
    world = 1 if words[0] == "python" else 2
    if "--latency" in arguments:
        at = arguments.index("--latency")
        del arguments[at : at + 2]
    if "--nproc" in arguments:
        at = arguments.index("--nproc")
        world = int(arguments[at + 1])
        del arguments[at : at + 2]
    said = pool.run("procs.user_jobs:script", world=world, path=str(EXAMPLES / Path(path).name), arguments=[*arguments, "--dtype", "float64"])
    assert steps(said[0]) == pytest.approx(one_process, rel=1e-9)
    assert said[1:] == [""] * (world - 1)
    counted = re.search(r"(\d+) calls, ([\d,]+) bytes", said[0])
    if "--mode" in arguments:
        calls = {"per_tensor": 9, "bucketed": 6, "overlapped": 6}[arguments[arguments.index("--mode") + 1]]
        assert counted and counted.groups() == (str(calls), "183,048")  # however cut, the same bytes
    if "hybrid" in path and world > 1:
        assert f"dp={world // 2} × tp=2: each rank holds 11,488 of 22,880" in said[0]


@pytest.mark.parametrize("command", [next(c for c in BY_HAND if c.startswith(start)) for start in ("meshwright", "torchrun")])
def test_by_hand_under_its_launcher(command: str, root: Path, one_process: list[float]) -> None:
    assert steps(run(command, root).stdout) == pytest.approx(one_process, rel=1e-4)


@pytest.mark.parametrize("command", [c for c in BY_HAND if c.startswith("mpirun")])
def test_by_hand_over_mpi(command: str, root: Path, pool: Any, one_process: list[float], tmp_path: Path) -> None:
    """Training and inference equal one process, and the latencies are of the slowest rank."""
    table = tmp_path / "latency.csv"
    done = run(f"{command} --dtype float64 --latency {table}", root)
    path = next(word for word in shlex.split(command) if word.endswith(".py"))
    alone = pool.run("procs.user_jobs:script", world=1, path=str(EXAMPLES / Path(path).name), arguments=["--dtype", "float64", "--infer", "4"])
    assert steps(done.stdout) == pytest.approx(one_process, rel=1e-9)
    errors = [[float(e) for e in re.findall(r"mean squared error ([\d.e-]+)", text)] for text in (done.stdout, alone[0])]
    assert len(errors[0]) == 4 and errors[0] == pytest.approx(errors[1], rel=1e-9)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["phase"] for row in rows] == ["train"] * 10 + ["infer"] * 4 + ["train", "infer"]
    for total in rows[-2:]:
        parts = [float(row["seconds"]) for row in rows[:-2] if row["phase"] == total["phase"]]
        assert min(parts) > 0 and float(total["seconds"]) == pytest.approx(sum(parts))


def test_by_hand_names_its_collectives(pool: Any, tmp_path: Path) -> None:
    path, trace = str(EXAMPLES / "05_vae_data_parallel.py"), tmp_path / "trace.json"
    pool.run("procs.user_jobs:script", world=2, path=path, arguments=["--steps", "2", "--trace", str(trace)])
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"loss", "loss (wait)", *(f"grads/bucket{i}" for i in range(3))} <= names


def test_own_strategy(root: Path, command: Any) -> None:
    """Both printed commands, without a process each."""
    text = (EXAMPLES / "07_own_strategy.py").read_text()
    assert len(text.splitlines()) < 40
    for line in (line for line in COMMANDS if "07_" in line):
        out, err = command(*shlex.split(line)[1:])
        assert "Strategy even-buckets changed sync.bucket_bytes 26214400 → 65536" in " ".join((out + err).split())
    assert "loss " in err


@pytest.mark.parametrize("line", [line for line in COMMANDS if "04_" in line])
def test_own_model(line: str, root: Path, command: Any) -> None:
    verb, *words = shlex.split(line)[1:]
    out, err = command(verb, *words, "--nproc", "2")
    if verb == "plan":
        assert "Chosen:" in out
    else:
        first, last = re.search(r"loss ([\d.]+) → ([\d.]+)", err).groups()  # type: ignore[union-attr]
        assert float(last) < 0.5 * float(first)
        assert "step 20/20" in err
