"""Fine-grained control: a user's own loop, strategy, plan file and collectives give what one process gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from meshwright.cli.main import main
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import to_data
from meshwright.launch import RankFailure


@pytest.fixture(scope="module")
def alone(pool: Any) -> list[float]:
    losses: list[float] = pool.run("procs.user_jobs:own_loop", world=1)[0]["losses"]
    assert losses[-1] < losses[2]
    return losses


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
def test_own_loop_after_parallelize(pool: Any, mesh: str, alone: list[float]) -> None:
    """torch's own verbs are enough, under tensor parallelism too; a last batch of one sample neither hangs nor skews."""
    ranks = pool.run("procs.user_jobs:own_loop", world=Mesh.parse(mesh).size, mesh=mesh)
    for mine in ranks:
        assert mine["losses"] == pytest.approx(alone, rel=1e-9)
        assert mine["plan"]["mesh"] == to_data(Mesh.parse(mesh))
        assert (mine["held"] < 0.7 * mine["whole"]) == ("tp" in mesh)


def test_a_strategy_may_leave_the_cuts_to_us(pool: Any, alone: list[float]) -> None:
    """It turns data into tensor parallelism with one `replace`; a short last batch goes through the prepared loader."""
    for mine in pool.run("procs.user_jobs:prepared_loop", world=2, strategy=True):
        assert mine["mesh"] == "tp=2"
        assert "Strategy to_tensor_parallel changed mesh" in mine["why"]
        assert mine["losses"] == pytest.approx(alone, rel=1e-6)  # the session reports losses in the plan's fp32


@pytest.mark.parametrize("zero", [0, 3])
def test_every_collective_shows_under_its_name(pool: Any, zero: Literal[0, 3]) -> None:
    """And a profiled step is the same step: FSDP2 must still find something to wait for."""
    exact = MemoryPolicy(precision="fp64")
    plan = Plan("t", 4, Mesh(shard=2) if zero else Mesh(dp=2), memory=replace(exact, zero=zero, units=("blocks.0", "blocks.1")))
    ranks = pool.run("procs.user_jobs:profiled_step", world=2, plan=to_data(plan))
    single = pool.run("procs.user_jobs:profiled_step", world=1, plan=to_data(Plan("t", 4, memory=exact)))[0]
    for mine in ranks:
        assert mine["counted"]
        assert mine["counted"] <= mine["shown"]
        assert any(name.endswith(" (wait)") for name in mine["shown"])
        assert mine["losses"] == pytest.approx(single["losses"], rel=1e-9)


def test_connect_gives_the_groups_of_a_mesh(pool: Any) -> None:
    every = pool.run("procs.user_jobs:connected", world=4, mesh="dp=*,tp=2")
    assert [e["tp"] for e in every] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [e["dp"] for e in every] == [e["data"] for e in every] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [e["shard"] for e in every] == [e["pp"] for e in every] == [[0], [1], [2], [3]]
    assert [e["data"] for e in pool.run("procs.user_jobs:connected", world=2, mesh=None)] == [[0, 1], [0, 1]]
    assert pool.run("procs.user_jobs:connected", world=1, mesh="dp=2,tp=2")[0]["world"] == [0]


def test_connect_refuses_a_mesh_of_another_size(pool: Any) -> None:
    with pytest.raises(RankFailure, match=r"mesh dp=4 has 4 ranks, 2 were started: start 4, or change the mesh"):
        pool.run("procs.user_jobs:connected", world=2, mesh="dp=4")


def test_a_plan_edited_by_hand_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of examples/README.md, with a smaller model."""
    monkeypatch.chdir(tmp_path)

    def meshwright(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--json"])
        out, err = capsys.readouterr()
        assert ended.value.code in (None, 0), err
        return json.loads(out)

    file = tmp_path / "plan.json"
    meshwright("plan", "gpt-tiny", "--mesh", "dp=2", "-o", "plan.json")
    plan = json.loads(file.read_text())
    assert (plan["micro_batches"], plan["memory"]["recompute"]) == (1, "none")
    plan["micro_batches"], plan["memory"]["recompute"], plan["sync"]["overlap"] = 4, "full", []
    file.write_text(json.dumps(plan))
    edited = meshwright("train", "gpt-tiny", "--plan", "plan.json", "--steps", "3")
    assert edited["plan"] == plan
    assert len(edited["measured"]["memory_bytes"]) == 2
    assert edited["losses"][-1] < edited["losses"][0]
