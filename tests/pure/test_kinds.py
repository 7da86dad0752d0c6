"""Backends and pipeline schedules are told apart by their traits: the tables are complete, and no code compares their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

import meshwright
from meshwright.core.backends import BACKENDS, Backend, backend_for, backend_traits
from meshwright.core.pipeline_schedules import SCHEDULES, PipelineSchedule, schedule_traits

SOURCE = Path(meshwright.__file__).parent
KINDS = {*BACKENDS, *SCHEDULES}


def compared_names(source: str) -> Iterator[int]:
    """The lines that compare something with the name of a kind. Launchers are no backends, though one is called mpi too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and not (isinstance(node.left, ast.Name) and node.left.id == "launcher"):
            constants = [c.value for side in (node.left, *node.comparators) for c in ast.walk(side) if isinstance(c, ast.Constant)]
            if KINDS.intersection(constants):
                yield node.lineno


def test_nobody_compares_the_names_of_kinds() -> None:
    """But for the code of a backend itself."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if SOURCE / "comm" / "mpi" not in path.parents]
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in paths for line in compared_names(path.read_text("utf-8"))]
    assert not found, "ask a field of core/backends.py or core/pipeline_schedules.py instead"


@pytest.mark.parametrize("line", ['x == "gloo"', 'plan.schedule in ("gpipe", "1f1b")', '{a, b} - {"gloo", "mpi"} == c', '"nccl" in name'])
def test_such_a_comparison_is_found(line: str) -> None:
    assert list(compared_names(line)) == [1]
    assert not list(compared_names('f(x, backend="gloo") or launcher == "mpi"'))


def test_the_tables_are_complete() -> None:
    assert list(BACKENDS) == list(get_args(Backend))
    assert list(SCHEDULES) == list(get_args(PipelineSchedule))
    for traits in BACKENDS.values():
        assert all(isinstance(getattr(torch, name), torch.dtype) for name in traits.dtypes or ())
        assert traits.priced_like in ("", *BACKENDS)


def test_the_default_backend_follows_the_devices() -> None:
    assert (backend_for("cpu"), backend_for("cuda"), backend_for("cuda", ("cuda:0", "cpu"))) == ("gloo", "nccl", "gloo")


def test_a_backend_that_is_not_listed_is_taken_as_plain() -> None:
    traits = backend_traits("ucc")
    assert traits.devices == ("cpu", "cuda") and traits.dtypes is None and not traits.routable and not traits.launchers and traits.is_installed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_is_among_those_of_its_rank(schedule: str) -> None:
    traits = schedule_traits(schedule)
    for ranks in (1, 2, 3, 5):
        for each in (1, 2, 3, 4):
            for rank in range(ranks):
                stages = traits.stages_of(rank, ranks, each)
                assert len(stages) == each and all(traits.rank_of(stage, ranks) == rank for stage in stages) and stages == tuple(sorted(stages))
