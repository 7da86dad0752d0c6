"""Losses with masked targets, BatchNorm and contrastive losses: as a plain loop on one device trains them, or said before the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.launch import RankFailure
from tests.procs import sample_models

SPLITS = [("dp=2", {}), ("dp=2", {"micro_batches": 2}), ("shard=2", {"zero": 3}), ("shard=2", {"zero": 1}), ("pp=2", {"micro_batches": 2})]


def run(pool: Any, kind: str, mesh: str = "", **constraints: Any) -> list[dict[str, Any]]:
    return pool.run("procs.sample_models:train", world=2, kind=kind, mesh=mesh, **constraints)  # type: ignore[no-any-return]


def assert_equal(found: list[dict[str, Any]], kind: str) -> None:
    losses, buffers = sample_models.trained_alone(kind)
    for result in found:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["buffers"] == pytest.approx(buffers, rel=1e-9)


@pytest.mark.parametrize(("mesh", "constraints"), SPLITS, ids=str)
@pytest.mark.parametrize("kind", ["cross entropy", "divided"])
def test_masked_means_equal_one_device(pool: Any, kind: str, mesh: str, constraints: dict[str, Any]) -> None:
    found = run(pool, kind, mesh, **constraints)
    assert_equal(found, kind)
    assert "not equal" not in found[0]["printed"]


@pytest.mark.parametrize("kind", ["weighted", "summed", "gpt2", "llama"])
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_weighted_summed_and_models_own_losses_equal_one_device(pool: Any, kind: str, mesh: str) -> None:
    assert_equal(run(pool, kind, mesh, micro_batches=2), kind)


def test_sums_in_a_loop_of_ones_own_and_another_loss_than_the_plans(pool: Any) -> None:
    losses, _ = sample_models.trained_alone("summed")
    torch.manual_seed(0)
    build, loss_fn = sample_models.KINDS["summed"]
    model = build()
    expected = [loss_fn(model, batch).item() for batch in sample_models.batches()]
    for found in pool.run("procs.sample_models:loop_over_sums", world=2):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["validation"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
        assert "made for a loss that is a sum over samples" in found["told"]


@pytest.mark.parametrize(("mesh", "micro_batches"), [("cp=2", 1), ("cp=2", 2), ("tp=2", 2)])
def test_ranks_that_split_positions_or_features(pool: Any, mesh: str, micro_batches: int) -> None:
    assert_equal(run(pool, "attending", mesh, micro_batches=micro_batches), "attending")


def test_unequal_shares_of_masked_targets(pool: Any) -> None:
    assert_equal(run(pool, "cross entropy", "dp=2", shares=(3, 5)), "cross entropy")


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_validation_is_the_mean_over_unmasked_targets(pool: Any, mesh: str) -> None:
    for result in run(pool, "cross entropy", mesh, validate=True):
        assert result["validation"] == pytest.approx(sample_models.validated_alone("cross entropy"), rel=1e-5)


def test_local_batch_norm_is_said(pool: Any) -> None:
    first, second = run(pool, "batch norm", "dp=2")
    assert "not equal to one device: BatchNorm (norm and 1 other) normalises each data rank's samples by themselves" in first["printed"]
    assert first["printed"].count("\n") == 2
    assert not second["printed"]
    assert "BatchNorm (norm and 1 other)" in first["why"]
    assert first["losses"] != pytest.approx(sample_models.trained_alone("batch norm")[0], rel=1e-3)


@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [("dp=2", {}), ("dp=2", {"shares": (3, 5)}), ("shard=2", {"zero": 3}), ("shard=2", {"zero": 2, "recompute": "full"})],
    ids=str,
)
def test_synced_batch_norm_equals_one_device(pool: Any, mesh: str, constraints: dict[str, Any]) -> None:
    found = run(pool, "batch norm", mesh, batch_norm="sync", **constraints)
    assert_equal(found, "batch norm")
    assert "not equal" not in found[0]["printed"]


def test_synced_batch_norm_is_refused_with_micro_batches(pool: Any) -> None:
    with pytest.raises(RankFailure, match="batchnorm=sync normalises a whole batch at once, and it has 2 micro-batches"):
        run(pool, "batch norm", "dp=2", batch_norm="sync", micro_batches=2)


def test_compared_samples_stay_together(pool: Any) -> None:
    found = run(pool, "contrastive")
    assert_equal(found, "contrastive")
    assert (found[0]["mesh"], found[0]["micro_batches"]) == ("tp=2", 1)
    assert "not equal" not in found[0]["printed"]


def test_compared_samples_that_the_user_splits_are_said(pool: Any) -> None:
    found = run(pool, "contrastive", "dp=2")
    assert "compares samples with each other" in found[0]["printed"]
    assert "samples=together" in found[0]["printed"]
    assert found[0]["losses"] != pytest.approx(sample_models.trained_alone("contrastive")[0], rel=1e-3)
