"""The tutorial's strategies on processes: every one gives the loss curve of a single device on the same global batches."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.plan import Plan
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.orchestrate import Orchestrator
from meshwright.orchestrate.config import load_config
from meshwright.orchestrate.run_inputs import write_run_inputs

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
FILE = {"model_id": "tiny", "precision": "32", "global_batch_size": 8, "gradient_acc_steps": 2, "random_init": True}
# A rate that moves the losses within a few steps; short samples, of which some are cut.
FAST = {"learning_rate": 1e-2, "warmup_steps": 1, "seq": 200, "profile": False, "data": "x.json"}
RECORDS = [{"instruction": f"Add {n} and {n}.", "input": "" if n % 3 else "In digits.", "output": str(2 * n) * (1 + 4 * (n % 5))} for n in range(20)]


@pytest.fixture(scope="module")
def place(ground: Path) -> Path:
    pytest.importorskip("transformers")
    (ground / "tiny").mkdir()
    (ground / "tiny" / "config.json").write_text(json.dumps(TINY))
    (ground / "x.json").write_text(json.dumps(RECORDS))
    return ground


@pytest.fixture
def curve(place: Path, pool: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans a file here and trains it on the pool's warm workers: losses, gradient norms and the plan."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(Orchestrator, "fork_server", lambda *_: None)
    monkeypatch.setattr(Orchestrator, "calibration", lambda self: datasheet_calibration(self.cluster))

    def run(strategy: str, ranks: int, **keys: Any) -> tuple[list[float], Plan]:
        file, folder = place / f"{strategy}.json", place / f"run-{strategy}"
        file.write_text(json.dumps({**FILE, "strategy": strategy, **keys}))
        config = load_config(file, {**FAST, "data": str(place / "x.json"), "model_id": str(place / "tiny"), "epochs": 2}, lambda *_: ranks)
        prepared = Orchestrator(config, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, lambda _: None).prepare()
        folder.mkdir()
        write_run_inputs(folder, prepared)
        measured = pool.run("meshwright.orchestrate.rank_entrypoints:train_rank", world=prepared.plan.world, folder=str(folder))
        return measured[0]["losses"], prepared.plan

    return run


def test_every_strategy_gives_the_curve_of_one_device(curve: Any) -> None:
    alone, plan = curve("single_device", 1, gradient_acc_steps=1)
    assert (plan.world, plan.memory.recompute, plan.micro_batches) == (1, "full", 1)
    assert len(alone) == 4  # two epochs of two whole batches
    assert alone[-1] < 0.9 * alone[0]
    for strategy, keys, mesh in (("ddp", {}, "dp=2"), ("fsdp", {}, "shard=2"), ("axonn", {"tp_dimensions": [2, 1, 1]}, "tp=2")):
        losses, plan = curve(strategy, 2, **keys)
        assert (str(plan.mesh), plan.micro_batches, plan.memory.zero) == (mesh, 2, 3 if strategy == "fsdp" else 0)
        assert losses == pytest.approx(alone, rel=1e-4), strategy


def test_a_line_for_each_global_batch(place: Path, command: Any) -> None:
    (place / "own.json").write_text(json.dumps({**FILE, "strategy": "ddp"}))
    out, _ = command("train", "own.json", "--data", "x.json", "--nproc", "2", "--epochs", "1", "--set", "profile=false")
    lines = out.splitlines()
    assert len(lines) == 2
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(rf"{number}/2, [\d.]+ ms, lr [\d.e-]+, loss \d\.\d{{4}}, \d\.\d\d GB, grad norm [\d.]+", line), line
