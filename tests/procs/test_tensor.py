"""Tensor parallelism, found from the dataflow: equal to one device, and counted, for the zoo and for families that users bring."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serial import from_data, to_data
from meshwright.describe.flow import trace_module_flow
from meshwright.describe.trace import trace_module
from meshwright.plan.partition import choose_units
from meshwright.plan.tensor import choose_cuts
from meshwright.schedule import expand
from tests.procs.jobs import build, global_batch

ZOO = ("gpt-tiny", "llama-tiny", "vae", "vae-conv", "cnn", "cosmoflow-tiny", "dlrm-tiny")
FAMILIES = ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Bert", "T5", "ViT")


def model_of(name: str, **changes: Any) -> dict[str, Any]:
    return {"zoo": name} if name in ZOO else {"family": name, "changes": changes}


def plan_for(model: dict[str, Any], mesh: Mesh, batch: int = 4, *, zero: int = 0, micro: int = 1, recompute: str = "none") -> tuple[Plan, Any]:
    """A float64 plan with the cuts that the planner finds, and the profile to expand it with."""
    network, loss = build(model, torch.float64, 0)
    example = global_batch(model, 2, 0, torch.float64)
    profile = trace_module(network, loss, example, name="test", precision="fp64")
    ways = mesh.degree("tp")
    flow = trace_module_flow(network, loss, example, "fp64")
    memory = MemoryPolicy(zero, choose_units(profile), recompute, "fp64")  # type: ignore[arg-type]
    plan = Plan("test", batch, mesh, micro, memory=memory, tensor=choose_cuts(flow, ways))
    return from_data(Plan, to_data(plan), "plan"), profile


def check(pool: Any, model: dict[str, Any], plan: Plan, profile: Any, steps: int = 3) -> None:
    kwargs = {"model": model, "steps": steps, "clip": 0.5}
    spread = pool.run("procs.jobs:train_curve", world=plan.world, plan=to_data(plan), **kwargs)
    alone = replace(plan, mesh=Mesh(), micro_batches=1, memory=MemoryPolicy(precision="fp64"))
    single = pool.run("procs.jobs:train_curve", world=1, plan=to_data(alone), **kwargs)[0]
    for mine in spread:
        assert mine["losses"] == pytest.approx(single["losses"], rel=1e-9)
        assert mine["norms"] == pytest.approx(single["norms"], rel=1e-9)
    assert spread[0]["state"] == pytest.approx(single["state"], rel=1e-6, abs=1e-8)
    assert spread[0]["digest"] == spread[-1]["digest"]
    for rank, mine in enumerate(spread):
        assert counted(mine["ledger"]) == listed(plan, profile, rank)


def counted(ledger: list[dict[str, Any]]) -> Counter[tuple[str, str, int]]:
    found: Counter[tuple[str, str, int]] = Counter()
    for line in ledger:
        found[line["name"], line["op"], line["group"], "calls"] += line["calls"]  # type: ignore[index]
        found[line["name"], line["op"], line["group"], "bytes"] += line["bytes"]  # type: ignore[index]
    return found


def listed(plan: Plan, profile: Any, rank: int) -> Counter[tuple[str, str, int]]:
    """What the schedule says, under the names of the run, which do not tell micro-batches and phases apart."""
    found: Counter[tuple[str, str, int]] = Counter()
    for action in expand(plan, profile.at(plan.largest_micro_batch), clip=True).of(rank):
        group = plan.mesh.group_size(action.axis) if action.is_collective else 1
        if group > 1:
            name = "/".join(action.name.split("/")[:2]) if action.axis != "" else action.name
            found[name, action.op, group, "calls"] += 1  # type: ignore[index]
            found[name, action.op, group, "bytes"] += action.bytes  # type: ignore[index]
    return found


@pytest.mark.parametrize("name", [*ZOO, *FAMILIES])
def test_two_ways_are_equal_to_one_device(pool: Any, name: str) -> None:
    model = model_of(name)
    check(pool, model, *plan_for(model, Mesh(tp=(2,))))


def test_what_does_not_divide_is_dealt_out_unevenly(pool: Any) -> None:
    """Nine heads in three groups over two ranks: two groups here, one there."""
    sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 50}
    model = model_of("Llama", **sizes)
    plan, profile = plan_for(model, Mesh(tp=(2,)))
    heads = next(s for s in plan.tensor.strands if "q_proj" in s.name)
    assert heads.size == 3 and [heads.piece(r, 2)[1] for r in range(2)] == [2, 1]
    check(pool, model, plan, profile)


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
    check(pool, model, *plan_for(model, mesh, 8, zero=zero, micro=micro, recompute=recompute))
