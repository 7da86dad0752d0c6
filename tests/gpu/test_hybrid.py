"""One job on a GPU and on CPUs, through gloo; and ranks that share the card. Equal to one CPU, with the planned communication."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy, MemoryPolicy, Plan
from meshwright.core.serialization import to_data
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.describe.profile_tracer import trace_module
from meshwright.plan.pipeline_planner import cut_stages
from meshwright.schedule import plan_ledger
from tests.procs.jobs import build, global_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]
MODEL: dict[str, Any] = {"zoo": "gpt-tiny"}
UNITS = ("blocks.0", "blocks.1")
BOTH, SHARED = ("cuda:0", "cpu"), ("cuda:0", "cuda:0")


@pytest.fixture(scope="module")
def alone(pool: Any) -> dict[str, Any]:
    plan = Plan("gpt-tiny", 8, memory=MemoryPolicy(precision="fp64"))
    return pool.run("procs.jobs:train_curve", world=1, plan=to_data(plan), model=MODEL, clip=1.0)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("places", [BOTH * 2, SHARED * 2], ids=["GPU and CPU", "one GPU"])
def test_gloo_conforms_wherever_tensors_are(pool: Any, places: tuple[str, ...]) -> None:
    found = pool.run("procs.collectives:over_gloo", world=4, full=False, places=places, timeout_s=200)
    assert [wrong for _, wrong in found] == [[]] * 4 and min(count for count, _ in found) > 1000


@pytest.mark.parametrize("places", [BOTH, BOTH[::-1], SHARED, ("cuda:0", "cpu", "cpu")], ids="+".join)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_and_zero(pool: Any, alone: dict[str, Any], places: tuple[str, ...], zero: int) -> None:
    """In float64, with unequal shares where the devices are unlike."""
    world = len(places)
    mesh = Mesh(shard=world) if zero else Mesh(dp=world)
    shares = (8 - world + 1, *(1,) * (world - 1))
    plan = Plan(
        "gpt-tiny", 8, mesh, memory=MemoryPolicy(zero, UNITS, precision="fp64"), balance=BalancePolicy(shares), device="cuda", rank_devices=places
    )
    found = pool.run("procs.jobs:train_curve", world=world, plan=to_data(plan), model=MODEL, clip=1.0)
    for rank in found:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-9)


def test_a_pipeline_from_a_gpu_to_a_cpu(pool: Any, alone: dict[str, Any]) -> None:
    network, loss = build(MODEL, torch.float64, 0)
    batch = global_batch(MODEL, 8, 0, torch.float64)
    flow, profile = trace_module_dataflow(network, loss, batch, "fp64"), trace_module(network, loss, batch, name="gpt-tiny")
    plan = Plan(
        "gpt-tiny", 8, Mesh(pp=2), micro_batches=2, stages=cut_stages(flow, profile, 2), memory=MemoryPolicy(units=UNITS, precision="fp64"),
        device="cuda", rank_devices=BOTH,
    )  # fmt: skip
    found = pool.run("procs.jobs:train_curve", world=2, plan=to_data(plan), model=MODEL, clip=1.0)
    for number, rank in enumerate(found):
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-9)
        planned = {
            (line.name, line.op, line.group, line.calls, line.bytes) for line in plan_ledger(plan, profile, rank=number) if line.phase == "step"
        }
        assert planned == {(line["name"], line["op"], line["group"], line["calls"], line["bytes"]) for line in rank["ledger"]}
    assert found[-1]["losses"] == pytest.approx(alone["losses"], rel=1e-9)


def run(*arguments: str) -> dict[str, Any]:
    code = "import sys; from meshwright.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *arguments, "--json"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_by_command(tmp_path: Path) -> None:
    """`--devices 0,cpu,cpu`: both kinds are measured, and the GPU takes most of the batch."""
    found = run("train", "gpt-tiny", "--devices", "0,cpu,cpu", "--mesh", "dp=3", "--steps", "6", "--global-batch", "32", "--run-dir", str(tmp_path))
    plan = found["plan"]
    assert plan["rank_devices"] == ["cuda:0", "cpu", "cpu"] and plan["backend"] == "gloo"
    assert plan["balance"]["shares"][0] > max(plan["balance"]["shares"][1:])
    assert not found["faults"] and found["losses"][-1] < found["losses"][0]
    events = [json.loads(line) for file in Path(found["run"]).glob("events*.jsonl") for line in file.read_text().splitlines()]
    assert {e["data"]["device"] for e in events if e["kind"] == "start"} == {"cuda:0", "cpu"}
    assert all(not e["data"]["differences"] for e in events if e["kind"] == "ledger")


def test_a_shared_card_by_command(tmp_path: Path) -> None:
    found = run("train", "gpt-tiny", "--devices", "0,0", "--mesh", "shard=2", "--set", "zero=3", "--steps", "5", "--run-dir", str(tmp_path))
    assert found["plan"]["rank_devices"] == ["cuda:0", "cuda:0"] and len(found["losses"]) == 5
