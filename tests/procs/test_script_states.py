"""State in a user's own script: whole tensors under the model's own names, out of any plan and into it, and one line where that cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.checkpoint_folder import newest_whole

safetensors = pytest.importorskip("safetensors.torch")
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": "dp=2"},
    "zero 3": {"mesh": "shard=2", "zero": 3},
    "zero 1": {"mesh": "shard=2", "zero": 1},
    "tp": {"mesh": "tp=2"},
}


@pytest.mark.parametrize("how", [*PLANS, "pp"])
def test_whole_tensors_come_out_and_go_in(pool: Any, tmp_path: Path, how: str) -> None:
    found = pool.run("procs.script_states:after_parallelize", world=2, folder=str(tmp_path), **PLANS.get(how, {"mesh": "pp=2"}))
    for rank in found:
        assert rank["same"] and rank["raised"]
        assert rank["missing"] == "load_state_dict: there is no body.bias in it"
        assert rank["unknown"] == "load_state_dict: the model has no other"
        assert rank["shape"] == "load_state_dict: body.bias has the shape (7,) in it, and (6,) in the model"
        assert rank["no mapping"] == "load_state_dict takes a mapping of names to tensors, not a list"


@pytest.mark.parametrize("how", PLANS)
def test_what_is_exported_begins_another_run(pool: Any, tmp_path: Path, how: str) -> None:
    found = pool.run("procs.script_states:exported", world=2, folder=str(tmp_path / "weights"), **PLANS[how])
    assert all(rank["same"] for rank in found)
    assert sorted(safetensors.load_file(tmp_path / "weights" / "model.safetensors")) == sorted(found[0]["names"])


ENDING = """
import torch, meshwright as mw
net = torch.nn.Linear(3000, 3000)
run = mw.prepare(net, torch.optim.AdamW(net.parameters()), torch.utils.data.DataLoader(torch.ones(8, 3000), 8))
for batch in run.loader:
    run.step(batch, lambda model, x: model(x).square().mean())
run.save("saves", wait=False)
"""


def test_a_script_may_end_right_after_it_has_begun_a_save(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDING)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=120)
    assert newest_whole(tmp_path / "saves")[0] == 1


def test_what_a_script_cannot_go_on_with_is_one_line(pool: Any, tmp_path: Path) -> None:
    said, other = pool.run("procs.script_states:not_gone_on", world=2, folder=str(tmp_path / "checkpoints"))
    assert said == other and all("\n" not in line for line in said.values())
    assert said["what is extra"] == "extra.model is a object, which cannot be saved: a checkpoint holds numbers, texts, lists and tensors"
    assert said["nothing"] == "None"
    assert "it is of another model: the model has the parameter 0.weight, and it has not" in said["name"]
    assert "up.weight has the shape (32, 6) in it, and (48, 6) here" in said["shape"]
    assert "it was saved with AdamW, and the optimizer is Adam now: use AdamW" in said["optimizer"]
    middle = "the middle of a pass over 32 samples in batches of 8, and the loader has"
    assert f"{middle} 32 samples in batches of 4: use the same loader" in said["batch"]
    assert f"{middle} 40 samples in batches of 8: use the same loader" in said["data"]
    assert "it was saved with 1 schedulers, and prepare was given 2" in said["schedules"]
    assert "there is no whole checkpoint in it" in said["shard"] and "rank-00000.safetensors: no such file or directory" in said["shard"]
