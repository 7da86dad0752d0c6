"""What is compiled on the user's machine: made once, found again, and never a reason to fail."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from meshwright.comm.mpi.compiled import compiled


def with_compiler(folder: Path, **more: str) -> dict[str, str]:
    if shutil.which("cc") is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no C compiler, or no Python.h")
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(folder), **more}


@pytest.mark.parametrize("pointers", [True, False])
def test_is_made_once_for_each_kind_of_mpi(tmp_path: Path, pointers: bool) -> None:
    environ = with_compiler(tmp_path)
    first = compiled(environ, pointers)
    assert first is not None and first.is_relative_to(tmp_path)
    made = first.stat().st_mtime_ns
    assert compiled(environ, pointers) == first and first.stat().st_mtime_ns == made
    assert compiled(environ, not pointers) not in (None, first)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "sh -c 'for last; do :; done; echo half > \"$last\"; exit 1'"])
def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, compiler: str) -> None:
    assert compiled({"CC": compiler, "XDG_CACHE_HOME": str(tmp_path)}, True) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_it_can_be_left_be(tmp_path: Path) -> None:
    assert compiled(with_compiler(tmp_path, MESHWRIGHT_COMPILE="0"), True) is None
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "meshwright").write_text("a file where the folder would be")
    assert compiled(with_compiler(tmp_path), True) is None


def test_nothing_is_run_that_others_may_have_written(tmp_path: Path) -> None:
    environ = with_compiler(tmp_path)
    made = compiled(environ, True)
    assert made is not None and made.parent.stat().st_mode & 0o077 == 0
    made.parent.chmod(0o777)
    assert compiled(environ, True) is None


def test_a_compiler_that_cannot_be_read(tmp_path: Path) -> None:
    assert compiled({"CC": "cc 'unbalanced", "XDG_CACHE_HOME": str(tmp_path)}, True) is None


def test_no_compiler_has_anything_to_say_about_it(tmp_path: Path) -> None:
    assert compiled(with_compiler(tmp_path, CC="cc -Wall -Wextra -Wno-missing-field-initializers -Werror"), True) is not None
