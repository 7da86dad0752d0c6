"""Plans are compared with one device before they train: bugs that are put back are caught, and samples that meet are told from wrong plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import to_data
from meshwright.core.verification import Verification
from meshwright.launch import RankFailure
from meshwright.orchestrate import verified_run

Command = Callable[..., tuple[str, str]]

BUGS = [
    ("scaled embedding", "tp=2", {}, "embedding without its own code", "the output of words (ScaledEmbedding)"),
    ("uncalled lists", "shard=2", {"zero": 3}, "unit that is never called", "has norm nan"),
    ("reused blocks", "tp=2", {"sequence": False}, "input hooked for each call", "the gradient of blocks.1."),
    ("scaled embedding", "shard=2", {"zero": 1}, "stepped shards not gathered", "the optimizer's step of "),
]


@pytest.mark.parametrize(("kind", "mesh", "constraints", "bug", "named"), BUGS, ids=[row[3] for row in BUGS])
def test_a_bug_that_is_put_back_is_caught(pool: Any, kind: str, mesh: str, constraints: Any, bug: str, named: str) -> None:
    for found in pool.run("procs.verify_jobs:verify_language", world=2, kind=kind, mesh=mesh, bug=bug, **constraints):
        assert found.verdict == "wrong"
        assert found.reason.startswith("under it the ") and named in found.reason and "on one device" in found.reason
    for found in pool.run("procs.verify_jobs:verify_language", world=2, kind=kind, mesh=mesh, **constraints):
        assert (found.verdict, found.reason) == ("equal", "")
        assert {c.quantity for c in found.comparisons} == {"loss", "output", "gradient", "gradient norm", "step"}


@pytest.mark.parametrize(
    ("mesh", "constraints"), [("dp=2,tp=2", {}), ("pp=2,tp=2", {}), ("pp=2,shard=2", {"zero": 3}), ("shard=2,tp=2", {"zero": 2})], ids=str
)
def test_plans_of_two_axes_are_equal(pool: Any, mesh: str, constraints: Any) -> None:
    found = pool.run("procs.verify_jobs:verify_language", world=4, kind="scaled embedding", mesh=mesh, **constraints)[0]
    assert (found.verdict, found.reason) == ("equal", "")


MEETINGS = [
    (False, "plain", "dp=2", {}, "equal", ""),
    (True, "plain", "dp=2", {}, "inexact", "samples meet in norm (BatchNorm1d)"),
    (True, "plain", "dp=2", {"micro_batches": 2}, "inexact", "samples meet in norm (BatchNorm1d)"),
    (True, "plain", "tp=2", {}, "equal", ""),
    (False, "masked", "shard=2", {"zero": 1}, "inexact", "samples meet in the loss"),
    (False, "noisy", "dp=2", {}, "not verified", "the model draws random numbers in forward"),
]


@pytest.mark.parametrize(("normalizes", "loss", "mesh", "constraints", "verdict", "reason"), MEETINGS, ids=str)
def test_samples_that_meet_are_told_from_wrong_plans(
    pool: Any, normalizes: bool, loss: str, mesh: str, constraints: Any, verdict: str, reason: str
) -> None:
    found = pool.run("procs.verify_jobs:verify_meeting", world=2, normalizes=normalizes, loss=loss, mesh=mesh, **constraints)[1]
    assert found.verdict == verdict
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(("mesh", "constraints"), [("dp=2", {"recompute": "full"}), ("shard=2", {"zero": 3}), ("tp=2", {})], ids=str)
def test_a_run_is_the_same_to_the_bit_with_and_without_verification(pool: Any, mesh: str, constraints: Any) -> None:
    runs = [pool.run("procs.verify_jobs:train_with", world=2, verified=verified, mesh=mesh, **constraints) for verified in (True, False)]
    for on, off in zip(*runs, strict=True):
        verified, given = on.pop("why"), off.pop("why")
        assert given.startswith("Given by the script.") and verified.endswith(given)
        assert verified.startswith("Verified in ") or "Not equal to one device: BatchNorm" in verified
        assert on == off


def test_the_next_best_plan_is_taken_and_said_and_known_the_next_time(pool: Any) -> None:
    bug = "embedding without its own code"
    first, second = pool.run("procs.verify_jobs:prepare_language", world=2, meshes=["tp=2", "dp=2"], bug=bug, times=2)[0]
    assert first.startswith("data parallel: Tensor parallel 2 was not used: under it the output of words (ScaledEmbedding)")
    assert "using data parallel instead" in first and "[2 calls]" in first
    assert "was not used" in second and "[2 calls]" in second  # both verdicts come from the cache


def test_a_wrong_plan_without_an_alternative_is_refused(pool: Any) -> None:
    message = r"^tensor parallel 2 is wrong for this model: under it the output of words .*--set verify=off"
    with pytest.raises(RankFailure, match=message) as refused:
        pool.run("procs.verify_jobs:prepare_language", world=2, meshes=["tp=2"], bug="embedding without its own code")
    assert refused.value.exit_code == 2


# -- models that do not fit beside themselves --

TRUNCATED = [
    ("dp=2", {}, 5.3, {"blocks.0": range(2, 8)}),
    ("dp=2", {}, 2.1, {"blocks.0": range(1, 8)}),
    ("shard=2", {"zero": 3}, 5.3, {"blocks.0": range(2, 8)}),
    ("tp=2", {"sequence": False}, 5.3, {"blocks.0": range(2, 8)}),
    ("tp=2", {"sequence": True}, 5.3, {"blocks.1": range(3, 8)}),  # block 0 splits the sequence
    ("pp=2", {"micro_batches": 2}, 5.3, {"blocks.0": range(1, 3), "blocks.4": range(6, 8)}),  # stages meet between blocks 3 and 4
]


@pytest.mark.parametrize(("mesh", "constraints", "copies", "stands_for"), TRUNCATED, ids=str)
def test_equal_blocks_stand_for_others_where_the_model_does_not_fit(pool: Any, mesh: str, constraints: Any, copies: float, stands_for: Any) -> None:
    job = "procs.verify_jobs:verify_deep"
    for found in pool.run(job, world=2, mesh=mesh, copies=copies, **constraints):
        assert (found.verdict, found.reason) == ("equal", "")
        assert found.stands_for == {kept: tuple(f"blocks.{i}" for i in left_out) for kept, left_out in stands_for.items()}
        assert not any(c.name.startswith("blocks.7.") for c in found.comparisons if c.quantity == "gradient")
    whole = pool.run(job, world=2, mesh=mesh, copies=9.0, **constraints)[0]
    assert whole.verdict == "equal" and not whole.stands_for and "blocks.7.up.weight" in {c.name for c in whole.comparisons}


def test_fewer_blocks_show_a_wrong_plan_and_where_none_fit_it_is_said(pool: Any) -> None:
    job = "procs.verify_jobs:verify_deep"
    wrong = pool.run(job, world=2, mesh="tp=2", copies=5.3, sequence=False, bug="every second reduction missing")[0]
    assert wrong.verdict == "wrong" and wrong.stands_for
    none = pool.run(job, world=2, mesh="dp=2", copies=0.1)[1]
    assert none.verdict == "not verified" and "are free, with 7 blocks left out" in none.reason


@pytest.mark.parametrize(("mesh", "constraints"), [("dp=2", {}), ("shard=2", {"zero": 2}), ("shard=2", {"zero": 3}), ("tp=2", {})], ids=str)
def test_copies_are_freed_before_training(pool: Any, mesh: str, constraints: Any) -> None:
    before, after = pool.run("procs.verify_jobs:count_blocks", world=2, mesh=mesh, **constraints)[1]
    assert before == after


def test_a_plan_that_was_made_by_hand_is_verified_with_fewer_blocks(pool: Any) -> None:
    memory = MemoryPolicy(3, tuple(f"blocks.{i}" for i in range(8)))
    plan = to_data(Plan("deep", 8, Mesh(shard=2), memory=memory))
    found, _ = pool.run("procs.verify_jobs:verify_on", world=2, plan=plan, device="cpu", copies=2.1)[0]
    assert found.verdict == "equal" and found.describe_left_out().endswith("blocks.0 stood for blocks.1 … blocks.7 (7 equal blocks)")


# -- models that fail --

FAILURES = [
    ("dp=2", {}, (1,), "forward", "in the model (Failing)"),
    ("dp=2", {}, (0, 1), "forward", "in the model (Failing)"),
    ("dp=2", {}, (0,), "backward", ""),
    ("shard=2", {"zero": 3}, (1,), "forward", "in the model (Failing)"),
    ("tp=2", {"sequence": False}, (0,), "backward", ""),
    ("pp=2", {"micro_batches": 2}, (1,), "forward", "in Failing"),
]


@pytest.mark.parametrize(("mesh", "constraints", "ranks", "phase", "module"), FAILURES, ids=str)
def test_a_model_that_fails_under_a_plan_is_a_verdict_that_all_ranks_share(
    pool: Any, mesh: str, constraints: Any, ranks: tuple[int, ...], phase: str, module: str
) -> None:
    results = pool.run("procs.verify_jobs:verify_failing", world=2, mesh=mesh, ranks=ranks, phase=phase, **constraints)
    for found, seconds, lines in results:
        assert found.verdict == "failed" and found == replace(results[0][0], seconds=found.seconds)
        assert any(found.reason.startswith(f"under it rank {rank} fails with ArithmeticError: planted") for rank in ranks)
        assert module in found.reason
        assert seconds < 20.0  # ranks that wait do not wait for the timeout
        assert "was not used: under it rank" in lines and "using ZeRO-1 instead" in lines


# -- the command line --


def test_verify_prints_a_table(command: Command) -> None:
    out, err = command("verify", "gpt-tiny", "--mesh", "tp=2", "--seq", "16")
    assert "tensor parallel 2" in out and "gradient norm" in out and "equal, 2 samples in" in out
    assert "verifying tensor parallel 2" in err
    (row,) = json.loads(command("verify", "vae", "--mesh", "shard=2", "--set", "zero=2", "--json")[0])["plans"]
    assert row["verdict"] == "equal" and row["may_train"] and row["comparisons"][0]["quantity"] == "loss"


def test_verify_of_a_wrong_plan_ends_with_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_run, "verify_plan", lambda *_, **__: Verification("wrong", "under it the loss is 2, on one device 1"))
    assert "wrong: under it the loss is 2, on one device 1" in command("verify", "gpt-tiny", "--mesh", "tp=2", expect=1)[0]
    assert "needs no verification" in command("verify", "gpt-tiny", "--nproc", "1", expect=2)[1]


def test_train_takes_the_next_best_plan(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = verified_run.verify_plan

    def verify_plan(orchestrator: Any, prepared: Any, plan: Any) -> Verification:
        found = verified(orchestrator, prepared, plan)
        return replace(found, verdict="wrong", reason="under it nothing is right") if plan is prepared.plan else found

    monkeypatch.setattr(verified_run, "verify_plan", verify_plan)
    flags = ("train", "gpt-tiny", "--steps", "2", "--seq", "16", "--global-batch", "4", "--set", "validate_batches=0")
    out, err = command(*flags, "--nproc", "2", "--json")
    assert "was not used: under it nothing is right; using" in err
    chosen = json.loads(out)["plan"]
    assert chosen["mesh"] is not None
    assert "is wrong for this model: under it nothing is right" in command(*flags, "--mesh", "dp=2", "--set", "zero=0", "--json", expect=2)[1]
    assert "verif" not in command(*flags, "--mesh", "dp=2", "--set", "verify=off", "--json")[1]
