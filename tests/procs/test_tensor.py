"""Tensor parallelism, found from the dataflow: equal to one device, and counted, for the zoo and for families that users bring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.plan.tensor_planner import choose_tensor_grid
from tests.procs.plan_cases import FAMILIES, ZOO, check, model_of, spread


@pytest.mark.parametrize("name", [*ZOO, *FAMILIES, "Gated"])
def test_two_ways_are_equal_to_one_device(pool: Any, name: str) -> None:
    model = model_of(name)
    check(pool, model, *spread(model, Mesh(tp=(2,))))


def test_what_does_not_divide_is_dealt_out_unevenly(pool: Any) -> None:
    """Nine heads in three groups over two ranks: two groups here, one there."""
    model = model_of("Llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3, intermediate_size=50)
    plan, profile = spread(model, Mesh(tp=(2,)))
    heads = next(s for s in plan.tensor.sharded_dims if "q_proj" in s.name)
    assert heads.size == 3 and [heads.shard_range(r, 2)[1] for r in range(2)] == [2, 1]
    check(pool, model, plan, profile)


def test_validation_takes_no_short_cut(pool: Any) -> None:
    """torch's encoder layers compute in one call when nothing is trained, past the modules in which ranks meet."""
    model = model_of("Encoder")
    plan, _ = spread(model, Mesh(tp=(2,)))
    job = {"model": model, "trained": [4, 3], "validated": [4, 2]}
    ranks = pool.run("procs.user_jobs:uneven_batches", world=2, plan=to_data(plan), **job)
    single = pool.run("procs.user_jobs:uneven_batches", world=1, plan=to_data(replace(plan, mesh=Mesh())), **job)[0]
    for mine in ranks:
        assert mine["losses"] == pytest.approx(single["losses"], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "mesh", "zero", "micro", "recompute"),
    [
        ("gpt-tiny", Mesh(dp=2, tp=(2,)), 0, 2, "none"),
        ("gpt-tiny", Mesh(shard=2, tp=(2,)), 1, 1, "full"),
        ("Llama", Mesh(shard=2, tp=(2,)), 2, 2, "none"),
        ("GPT2", Mesh(shard=2, tp=(2,)), 3, 1, "none"),
        ("llama-tiny", Mesh(shard=2, tp=(2,)), 3, 2, "full"),
        ("gpt-tiny", Mesh(tp=(4,)), 0, 1, "none"),
    ],
)
def test_with_data_parallelism_and_zero(pool: Any, name: str, mesh: Mesh, zero: int, micro: int, recompute: str) -> None:
    model = model_of(name)
    check(pool, model, *spread(model, mesh, 8, zero=zero, micro=micro, recompute=recompute))


@pytest.mark.parametrize("name", ["gpt-tiny", "cnn", "GPT2", "Llama", "ViT"])
def test_a_grid_is_equal_to_one_device(pool: Any, name: str) -> None:
    model = model_of(name)
    check(pool, model, *spread(model, Mesh(tp=(2, 2)), recompute="full" if name == "gpt-tiny" else "none"))


def test_a_grid_deals_out_unevenly_along_both_dimensions(pool: Any) -> None:
    model = model_of("Llama", hidden_size=27, num_attention_heads=3, num_key_value_heads=3, head_dim=8, intermediate_size=45)
    check(pool, model, *spread(model, Mesh(tp=(2, 2))))


@pytest.mark.prove
@pytest.mark.parametrize("mesh", [Mesh(shard=2, tp=(2, 2)), Mesh(dp=2, tp=(2, 2)), Mesh(pp=2, tp=(2, 2))], ids=str)
def test_three_dimensions(large_pool: Any, mesh: Mesh) -> None:
    """The depth of a grid is the shard axis under zero=3."""
    for name in ("gpt-tiny", "llama-tiny", "GPT2"):
        check(large_pool, model_of(name), *spread(model_of(name), mesh, micro=mesh.pp, zero=3 if mesh.shard > 1 else 0))


@pytest.mark.prove
@pytest.mark.parametrize("mesh", [Mesh(tp=(2,)), Mesh(pp=2)], ids=str)
def test_compiled_blocks(pool: Any, mesh: Mesh) -> None:
    """Graphs are made for the parts between collectives; compiling takes its time."""
    model = model_of("llama-tiny")
    plan, profile = spread(model, mesh, 4, micro=2)
    check(pool, model, replace(plan, compile="blocks"), profile)


def test_dropout_is_the_same_on_all_ranks_of_a_group(pool: Any) -> None:
    """Ranks may have seeded themselves differently; what they all hold must stay the same on all."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Dropout(0.5), nn.LayerNorm(4))
    flow = trace_module_dataflow(model, lambda m, b: m(b["x"]).square().mean(), {"x": torch.zeros(2, 4)})
    plan = Plan("test", 4, Mesh(tp=(2,)), tensor=choose_tensor_grid(flow, (2,))[0])
    first, second = pool.run("procs.jobs:dropout_under_tensor_parallelism", world=2, plan=to_data(plan))
    assert first == second


SHARED = ("gpt-tiny", "Llama", "Mixtral", "Bert", "T5", "ViT", "Decoder")


@pytest.mark.parametrize("name", SHARED)
def test_positions_are_shared_between_cut_parts(pool: Any, name: str) -> None:
    model = model_of(name)
    plan, profile = spread(model, Mesh(tp=(2,)), sequence=True)
    assert plan.tensor.is_sequence_parallel
    check(pool, model, plan, profile)


@pytest.mark.parametrize(
    ("name", "mesh", "how"),
    [
        ("GPT2", Mesh(tp=(3,)), {"recompute": "full"}),  # ten positions over three ranks
        ("gpt-tiny", Mesh(dp=2, tp=(2,)), {"micro": 2, "recompute": "selective"}),
        ("llama-tiny", Mesh(shard=2, tp=(2,)), {"zero": 3, "recompute": "full"}),
        ("Llama", Mesh(pp=2, tp=(2,)), {"micro": 2}),
        ("gpt-tiny", Mesh(pp=2, tp=(2,)), {"micro": 4, "schedule": "zero_bubble"}),
    ],
    ids=str,
)
def test_shared_positions_beside_other_axes(pool: Any, name: str, mesh: Mesh, how: dict[str, Any]) -> None:
    model = {"zoo": name, "dropout": 0.2} if name == "gpt-tiny" else model_of(name)
    plan, profile = spread(model, mesh, 8, sequence=True, **how)
    assert plan.tensor.is_sequence_parallel and bool(plan.tensor.dropout_sites) == (name == "gpt-tiny")
    check(pool, model, plan, profile)


@pytest.mark.prove
def test_copies_stay_bit_equal_where_pieces_differ_in_size(large_pool: Any) -> None:
    """Five neurons over two ranks: buckets with pieces in them are of two sizes, and gloo adds up in an order that depends on the size."""
    model = {"sizes": [7, 5, 9, 5], "activation": "gelu", "norm": True, "masked": False}
    plan, profile = spread(model, Mesh(dp=3, tp=(2,)), 6)
    assert plan.tensor.sharded_dims
    check(large_pool, model, plan, profile, steps=20)
