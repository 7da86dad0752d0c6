"""A user's own strategy: what it may change, how that is told, and one clear line for everything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import blocks, calibration, cluster

import meshwright as mw
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan, SyncPolicy
from meshwright.core.plan_strategy import Strategy, as_strategy, differences
from meshwright.core.workload import Workload
from meshwright.orchestrate import Orchestrator, RunConfig, calibrate
from meshwright.orchestrate.user_strategy import apply_strategy, load_strategy
from meshwright.plan import Constraints, Ranking, rank_plans

SOURCE = """
from dataclasses import replace
import meshwright as mw

@mw.strategy("small-buckets")
def shrink(plan, profile, cluster):
    return replace(plan, sync=replace(plan.sync, bucket_bytes=1000 * len(profile.layers), first_bucket_bytes=1000))

def recompute(plan, profile, cluster):
    return replace(plan, memory=replace(plan.memory, recompute="full"))

def nothing(plan, profile, cluster):
    pass

def elsewhere(plan, profile, cluster):
    return replace(plan, mesh=mw.Mesh(dp=2 * plan.world))

def unlawful(plan, profile, cluster):
    return replace(plan, micro_batches=5)

number = 5
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    return "mine.py"


def ranked(devices: int = 2) -> Ranking:
    return rank_plans(blocks(4), cluster(devices, 80e9), Workload(64), calibration(devices), Constraints(world=devices, mesh=Mesh(dp=devices)))


def test_the_changed_plan_leads_with_its_own_estimate(file: str) -> None:
    before = ranked()
    after, line = apply_strategy(before, load_strategy(f"{file}:small-buckets"), lambda _: None)
    assert after.best.plan == replace(before.best.plan, sync=SyncPolicy(1000 * len(before.profile.layers), 1000))
    assert after.scored[1:] == before.scored
    assert after.best.estimate != before.best.estimate
    assert f"Strategy small-buckets changed sync.bucket_bytes {before.best.plan.sync.bucket_bytes} → " in line


@pytest.mark.parametrize("name", ["small-buckets", "shrink"])
def test_it_is_found_by_either_name_in_a_file_and_in_a_module(name: str, file: str) -> None:
    for place in (file, "mine"):
        found = load_strategy(f"{place}:{name}")
        assert (type(found), found.name) == (Strategy, "small-buckets")
    assert load_strategy(f"{file}:recompute").name == "recompute"  # any function of that form


def test_a_decorated_function_can_be_called_and_handed_over() -> None:
    @mw.strategy("same")
    def same(plan: Plan, profile: Any, cluster: Any) -> Plan:
        return plan

    before = ranked()
    assert same(before.best.plan, None, None) is before.best.plan  # type: ignore[arg-type]
    assert as_strategy(same, "here") is same
    after, line = apply_strategy(before, same, lambda _: None)
    assert (after, line) == (before, "Strategy same did not change the best plan.")


def test_differences_name_fields_and_leave_long_values_out() -> None:
    plan = Plan("m", 8, Mesh(dp=2))
    other = replace(plan, mesh=Mesh(tp=(2,)), memory=replace(plan.memory, recompute="full", units=tuple(f"blocks.{i}" for i in range(20))))
    assert differences(plan, other) == ["mesh.dp 2 → 1", "mesh.tp 1 → 2", "memory.units", "memory.recompute none → full"]


MISTAKES = {
    "file": ("missing.py:x", "missing.py: no such file"),
    "module": ("no.such.module:x", "no.such.module:x: cannot import no.such.module: ModuleNotFoundError: No module named 'no'"),
    "name": ("mine.py:shrnk", "unknown strategy 'shrnk' in mine.py; did you mean 'shrink'?"),
    "no name": ("mine.py", "strategy=mine.py: write it as FILE.py:NAME or package.module:NAME"),
    "number": ("mine.py:number", "mine.py:number is a int, not a function (plan, profile, cluster) -> Plan"),
    "nothing": ("mine.py:nothing", "strategy nothing returned NoneType: it must return a Plan"),
    "world": ("mine.py:elsewhere", "strategy elsewhere changed world=2 to world=4: keep the mesh's size"),
    "not a plan": ("mine.py:unlawful", "strategy unlawful: global batch 64 does not divide into 2 data ranks × 5 micro-batches"),
    "raises": ("math:sqrt", "strategy sqrt raised TypeError: math.sqrt() takes exactly one argument"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake: str, file: str) -> None:
    reference, expected = MISTAKES[mistake]
    with pytest.raises(RequestError) as caught:
        apply_strategy(ranked(), load_strategy(reference), lambda _: None)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


@pytest.fixture
def orchestrator(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Orchestrator]:
    """On a machine of CPUs that was measured before, so that nothing is probed and no process is started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(Orchestrator, "fork_server", lambda *_: None)

    def make(**settings: Any) -> Orchestrator:
        made = Orchestrator(RunConfig(model="vae", nproc=2, **settings), os.environ, lambda _: None)
        calibrate.save_to_cache(calibration(2), made.cluster, os.environ)
        return made

    return make


def test_a_run_takes_the_changed_plan(orchestrator: Callable[..., Orchestrator], file: str) -> None:
    prepared = orchestrator(strategy=f"{file}:recompute", recompute="none").prepare()
    assert prepared.plan.memory.recompute == "full"
    assert prepared.why.startswith("Strategy recompute changed memory.recompute none → full: ")
    assert "\nChosen: " in prepared.why
    assert prepared.ranking is not None
    assert (prepared.plan, prepared.estimate) == (prepared.ranking.best.plan, prepared.ranking.best.estimate)


def test_a_given_plan_is_run_as_it_is(orchestrator: Callable[..., Orchestrator], file: str) -> None:
    Plan("vae", 64, Mesh(dp=2)).save(Path("plan.json"))
    with pytest.raises(RequestError, match="leave one of them out"):
        orchestrator(strategy=f"{file}:recompute", plan="plan.json").prepare()
