"""Imports point down only: read from the source, without importing it, functions' own imports included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright

SOURCE = Path(meshwright.__file__).parent
LEVELS = {
    "core": 0,
    "checkpoint": 1, "describe": 1, "schedule": 1, "comm": 1, "observe": 1, "launch": 1, "data": 1, "zoo": 1,
    "cost": 2,
    "plan": 3, "simulate": 3, "execute": 3,
    "orchestrate": 4, "serve": 4, "proxies": 4, "study": 4,
    "cli": 5, "api": 5,
    "__main__": 6,
}  # fmt: skip
ROOT = "__init__"  # meshwright/__init__.py: it names what api offers, and nobody below may ask it
WITHOUT_TORCH = {"core", "checkpoint", "schedule", "cost", "plan", "simulate"}


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, only for type checkers) of every import; `from a import b` gives a.b. `package` is where the file lives."""

    def walk(node: ast.AST, typing_only: bool) -> Iterator[tuple[int, str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = [*base, *(node.module.split(".") if node.module else [])]
            yield from ((node.lineno, ".".join([*parts, alias.name]), typing_only) for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            yield from ((node.lineno, arg.value, typing_only) for arg in node.args[:1] if isinstance(arg, ast.Constant))
        if isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            for child in node.body:
                yield from walk(child, True)
            for child in node.orelse:
                yield from walk(child, typing_only)
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, typing_only)

    yield from walk(tree, False)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def violations(source: Path) -> list[str]:
    """Every import under `source` (a folder called meshwright) that the layers forbid, one line each."""
    found = []
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        home = inside.parts[0].removesuffix(".py")
        package = (source.name, *inside.parent.parts)
        if home != ROOT and home not in LEVELS:
            found.append(f"{inside}: package '{home}' has no level")
            continue
        for line, name, typing_only in imports(ast.parse(path.read_text(encoding="utf-8")), package):
            top, *rest = name.split(".")
            if top == "torch" and home in WITHOUT_TORCH and not typing_only:
                found.append(f"{inside}:{line}: {home} imports torch")
            if top == source.name:
                reason = _forbidden(home, rest, typing_only)
                found += [f"{inside}:{line}: {reason}"] if reason else []
    return found


def _forbidden(home: str, rest: list[str], typing_only: bool) -> str:
    target = rest[0] if rest else ROOT
    if target == home or (home == ROOT and target in ("api", "core") and typing_only):
        return ""
    if target not in LEVELS:
        return f"{home} asks the package itself for '{target}'"
    own, other = LEVELS.get(home, -1), LEVELS[target]
    if other > own:
        return f"{home} (level {own}) imports {target} (level {other}), which is above it"
    if other == own:
        return f"{home} imports {target}, both on level {own}"
    if home in WITHOUT_TORCH and target not in WITHOUT_TORCH:
        return f"{home} does without torch, {target} does not"
    return ""


def test_imports_point_down_only() -> None:
    assert violations(SOURCE) == []


def test_every_package_was_looked_at() -> None:
    """The test above would pass on an empty folder."""
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert {"core", "describe", "schedule", "cost", "plan", "execute", "orchestrate", "cli"} <= packages <= set(LEVELS)
    tree = ast.parse((SOURCE / "orchestrate" / "orchestrator.py").read_text(encoding="utf-8"))
    named = {name.split(".")[1] for _, name, _ in imports(tree, ("meshwright", "orchestrate")) if name.startswith("meshwright.")}
    assert {"core", "cost", "describe", "launch", "observe", "plan"} <= named


PLANTED = {
    "core/upward.py": ("from meshwright.plan import explain", "core/upward.py:1: core (level 0) imports plan (level 3)"),
    "cost/late.py": ("def f():\n    from meshwright.orchestrate import Orchestrator", "cost/late.py:2: cost (level 2) imports orchestrate (level 4)"),
    "execute/sibling.py": ("import meshwright.plan.search", "execute/sibling.py:1: execute imports plan, both on level 3"),
    "data/named.py": ("from meshwright import zoo", "data/named.py:1: data imports zoo, both on level 1"),
    "comm/relative.py": ("from ..launch import workers", "comm/relative.py:1: comm imports launch, both on level 1"),
    "comm/nearby.py": ("from .. import observe", "comm/nearby.py:1: comm imports observe, both on level 1"),
    "zoo/dynamic.py": ("import importlib\nimportlib.import_module('meshwright.cli')", "zoo/dynamic.py:2: zoo (level 1) imports cli (level 5)"),
    "core/heavy.py": ("import torch.nn as nn", "core/heavy.py:1: core imports torch"),
    "plan/lazy.py": ("def f():\n    from torch import nn", "plan/lazy.py:2: plan imports torch"),
    "cost/other.py": ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "cost/other.py:4: cost imports torch"),
    "plan/indirect.py": (
        "from meshwright.describe.profile_tracer import trace_task",
        "plan/indirect.py:1: plan does without torch, describe does not",
    ),
    "core/public.py": ("from meshwright import Plan", "core/public.py:1: core asks the package itself for 'Plan'"),
    "api.py": ("from meshwright.cli import main", "api.py:1: api imports cli, both on level 5"),
    "__init__.py": ("from meshwright.api import prepare", "__init__.py:1: __init__"),
    "misc/file.py": ("", "misc/file.py: package 'misc' has no level"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str, tmp_path: Path) -> None:
    text, expected = PLANTED[name]
    path = tmp_path / "meshwright" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (line,) = violations(tmp_path / "meshwright")
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("core/typed.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("core/inside.py", "from meshwright.core import errors\nfrom . import mesh\nfrom .plan import Plan"),
        ("orchestrate/all.py", "from meshwright import data, zoo\nfrom meshwright.execute import session\nfrom meshwright.plan import explain"),
        ("describe/heavy.py", "import torch"),
        ("__init__.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from meshwright.api import prepare"),
        ("plan/similar.py", "import torchlight"),
    ],
)
def test_what_the_layers_allow_is_not_reported(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "meshwright" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert violations(tmp_path / "meshwright") == []


def test_deciding_loads_no_torch() -> None:
    """What the source says, seen at run time: through any chain of imports."""
    names = [f"meshwright.{p}" for p in sorted(WITHOUT_TORCH) if (SOURCE / p).is_dir()]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names}]; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
