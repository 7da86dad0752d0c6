"""A run goes on where a checkpoint was made: bit for bit under the same plan, with the same values under any other."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy, MemoryPolicy, Plan, SyncPolicy
from meshwright.core.serialization import to_data
from tests.procs import axis_plans
from tests.procs.plan_cases import IN_FLOAT32, model_of, spread
from tests.procs.plans import models, plans

DTYPE = {"fp64": "float64", "fp32": "float32", "bf16": "float32", "fp16": "float32"}
SAVED, STEPS = 3, 6


def go_on(pool: Any, folder: Path, model: dict[str, Any], first: Plan, second: Plan, tolerance: float | None, **options: Any) -> dict[str, Any]:
    """Save under one plan, load under the other. A tolerance of None: the later losses are the same digits."""
    shutil.rmtree(folder, ignore_errors=True)
    dtype = DTYPE[first.memory.precision]
    saved = pool.run(
        "procs.checkpoint_jobs:train_and_save", world=first.world, plan=to_data(first), model=model, folder=str(folder), saves=[SAVED], steps=STEPS,
        dtype=dtype, **options,
    )  # fmt: skip
    assert [report["error"] for rank in saved for report in rank["reports"]] == [""] * first.world
    loaded = pool.run(
        "procs.checkpoint_jobs:load_and_train", world=second.world, plan=to_data(second), model=model, folder=str(folder), steps=STEPS, dtype=dtype,
        **options,
    )  # fmt: skip
    for rank in loaded:
        assert rank["loaded"] == saved[0]["digests"][SAVED], "the values that were loaded are not those that were saved"
        assert rank["differences"] == [] and rank["problems"] == [] and rank["step"] == SAVED
        if tolerance is None:
            assert rank["losses"] == saved[0]["losses"][SAVED:] and rank["final"] == saved[0]["final"]
        else:
            assert rank["losses"] == pytest.approx(saved[0]["losses"][SAVED:], rel=tolerance, abs=tolerance)
    return loaded[0]  # type: ignore[no-any-return]


@st.composite
def pairs(draw: st.DrawFn, precision: str = "fp64") -> tuple[dict[str, Any], Plan, Plan]:
    """A model, and two plans for the same global batch."""
    model = draw(models())
    first, second = draw(plans(model, precision)), draw(plans(model, precision))
    ranks = second.mesh.data_parallel_size
    assume(first.global_batch >= ranks)
    shares = [first.global_batch // ranks + (i < first.global_batch % ranks) for i in range(ranks)]
    balance = BalancePolicy(tuple(shares) if len(set(shares)) > 1 else (), second.balance.state_fractions)
    micro_batches = second.micro_batches if all(share % second.micro_batches == 0 for share in shares) else 1
    return model, first, replace(second, global_batch=first.global_batch, balance=balance, micro_batches=micro_batches)


QUICK = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@given(case=pairs(), optimizer=st.sampled_from(["adamw", "sgd"]))
@QUICK
def test_random_plans_go_on_under_others(pool: Any, ground: Path, case: tuple[dict[str, Any], Plan, Plan], optimizer: str) -> None:
    model, first, second = case
    go_on(pool, ground / "checkpoints", model, first, second, None if first == second else 1e-9, optimizer=optimizer)


@given(case=pairs("fp32"))
@settings(QUICK, max_examples=6)
def test_random_plans_go_on_bit_for_bit(pool: Any, ground: Path, case: tuple[dict[str, Any], Plan, Plan]) -> None:
    model, first, _ = case
    go_on(pool, ground / "checkpoints", model, first, first, None)


@pytest.mark.prove
@given(case=pairs(), optimizer=st.sampled_from(["adamw", "sgd"]))
@settings(QUICK, max_examples=100, derandomize=False)
def test_a_hundred_random_plans_go_on_under_others(pool: Any, ground: Path, case: tuple[dict[str, Any], Plan, Plan], optimizer: str) -> None:
    model, first, second = case
    go_on(pool, ground / "checkpoints", model, first, second, 1e-9, optimizer=optimizer)


@st.composite
def axis_pairs(draw: st.DrawFn, most: int) -> tuple[dict[str, Any], Plan, Plan]:
    """A model, and two plans over any axes, or one device, for the same global batch."""
    model = draw(axis_plans.models(axis_plans.NAMES))
    alone = (Mesh(), {"micro": 1})
    first, second = draw(axis_plans.layouts(model, most)), draw(st.one_of(st.just(alone), *[axis_plans.layouts(model, most)] * 3))
    batch = axis_plans.smallest_batch(first, second)
    assume(batch <= 24)
    planned = [axis_plans.spread_or_refuse(model, layout, batch, "fp64")[0] for layout in draw(st.permutations([first, second]))]
    return model, planned[0], planned[1]


def tolerance_of(model: dict[str, Any]) -> float:
    return 1e-4 if model.get("family") in IN_FLOAT32 else 1e-8


@given(case=axis_pairs(4), optimizer=st.sampled_from(["adamw", "sgd"]))
@QUICK
def test_random_plans_over_any_axes_go_on_under_others(pool: Any, ground: Path, case: tuple[dict[str, Any], Plan, Plan], optimizer: str) -> None:
    model, first, second = case
    go_on(pool, ground / "checkpoints", model, first, second, None if first == second else tolerance_of(model), optimizer=optimizer)


@pytest.mark.prove
@given(case=axis_pairs(8), optimizer=st.sampled_from(["adamw", "sgd"]))
@settings(QUICK, max_examples=100, derandomize=False)
def test_a_hundred_plans_over_any_axes_on_up_to_eight_ranks_go_on_under_others(
    large_pool: Any, ground: Path, case: tuple[dict[str, Any], Plan, Plan], optimizer: str
) -> None:
    model, first, second = case
    go_on(large_pool, ground / "checkpoints", model, first, second, None if first == second else tolerance_of(model), optimizer=optimizer)


@pytest.mark.prove
@given(case=axis_pairs(8))
@settings(QUICK, max_examples=50, derandomize=False)
def test_fifty_plans_over_any_axes_go_on_bit_for_bit(large_pool: Any, ground: Path, case: tuple[dict[str, Any], Plan, Plan]) -> None:
    model, first, _ = case
    go_on(large_pool, ground / "checkpoints", model, first, first, None)


DRAWING = {
    "dropout": {"family": "Bert", "changes": {"hidden_dropout_prob": 0.3}},
    "keyed dropout": {"zoo": "gpt-tiny", "dropout": 0.2},
    "batch norm": {"images": "resnet"},
    "noise": {"zoo": "vae"},
}


@pytest.mark.parametrize("how", [{"mesh": "dp=2"}, {"mesh": "shard=2", "zero": 3}, {"mesh": "tp=2"}, {"mesh": "pp=2", "micro": 2}], ids=str)
@pytest.mark.parametrize("name", DRAWING)
def test_what_is_drawn_and_averaged_goes_on_bit_for_bit(pool: Any, tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    """Random generators and BatchNorm's statistics are a part of the state."""
    if name == "batch norm" and how["mesh"] in ("tp=2", "pp=2"):
        pytest.skip("its layers are not split")
    model = DRAWING[name]
    plan, _ = spread(model, **{**how, "mesh": Mesh.parse(how["mesh"])}, batch=4, precision="fp64" if name == "batch norm" else "fp32")
    go_on(pool, tmp_path, model, plan, plan, None)


# Each row: the model, and how it is spread before and after.
AXES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("GPT2", {"mesh": "tp=2"}, {"mesh": "pp=2", "micro": 2}),  # fused q, k and v
    ("Llama", {"mesh": "tp=2,shard=2", "zero": 3}, {"mesh": "dp=2"}),
    ("gpt-tiny", {"mesh": "tp=2x2"}, {"mesh": "shard=3", "zero": 2}),
    ("Mixtral", {"mesh": "ep=2,dp=2"}, {"mesh": "tp=2"}),  # experts
    ("dlrm-tiny", {"mesh": "ep=3"}, {"mesh": "shard=2", "zero": 1}),  # tables
    ("T5", {"mesh": "pp=2,shard=2", "zero": 1, "micro": 2}, {"mesh": "dp=1"}),  # an embedding that stages share
    ("cnn", {"mesh": "dp=2"}, {"mesh": "shard=4", "zero": 3}),
    ("cosmoflow-tiny", {"mesh": "dp=2"}, {"mesh": "tp=2"}),
]


@pytest.mark.parametrize(("name", "before", "after"), AXES, ids=[f"{name}-{a['mesh']}-{b['mesh']}" for name, a, b in AXES])
def test_every_axis_goes_on_under_another(pool: Any, tmp_path: Path, name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    model = model_of(name)
    first, second = (spread(model, **{**how, "mesh": Mesh.parse(how["mesh"])}, batch=12)[0] for how in (before, after))
    tolerance = 1e-4 if name in IN_FLOAT32 else 1e-8
    go_on(pool, tmp_path, model, first, second, tolerance)
    go_on(pool, tmp_path, model, second, first, tolerance)


def test_the_same_plan_with_a_scaled_loss_compression_and_offload_goes_on_bit_for_bit(pool: Any, tmp_path: Path) -> None:
    model = {"sizes": [8, 16, 4], "activation": "tanh", "norm": True, "masked": True}
    two = Plan("test", 8, Mesh(dp=2), memory=MemoryPolicy(units=("0", "1"), precision="fp32"))
    go_on(
        pool,
        tmp_path,
        model,
        replace(two, memory=replace(two.memory, precision="fp16")),
        replace(two, memory=replace(two.memory, precision="fp16")),
        None,
    )
    squeezed = replace(two, sync=SyncPolicy(compression="powersgd", compression_rank=2))
    go_on(pool, tmp_path, model, squeezed, squeezed, None)
    sharded = replace(two, mesh=Mesh(shard=2), memory=MemoryPolicy(2, ("0", "1"), precision="fp32", offload="optimizer"))
    go_on(pool, tmp_path, model, sharded, sharded, None)
    go_on(pool, tmp_path, model, sharded, two, 1e-4)


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.prove)])
def test_a_process_killed_at_any_instant_of_a_save_leaves_the_old_state_or_the_new(pool: Any, tmp_path: Path, kills: int) -> None:
    found = pool.run("procs.checkpoint_jobs:killed_while_saving", world=1, folder=str(tmp_path), kills=kills, seed=kills)[0]
    assert found["kills"] == kills and len(set(found["steps"])) > kills // 3, "saves were hardly ever finished, or never interrupted"


def is_whole_and_goes_on(ranks: list[dict[str, Any]]) -> str:
    """Of three saves the second has failed: the others are whole. What it reported."""
    for rank in ranks:
        assert rank["steps"] == [1, 3] and rank["left"] == ["1", "3"] and rank["problems"] == [] and rank["is_same"]
        assert rank["errors"][0] == rank["errors"][2] == ""
    error = ranks[0]["errors"][1]
    assert "\n" not in error
    return str(error)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("fault", ["input/output error", "file too large"])
def test_a_save_that_the_disk_refuses_is_one_line_and_training_goes_on(pool: Any, tmp_path: Path, fault: str, where: int) -> None:
    plan = to_data(Plan("any", 8, Mesh(shard=2), memory=MemoryPolicy(1)))
    ranks = pool.run("procs.checkpoint_jobs:save_on_a_broken_disk", world=2, folder=str(tmp_path), plan=plan, fault=fault, where=where)
    error = is_whole_and_goes_on(ranks)
    assert error.startswith("the checkpoint of step 2 was not written: ") and fault in error.lower()


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_disk_that_is_full_or_read_only_is_one_line_and_training_goes_on(pool: Any, small_disk: Path, fault: str) -> None:
    plan = to_data(Plan("any", 8, Mesh(shard=2), memory=MemoryPolicy(1)))
    folder = small_disk / "checkpoints"
    error = is_whole_and_goes_on(
        pool.run("procs.checkpoint_jobs:save_on_a_broken_disk", world=2, folder=str(folder), plan=plan, fault=fault, where=0)
    )
    if fault == "full":
        assert re.fullmatch(rf"the checkpoint of step 2 needs \d.* MB, and 0 B are free in {folder}", error), error
    else:
        assert error == f"the checkpoint of step 2 cannot be written to {folder}: read-only file system"
