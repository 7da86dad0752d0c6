"""The examples run as their docstrings print them, and the first three reach the same losses on one device and on two ranks."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
STARTERS = {
    "python": [sys.executable],
    "meshwright": [sys.executable, "-m", "meshwright.cli.main"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def printed_commands(file: Path) -> list[str]:
    """The indented lines of a docstring that start a program, without the words after them."""
    text = ast.get_docstring(ast.parse(file.read_text()), clean=False) or ""
    lines = re.findall(rf"^    ((?:{'|'.join(STARTERS)}) .*)$", text, re.MULTILINE)
    return [re.split(r" {2,}", line)[0] for line in lines]


COMMANDS = [command for file in sorted(EXAMPLES.glob("0*.py")) for command in printed_commands(file)]
SCRIPTS = [command for command in COMMANDS if ":" not in command and "01_plain" not in command]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Looks like the checkout's root, so that commands work as printed, and takes the runs that they write."""
    made = tmp_path_factory.mktemp("root")
    (made / "examples").symlink_to(EXAMPLES)
    return made


def run(command: str, root: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    ranks = ["--nproc", "2"] if program == "meshwright" and arguments[1].endswith(".py") else []  # however many cores there are
    # One thread a rank: a plain script may otherwise take every core of the machine that runs the tests.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*STARTERS[program], *arguments, *ranks], cwd=root, env=environ, capture_output=True, text=True, timeout=120)
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


@pytest.mark.parametrize("command", [command for command in COMMANDS if ":" in command])
def test_own_model(command: str, root: Path) -> None:
    done = run(command, root)
    if command.startswith("meshwright plan"):
        assert "Chosen:" in done.stdout
    else:
        first, last = re.search(r"loss ([\d.]+) → ([\d.]+)", done.stderr).groups()  # type: ignore[union-attr]
        assert float(last) < 0.5 * float(first)
        assert "step 20/20" in done.stderr
