"""A script's own loop, prepared, trains as on one device; metrics count every sample once; what cannot be is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.launch import RankFailure
from tests.procs import own_loop

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": "dp=2"},
    "unequal shares": {"mesh": "dp=2", "shares": (5, 3)},
    "zero 1": {"mesh": "shard=2", "zero": 1},
    "zero 2": {"mesh": "shard=2", "zero": 2, "shares": (3, 5)},
    "zero 3": {"mesh": "shard=2", "zero": 3},
    "tp": {"mesh": "tp=2"},
    "offload": {"mesh": "dp=2", "offload": "optimizer"},
    "zero 1, offload": {"mesh": "shard=2", "zero": 1, "offload": "optimizer"},
}


def check(pool: Any, loop: str, plan: dict[str, Any], world: int = 2, **made: Any) -> None:
    expected, state = own_loop.alone(loop, **made), own_loop.state_alone(loop, **made)
    for mine in pool.run("procs.own_loop:run_loop", world=world, loop=loop, made=made, **plan):
        assert mine["found"] == pytest.approx(expected, rel=1e-9)
        assert mine["state"] == pytest.approx(state, rel=1e-9)


@pytest.mark.parametrize("loop", ["plain", "clipped", "accumulated", "scaled"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_of_ones_own_is_as_on_one_device(pool: Any, plan: str, loop: str) -> None:
    """The last batch is short, and ranks have different numbers of samples of it."""
    if (loop, plan) == ("scaled", "tp"):
        pytest.skip("a function with a backward of its own is not traced")
    check(pool, loop, PLANS[plan])


@pytest.mark.parametrize("plan", [{"mesh": "dp=2,tp=2"}, {"mesh": "dp=2,shard=2", "zero": 3}, {"mesh": "dp=2,shard=2", "zero": 1}], ids=str)
@pytest.mark.parametrize("loop", ["clipped", "accumulated"])
def test_on_four_ranks(pool: Any, plan: dict[str, Any], loop: str) -> None:
    """The last batch has one sample."""
    check(pool, loop, plan, world=4, count=25)


@pytest.mark.parametrize("loop", ["plain", "clipped", "accumulated"])
@pytest.mark.parametrize("plan", ["dp", "unequal shares", "zero 1", "zero 2", "zero 3", "offload"])
def test_parameters_that_no_backward_reaches_stay_as_they_are(pool: Any, plan: str, loop: str) -> None:
    """Weight decay and momentum would move them. Whether one is reached may differ between ranks and steps."""
    check(pool, loop, PLANS[plan], branches=True)


@pytest.mark.parametrize("plan", ["zero 1", "zero 3", "offload"])
def test_a_scaler_that_an_optimizers_kernel_reads(pool: Any, plan: str) -> None:
    """A fused optimizer unscales gradients itself, and skips a step by the flag that ranks agree on."""
    check(pool, "scaled", PLANS[plan], fused=True)


@pytest.mark.parametrize(("mesh", "world"), [("tp=2", 2), ("dp=2,tp=2", 4)])
def test_an_overflow_in_one_ranks_shard_skips_the_step_on_all(pool: Any, mesh: str, world: int) -> None:
    check(pool, "overflowing_shard", {"mesh": mesh}, world=world)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_gradient_of_nan_that_is_left_out_leaves_no_nan(pool: Any, zero: int) -> None:
    for first, second, third in pool.run("procs.own_loop:clipped_by_nan", world=3, zero=zero):
        assert second != second and third == first > 0


@pytest.mark.parametrize("plan", PLANS)
def test_no_sync_is_as_on_one_device(pool: Any, plan: str) -> None:
    check(pool, "without_sync", PLANS[plan], count=64)


def test_no_sync_sends_gradients_once_a_step_and_refuses_what_it_cannot_weight(pool: Any) -> None:
    sent = [pool.run("procs.own_loop:run_loop", world=2, loop=loop, made={"count": 64}, mesh="dp=2")[0]["sent"] for loop in ("plain", "without_sync")]
    assert sent[0] == 16 * sent[1] / 2  # 16 backwards of which all, or two, send
    with pytest.raises(RankFailure, match="no_sync: this batch is split unequally"):
        pool.run("procs.own_loop:run_loop", world=2, loop="without_sync", made={"count": 29}, mesh="dp=2")


@pytest.mark.parametrize("plan", ["dp", "zero 1", "zero 3"])
def test_a_closure(pool: Any, plan: str) -> None:
    check(pool, "with_closure", PLANS[plan])


def test_a_closure_is_refused_where_gradients_are_copied_before_the_step(pool: Any) -> None:
    with pytest.raises(RankFailure, match="call step\\(\\) without one"):
        pool.run("procs.own_loop:run_loop", world=2, loop="with_closure", **PLANS["offload"])


@pytest.mark.parametrize(("zero", "offload"), [(0, "none"), (1, "none"), (3, "none"), (0, "optimizer")])
def test_two_models_take_turns_on_one_loader(pool: Any, zero: int, offload: str) -> None:
    expected = own_loop.adversaries()
    for mine in pool.run("procs.own_loop:run_adversaries", world=2, zero=zero, offload=offload):
        assert mine == pytest.approx(expected, rel=1e-9)


def test_a_batch_of_fewer_samples_than_ranks_is_announced(pool: Any) -> None:
    first, second = pool.run("procs.own_loop:run_loop", world=2, loop="plain", made={"count": 25}, mesh="dp=2")
    assert first["said"].count("a batch of 1 sample for 2 data ranks: several ranks compute the same sample, which counts once") == 1
    assert not second["said"]


@pytest.mark.parametrize("mesh", ["dp=2", "shard=2", "tp=2", "dp=4", "dp=2,tp=2"])
def test_every_sample_of_a_validation_loop_counts_once(pool: Any, mesh: str) -> None:
    """Batches of 4, 4, 4 and 1 on up to four data ranks."""
    single = pool.run("procs.own_loop:evaluated", world=1, mesh="dp=1", count=13)[0]
    data_ranks = int(mesh[3]) if mesh.startswith("dp") else int(mesh[6:] or 1) if mesh.startswith("shard") else 1
    for mine in pool.run("procs.own_loop:evaluated", world=Mesh.parse(mesh).size, mesh=mesh, count=13):
        assert mine["seen"] == single["seen"] == list(range(13))
        assert (mine["right"], mine["length"]) == (single["right"], 13)
        assert mine["mean"] == pytest.approx(single["mean"], rel=1e-6)
        assert [lengths for lengths, _ in mine["scalars"]] == [[4 // data_ranks] * data_ranks] * 3 + [[1]]
        assert [total for _, total in mine["scalars"]] == pytest.approx([total for _, total in single["scalars"]], rel=1e-9)


@pytest.mark.parametrize(
    ("plan", "cut", "refused"),
    [
        (PLANS["dp"], "", ""),
        (PLANS["zero 1"], "", "zero=1"),
        (PLANS["zero 3"], "zero=3", "zero=3"),
        (PLANS["tp"], "tp=2", "tp=2"),
        ({"mesh": "pp=2"}, "pp=2", "pp=2"),
    ],
    ids=str,
)
def test_a_state_dict_is_whole_or_refused(pool: Any, plan: dict[str, Any], cut: str, refused: str) -> None:
    for mine in pool.run("procs.own_loop:guarded", world=2, **plan):
        for part in ("model", "part"):
            assert (f"state_dict: the model's parameters are split over ranks ({cut}): run.state_dict() gives" in mine[part]) == bool(cut), mine[part]
        assert ("load_state_dict: the model's parameters are split over ranks" in mine["load"]) == bool(cut)
        assert (f"state_dict: the optimizer's state is split over ranks ({refused})" in mine["optimizer"]) == bool(refused)
        for call in ("unpack", "call"):
            assert ("use run.step(batch, loss_fn), or a mesh without pp" in mine[call]) == ("pp" in plan["mesh"])
        assert mine["loss"][-1] < mine["loss"][0] * 1.5


def test_dropout_is_keyed_by_step_and_sample(pool: Any) -> None:
    single = pool.run("procs.own_loop:key_of_dropout", world=1, mesh="dp=1")[0]
    without = own_loop.alone("plain", count=25)
    assert single != pytest.approx(without, rel=1e-3)
    for mine in pool.run("procs.own_loop:key_of_dropout", world=2, mesh="dp=2"):
        assert mine == pytest.approx(single, rel=1e-9)


def test_only_buffers_that_differ_are_averaged_and_by_samples(pool: Any) -> None:
    for rank, found in enumerate(pool.run("procs.own_loop:averaged", world=3, shares=(5, 2, 1))):
        assert found["statistic"] == pytest.approx([(2 * 1 + 1 * 2) / 8] * 2)
        assert found["count"] == [rank] and found["flag"] == [True]
        assert found["table"] == [torch.tensor(0.1).item()] * 3  # to the bit


def test_running_statistics_are_equal_after_a_pass(pool: Any) -> None:
    first, second = pool.run("procs.own_loop:buffers", world=2)
    assert first == second and any(x for values in first for x in values)


@pytest.mark.parametrize(
    ("kind", "mesh", "constraints"),
    [("mixture", "ep=2", {}), ("mixture", "shard=2,ep=2", {"zero": 1}), ("tables", "ep=2", {}), ("resnet", "cp=2", {})],
    ids=str,
)
def test_experts_tables_and_blocks(pool: Any, kind: str, mesh: str, constraints: dict[str, Any]) -> None:
    sizes = [8, 8, 5] if mesh == "cp=2" else [8, 8, 4]
    expected = pool.run("procs.own_loop:other_models", world=1, kind=kind, mesh="", sizes=sizes)[0]
    for mine in pool.run("procs.own_loop:other_models", world=Mesh.parse(mesh).size, kind=kind, mesh=mesh, sizes=sizes, **constraints):
        assert mine == pytest.approx(expected, rel=1e-9)


def test_unequal_batches_of_experts_are_refused(pool: Any) -> None:
    with pytest.raises(
        RankFailure, match="an expert's gradient mixes the samples of ranks that have different numbers of them: leave out short batches"
    ):
        pool.run("procs.own_loop:other_models", world=2, kind="mixture", mesh="ep=2", sizes=[8, 5])


def test_what_would_go_wrong_is_said(pool: Any) -> None:
    for said in pool.run("procs.own_loop:refusals", world=2):
        assert "LBFGS decides by the loss of one rank" in said["lbfgs"]
        assert "set requires_grad before prepare" in said["unfrozen"]
        assert not said["inside"] and not said["named"]
        assert "name the loader, mw.mean(loss, train_loader)" in said["between"]
        assert "ranks have tensors of the shapes (2, 3), (2, 4): pad all dims but the first" in said["shapes"]
        assert "prepared for mesh dp=2, and this model's mesh tp=2 splits a batch differently" in said["split"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"mesh": "dp=1"}, {"mesh": "dp=1"}),
        ({"mesh": "dp=2"}, {"mesh": "dp=2"}),
        (PLANS["zero 3"], {"mesh": "dp=1"}),
        ({"mesh": "dp=1"}, PLANS["tp"]),
        (PLANS["zero 1"], PLANS["zero 3"]),
    ],
    ids=str,
)
def test_a_script_goes_on_in_the_middle_of_a_pass(pool: Any, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Every sample once, the schedule going on, the same losses: also under another plan."""
    worlds = [2 if plan["mesh"] != "dp=1" else 1 for plan in (before, after)]
    run = "procs.own_loop:save_and_go_on"
    whole = pool.run(run, world=worlds[0], folder=str(tmp_path), resume=False, **before)[0]
    rest = pool.run(run, world=worlds[1], folder=str(tmp_path), resume=True, **after)[0]
    assert rest["resumed"] == {"step": 7, "epoch": 1, "extra": {"best": 0.5}}
    assert rest["losses"] == (whole["losses"][7:] if before == after else pytest.approx(whole["losses"][7:], rel=1e-9))
    assert rest["seen"] == whole["seen"][7:]
    assert rest["sums"] == pytest.approx(whole["sums"], rel=1e-9)
    assert rest["raised"] == pytest.approx(rest["sums"], rel=1e-9)


@pytest.mark.parametrize("world", [1, 2])
def test_the_random_numbers_of_a_loaders_workers_go_on(pool: Any, tmp_path: Path, world: int) -> None:
    """A pass is entered again from its beginning, so that workers draw for the batches that are left what they would have drawn."""
    arguments = {"world": world, "folder": str(tmp_path), "mesh": f"dp={world}", "workers": 2}
    whole = pool.run("procs.own_loop:save_and_go_on", resume=False, **arguments)[0]
    rest = pool.run("procs.own_loop:save_and_go_on", resume=True, **arguments)[0]
    assert rest["losses"] == whole["losses"][7:] and rest["sums"] == whole["sums"]


@pytest.mark.parametrize("constraints", [{"mesh": "dp=2"}, {"mesh": "shard=2", "zero": 3}, {"mesh": "tp=2"}], ids=str)
def test_a_loop_of_ones_own_in_the_precision_that_prepare_is_given(pool: Any, constraints: dict[str, Any]) -> None:
    alone = pool.run("procs.own_loop:in_low_precision", world=1, mesh="dp=1")[0]
    for found in pool.run("procs.own_loop:in_low_precision", world=2, **constraints):
        assert found["precision"] == "bf16" and found["kept"] == ["torch.float32"]
        assert found["kinds"] == [("torch.bfloat16", "torch.bfloat16")] == alone["kinds"]
        assert found["losses"] == pytest.approx(alone["losses"], rel=0.02)
