"""Context parallelism, found from the dataflow: equal to one device, and counted, for the zoo and for families that users bring."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from tests.procs.plan_cases import check, model_of, spread


def sequences(family: str, positions: int = 16, loss: str = "labels", **changes: Any) -> dict[str, Any]:
    return {"family": family, "positions": positions, "loss": loss, "changes": changes}


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_the_zoo_on_four_ranks(pool: Any, name: str) -> None:
    model = model_of(name)
    plan, profile = spread(model, Mesh(cp=4))
    assert plan.context.chunks == 8
    check(pool, model, plan, profile)


PROVED = [pytest.param(name, marks=pytest.mark.prove) for name in ("Mistral", "Qwen2")]


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Qwen3", "Mixtral", "Bert", *PROVED])
def test_families_that_users_bring(pool: Any, family: str) -> None:
    model = sequences(family, 18 if family == "Llama" else 16)
    check(pool, model, *spread(model, Mesh(cp=2)))


def test_a_loss_of_the_models_own_that_shifts_labels(pool: Any) -> None:
    """Ranks have unequal numbers of targets then."""
    model = sequences("GPT2", loss="own")
    check(pool, model, *spread(model, Mesh(cp=2)))


@pytest.mark.parametrize(
    ("model", "mesh", "zero", "micro", "recompute"),
    [
        ({"zoo": "gpt-tiny", "dropout": 0.2}, Mesh(dp=2, cp=2), 0, 2, "none"),
        (sequences("Llama"), Mesh(shard=2, cp=2), 3, 1, "none"),
        (sequences("GPT2"), Mesh(shard=2, cp=2), 1, 2, "full"),
        (model_of("llama-tiny"), Mesh(shard=2, cp=2), 2, 1, "none"),
        (model_of("llama-tiny"), Mesh(cp=2, tp=(2,)), 0, 1, "full"),
        (sequences("Llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3), Mesh(cp=2, tp=(2,)), 0, 2, "none"),
        ({"zoo": "gpt-tiny", "dropout": 0.1}, Mesh(shard=2, cp=2), 3, 2, "full"),
        (sequences("Llama"), Mesh(pp=2, cp=2), 0, 2, "selective"),
        ({"zoo": "gpt-tiny", "dropout": 0.1}, Mesh(pp=2, cp=2), 0, 2, "full"),
        (sequences("Mixtral"), Mesh(cp=2, ep=2), 0, 1, "selective"),
    ],
)
def test_with_every_other_axis(pool: Any, model: dict[str, Any], mesh: Mesh, zero: int, micro: int, recompute: str) -> None:
    check(pool, model, *spread(model, mesh, 4, zero=zero, micro=micro, recompute=recompute))


@pytest.mark.parametrize("loop", [False, True], ids=["session", "own loop"])
def test_positions_made_in_every_way(pool: Any, loop: bool) -> None:
    """Three ranks, so twelve positions in six chunks; tables, slices, ranges and sizes in the model's own code."""
    single = pool.run("procs.context_jobs:every_way", world=1, loop=loop)[0]
    for mine in pool.run("procs.context_jobs:every_way", world=3, loop=loop):
        assert mine["losses"] == pytest.approx(single["losses"], rel=1e-9)
        assert mine["state"] == pytest.approx(single["state"], rel=1e-9, abs=1e-9)
