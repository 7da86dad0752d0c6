"""Pipelines cut from the dataflow: equal to one device, and counted, under every schedule and with every other axis."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import _backward

from meshwright.core.mesh import Mesh
from meshwright.core.serialization import to_data
from meshwright.launch import RankFailure
from tests.procs.plan_cases import FAMILIES, ZOO, check, model_of, spread

PIPELINED = (*ZOO, *FAMILIES)


@pytest.mark.parametrize("name", PIPELINED)
def test_two_stages_are_equal_to_one_device(pool: Any, name: str) -> None:
    model = model_of(name)
    check(pool, model, *spread(model, Mesh(pp=2), micro=2))


@pytest.mark.parametrize(("schedule", "micro"), [("gpipe", 1), ("gpipe", 4), ("1f1b", 4), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 4)])
def test_every_schedule(pool: Any, schedule: str, micro: int) -> None:
    model = model_of("Llama", num_hidden_layers=4)
    check(pool, model, *spread(model, Mesh(pp=2), micro=micro, schedule=schedule))


@pytest.mark.parametrize(("mesh", "zero"), [(Mesh(pp=2), 0), (Mesh(pp=2, shard=2), 3)], ids=str)
def test_four_stages_a_rank(pool: Any, mesh: Mesh, zero: int) -> None:
    model = model_of("Llama", num_hidden_layers=8)
    check(pool, model, *spread(model, mesh, 8, zero=zero, micro=4, schedule="interleaved", each=4))


def test_a_probe_says_what_handing_over_costs(pool: Any) -> None:
    """On all ranks the same, and more than nothing: a millisecond or so, of which a plan makes one for each message."""
    found = pool.run("meshwright.orchestrate.rank_entrypoints:probe_rank", world=2, device="cpu", backend="gloo", threads=1, quick=True)
    costs = {layouts[0].fixed["p2p"] for layouts, _ in found}  # the first is of all ranks; others, of those that were found unlike
    assert len(costs) == 1 and 1e-5 < costs.pop() < 1.0


def test_backward_in_two_keeps_parameters_that_no_input_of_their_stage_leads_to(pool: Any) -> None:
    """T5's decoder begins in a stage that ends its encoder: what the stage is given does not lead there, which torch 2.11 takes for a mistake."""
    refused = contextlib.nullcontext() if hasattr(_backward, "_autograd_grad_for_inputs") else pytest.raises(RankFailure, match="use interleaved")
    with refused:
        check(pool, model_of("T5"), *spread(model_of("T5"), Mesh(pp=2), 3, micro=3, schedule="zero_bubble"))


@pytest.mark.parametrize(
    ("name", "mesh", "zero", "schedule", "recompute"),
    [
        ("gpt-tiny", Mesh(pp=2, dp=2), 0, "1f1b", "none"),
        ("gpt-tiny", Mesh(pp=2, shard=2), 1, "gpipe", "full"),
        ("Llama", Mesh(pp=2, shard=2), 2, "1f1b", "none"),
        ("llama-tiny", Mesh(pp=2, shard=2), 3, "1f1b", "none"),
        ("GPT2", Mesh(pp=2, shard=2), 3, "gpipe", "none"),
        ("gpt-tiny", Mesh(pp=2, tp=(2,)), 0, "1f1b", "full"),
        ("Decoder", Mesh(pp=2, tp=(2,)), 0, "interleaved", "none"),
    ],
)
def test_with_other_axes(pool: Any, name: str, mesh: Mesh, zero: int, schedule: str, recompute: str) -> None:
    model = model_of(name)
    check(pool, model, *spread(model, mesh, 8, zero=zero, micro=2, schedule=schedule, recompute=recompute))


@pytest.mark.parametrize(
    ("name", "mesh", "zero"),
    [("gpt-tiny", Mesh(pp=2, dp=2, tp=(2,)), 0), ("Llama", Mesh(pp=2, shard=2, tp=(2,)), 3), ("T5", Mesh(pp=2, dp=2, tp=(2,)), 0)],
)
def test_three_axes_on_eight_ranks(large_pool: Any, name: str, mesh: Mesh, zero: int) -> None:
    model = model_of(name)
    check(large_pool, model, *spread(model, mesh, 8, zero=zero, micro=2))


@pytest.mark.parametrize(("mesh", "schedule"), [(Mesh(pp=2), "1f1b"), (Mesh(pp=2, dp=2), "interleaved")], ids=str)
def test_batches_of_several_sizes(pool: Any, mesh: Mesh, schedule: str) -> None:
    """Each size is looked at once, for training and for validation; what does not divide is left out of training, and rank 0 says so."""
    small = 2 * mesh.data_parallel_size
    large, odd = 2 * small, small + mesh.data_parallel_size
    plan, _ = spread(model_of("gpt-tiny"), mesh, large, micro=2, schedule=schedule)
    sizes = {"trained": [large, small, odd, large], "validated": [large, small, odd, large], "model": model_of("gpt-tiny")}
    ranks = pool.run("procs.user_jobs:uneven_batches", world=plan.world, plan=to_data(plan), **sizes)
    alone = replace(plan, mesh=Mesh(), stages=(), micro_batches=1)
    single = pool.run("procs.user_jobs:uneven_batches", world=1, plan=to_data(alone), **{**sizes, "trained": [large, small, large]})[0]
    for rank, mine in enumerate(ranks):
        assert mine["losses"] == pytest.approx(single["losses"], rel=1e-9)
        assert mine["looks"] == 2 + 3
        degree = mesh.data_parallel_size
        left_out = f"a batch of {odd} samples is skipped: it cannot be split over {degree} data ranks with 2 equal micro-batches each"
        assert (left_out in mine["said"]) == (rank == 0)


@pytest.mark.parametrize(
    ("mesh", "zero", "guilty"), [(Mesh(tp=(2,)), 0, 1), (Mesh(pp=2), 0, 1), (Mesh(pp=2, dp=2), 0, 2), (Mesh(shard=2, tp=(2,)), 3, 3)], ids=str
)
def test_a_failure_in_any_rank_ends_all_of_them(pool: Any, mesh: Mesh, zero: int, guilty: int) -> None:
    model = model_of("llama-tiny")
    plan, _ = spread(model, mesh, 8, zero=zero, micro=2)
    with pytest.raises(RankFailure) as failure:
        pool.run("procs.jobs:failing_rank", world=plan.world, plan=to_data(plan), model=model, guilty=guilty)
    since = time.time() - float(re.findall(r"boom at ([0-9.]+)", str(failure.value.fault.traceback))[0])
    assert failure.value.fault.rank == guilty and since < 60
