"""The ledger as a property, without processes: one process is any rank of any world on torch's fake process group, whose collectives and
sends do nothing. Values are garbage there; names, groups, calls and bytes of start-up and of every step must be what the plan says.

`make test` draws a few dozen plans of up to eight ranks; `make prove` draws as many as MESHWRIGHT_DRAWS says, of transformers' models too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from tests.procs.axis_plans import NAMES, cases
from tests.procs.jobs import build, global_batch, ledger_of, make_optimizer
from tests.procs.plan_cases import DTYPES, counted, listed, model_of, spread
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import OVERLAPS, BalancePolicy, Plan, SyncPolicy
from meshwright.execute.pipeline_parallel import _RecordedStage
from meshwright.execute.session import Session

DRAWS = int(os.environ.get("MESHWRIGHT_DRAWS", "0"))
SMALL = ("gpt-tiny", "llama-tiny", "vae", "dlrm-tiny")
DEEP = {"sizes": [16] * 9, "activation": "gelu", "norm": False, "masked": True}
Case = tuple[dict[str, Any], Plan, Any, float | None, tuple[int, ...]]


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process is one of `world` ranks that do not exist. torch's pipeline schedules let neighbours vote on whether shapes are known
    beforehand; a vote that nobody sent would say no."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    agreed = {name: lambda *_, **__: torch.ones(1, dtype=torch.int32) for name in ("_warmup_forward_vote", "_warmup_backward_result")}
    try:
        with patch.multiple(_RecordedStage, create=True, **agreed):
            yield
    finally:
        dist.destroy_process_group()


def check_rank(model: dict[str, Any], plan: Plan, profile: Any, clip: float | None, rank: int) -> None:
    """Start-up and two steps of one rank against the plan's own ledger of it."""
    kind = DTYPES[plan.memory.precision]
    with as_rank(rank, plan.world):
        network, loss = build(model, kind, 0)
        session = Session(plan, network, make_optimizer("sgd", network), clip=clip)
        assert counted(ledger_of(session)) == listed(plan, profile, rank, "start-up")
        first, count = plan.sample_range(plan.mesh.data_rank(rank))
        whole = global_batch(model, plan.global_batch, 0, kind)
        for _ in range(2):
            session.step({k: v[first : first + count] for k, v in whole.items()}, loss)
            assert counted(ledger_of(session)) == listed(plan, profile, rank, "step", clip=clip is not None)


@st.composite
def any_rank(draw: st.DrawFn, most: int, names: tuple[str, ...]) -> Case:
    """A legal plan with buckets of any size, clipped or not, for data ranks with unequal shares too; and some ranks of its world."""
    model, plan, profile = draw(cases(most, "fp32", names))
    sizes = st.sampled_from([100, 5_000, 2**20])
    plan = replace(plan, sync=SyncPolicy(draw(sizes), draw(sizes), overlap=draw(st.sampled_from([(), ("inputs",), OVERLAPS]))))
    if plan.world == plan.mesh.data_parallel_size and draw(st.booleans()):
        shares = tuple(plan.micro_batches + draw(st.integers(0, 2)) for _ in range(plan.world))
        plan = replace(plan, global_batch=sum(shares), balance=BalancePolicy(shares))
    ranks = {draw(st.sampled_from([0, plan.world - 1])), draw(st.integers(0, plan.world - 1))}
    return model, plan, profile, draw(st.sampled_from([None, 0.5])), tuple(sorted(ranks))


@given(case=any_rank(8, (*NAMES, "vae-conv", "dlrm-tiny") if DRAWS else SMALL))
@settings(max_examples=DRAWS or 16, deadline=None, derandomize=not DRAWS, suppress_health_check=list(HealthCheck), print_blob=True)
def test_every_rank_does_what_the_plan_lists(case: Case) -> None:
    *what, ranks = case
    try:
        for rank in ranks:
            check_rank(*what, rank)
    except RequestError as refused:  # for what only the live model tells
        note(f"refused: {refused}")
        reject()


@pytest.mark.parametrize(
    ("model", "mesh", "how"),
    [
        ({"zoo": "llama-tiny"}, Mesh(pp=2, dp=2, shard=2, tp=(2,)), {"zero": 2, "micro": 2}),
        ({"zoo": "gpt-tiny"}, Mesh(dp=2, shard=8, tp=(4,)), {"zero": 3, "micro": 2, "recompute": "full"}),
        (DEEP, Mesh(pp=4, dp=2, shard=2, tp=(4,)), {"zero": 1, "micro": 4, "schedule": "gpipe"}),
        (DEEP, Mesh(pp=4, shard=4, tp=(4,)), {"zero": 3, "micro": 4}),
        ({"zoo": "gpt-tiny"}, Mesh(pp=2, shard=2, tp=(2, 2)), {"zero": 3, "micro": 2}),
        (model_of("T5"), Mesh(shard=2, tp=(2,)), {"zero": 3, "micro": 1}),  # the encoder's output enters all layers of the decoder at once
        ({"zoo": "llama-tiny"}, Mesh(pp=2, shard=2, cp=2, tp=(2,)), {"zero": 3, "micro": 2, "recompute": "selective"}),
    ],
    ids=str,
)
def test_large_worlds(model: dict[str, Any], mesh: Mesh, how: dict[str, Any]) -> None:
    plan, profile = spread(model, mesh, mesh.data_parallel_size * how["micro"], precision="fp32", **how)
    for rank in (0, mesh.size // 2 + 1, mesh.size - 1):
        check_rank(model, plan, profile, 0.5, rank)


def test_what_is_not_learned_crosses_one_way_only() -> None:
    """T5's decoder hands a bias on that is made from nothing but shapes: it is sent forward, and no gradient of it comes back."""
    plan, profile = spread(model_of("T5"), Mesh(pp=2), 4, micro=4, schedule="interleaved", precision="fp32")
    assert {carry.needs_grad for stage in plan.stages for carry in stage.boundary_activations} == {True, False}
    for rank in range(2):
        check_rank(model_of("T5"), plan, profile, None, rank)


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_recomputing_a_block_goes_as_far_as_what_it_keeps_last(activation: str) -> None:
    """ReLU and tanh keep what they give out, at the very end of a block, so the reduction before them runs again; GELU keeps what it is given."""
    model = {"sizes": [4, 4, 4], "activation": activation, "norm": False}
    plan, profile = spread(model, Mesh(tp=(2,)), recompute="full", precision="fp32")
    assert plan.memory.units == ("0", "1") and plan.tensor.reduce_sites
    check_rank(model, plan, profile, None, 1)


def test_layers_of_one_rank_that_share_a_parameter_are_refused_under_zero_3_in_a_pipeline() -> None:
    """When the plan is made, and again by every rank, whose plan may come from a file."""
    shares = r"embed_tokens and .* share a parameter on one pipeline rank: use zero=1"
    with pytest.raises(RequestError, match=shares):
        spread(model_of("T5"), Mesh(pp=2, shard=2), 4, zero=3, micro=2, precision="fp32")
    plan, profile = spread(model_of("T5"), Mesh(pp=2, shard=2), 4, zero=1, micro=2, precision="fp32")
    plan = replace(plan, memory=replace(plan.memory, zero=3))
    for rank in range(4):
        with pytest.raises(RequestError, match=shares):
            check_rank(model_of("T5"), plan, profile, None, rank)


def test_no_stage_begins_with_a_module_that_does_nothing() -> None:
    """GPT-2's dropout of nothing gives what it is given, and ends where it begins: whether a value was made before it could not be told."""
    model = {"family": "GPT2", "positions": 16, "loss": "labels", "changes": {}}
    plan, profile = spread(model, Mesh(pp=2, cp=2), 4, micro=2, schedule="zero_bubble", precision="fp32")
    assert plan.stages[1].entry == "transformer.h.0"
    check_rank(model, plan, profile, None, 0)


def test_sizes_in_a_modules_code_are_not_those_of_modules_inside() -> None:
    """GPT-2 views its last hidden states by a number of positions that its layers use for all of them."""
    plan, profile = spread(model_of("GPT2"), Mesh(pp=2, tp=(2,)), 2, micro=2, sequence=True, precision="fp32")
    assert any(r.module == "transformer" for r in plan.tensor.size_rewrites)
    for rank in range(4):
        check_rank(model_of("GPT2"), plan, profile, None, rank)


def test_a_stage_may_hold_no_parameters() -> None:
    model = {"sizes": [2, 2, 3], "activation": "relu", "norm": False, "masked": False}
    plan, profile = spread(model, Mesh(pp=2, tp=(2,)), 1, schedule="gpipe", precision="fp32")
    assert "1.1" in plan.stages[1].layers
    for rank in (0, 2):
        check_rank(model, plan, profile, None, rank)


def test_a_stage_that_gives_a_view_is_run_under_zero_bubble() -> None:
    plan, profile = spread({"zoo": "cosmoflow-tiny"}, Mesh(pp=2, tp=(2,)), 2, micro=2, schedule="zero_bubble", precision="fp32")
    check_rank({"zoo": "cosmoflow-tiny"}, plan, profile, None, 0)


def test_what_zero_bubble_cannot_do_is_said_in_one_line() -> None:
    plan, profile = spread(model_of("T5"), Mesh(pp=2, tp=(2,)), 2, micro=2, schedule="zero_bubble", precision="fp32")
    with pytest.raises(RequestError, match="use interleaved"):
        check_rank(model_of("T5"), plan, profile, None, 2)
    with pytest.raises(RequestError, match="use interleaved"):
        spread(model_of("T5"), Mesh(pp=2), 2, micro=2, schedule="zero_bubble", recompute="full", precision="fp32")
