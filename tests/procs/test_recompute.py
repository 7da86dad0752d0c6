"""Selective recomputation on processes: equal to one device, and counted, with every other way of spreading a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from tests.procs.plan_cases import check, model_of, spread

DROPOUT = {"zoo": "gpt-tiny", "dropout": 0.2}


@pytest.mark.parametrize(
    ("model", "mesh", "zero", "micro"),
    [
        (DROPOUT, Mesh(), 0, 2),
        (DROPOUT, Mesh(tp=(2,)), 0, 1),
        (model_of("GPT2"), Mesh(tp=(2,)), 0, 1),
        (model_of("vae-conv"), Mesh(tp=(2,)), 0, 1),
        (DROPOUT, Mesh(shard=2), 3, 2),
        (DROPOUT, Mesh(pp=2), 0, 4),
        (model_of("llama-tiny"), Mesh(shard=2, tp=(2,)), 3, 2),
    ],
    ids=str,
)
def test_selective(pool: Any, model: dict[str, Any], mesh: Mesh, zero: int, micro: int) -> None:
    check(pool, model, *spread(model, mesh, 8, zero=zero, micro=micro, recompute="selective"))


def test_each_layer_in_its_own_way(pool: Any) -> None:
    """A collective is repeated in the layer that saves nothing, and in no other."""
    plan, profile = spread(DROPOUT, Mesh(tp=(2,)), 4)
    memory = replace(plan.memory, recompute="selective", layers={"blocks.0": "full"})
    check(pool, DROPOUT, replace(plan, memory=memory), profile)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("mesh", "zero", "recompute"), [(Mesh(shard=2), 3, "selective"), (Mesh(pp=2), 0, "selective"), (Mesh(tp=(2,)), 0, "full")], ids=str
)
def test_compiled_blocks(pool: Any, mesh: Mesh, zero: int, recompute: str) -> None:
    """Compiling takes its time."""
    model = model_of("gpt-tiny")
    plan, profile = spread(model, mesh, 4, zero=zero, micro=2 if mesh.pp > 1 else 1, recompute=recompute)
    check(pool, model, replace(plan, compile="blocks"), profile)
