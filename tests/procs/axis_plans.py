"""Hypothesis strategies: models and plans over every axis. What a plan or the planner refuses is drawn again."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import assume, note
from hypothesis import strategies as st

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from tests.procs.plan_cases import model_of, spread

NAMES = ("gpt-tiny", "llama-tiny", "vae", "cnn", "cosmoflow-tiny", "GPT2", "Llama", "Qwen3", "Bert", "T5", "ViT")
Case = tuple[dict[str, Any], Plan, Any]
Layout = tuple[Mesh, dict[str, Any]]


@st.composite
def models(draw: st.DrawFn, names: tuple[str, ...]) -> dict[str, Any]:
    """A perceptron of any shape, or a model that is known to the zoo or to users."""
    if draw(st.booleans()):
        norm = draw(st.booleans())
        sizes = draw(st.lists(st.integers(4 if norm else 2, 16), min_size=3, max_size=6))
        return {"sizes": sizes, "activation": draw(st.sampled_from(["relu", "gelu", "tanh"])), "norm": norm, "masked": draw(st.booleans())}
    name = draw(st.sampled_from(names))
    return {"zoo": name, "dropout": 0.2} if name == "gpt-tiny" and draw(st.booleans()) else model_of(name)


@st.composite
def layouts(draw: st.DrawFn, model: dict[str, Any], most: int) -> Layout:
    """A mesh of two to `most` ranks, and how a plan uses it."""
    degree = st.sampled_from([1, 1, 2, 2, 3, 4] if most > 4 else [1, 1, 2, 2, 4])
    grid = draw(st.one_of(degree.map(lambda n: (n,)), st.sampled_from([(2, 2), (2, 3)] if most > 4 else [(2, 2)])))
    attends = model.get("zoo") in ("gpt-tiny", "llama-tiny")
    mesh = Mesh(pp=draw(degree), dp=draw(degree), shard=draw(degree), cp=draw(degree) if attends else 1, tp=grid)
    assume(1 < mesh.size <= most and mesh.pp < 4)
    how = {
        "zero": draw(st.integers(1, 3)) if mesh.shard > 1 else 0,
        "micro": draw(st.integers(1, 4)),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"])),
        "sequence": "sizes" not in model
        and model.get("zoo") not in ("vae", "cnn")
        and len(grid) == 1 < grid[0]
        and mesh.cp == 1
        and draw(st.booleans()),
    }
    return mesh, how


def smallest_batch(*layouts: Layout) -> int:
    return math.lcm(*(mesh.data_parallel_size * how["micro"] for mesh, how in layouts))


def spread_or_refuse(model: dict[str, Any], layout: Layout, batch: int, precision: str) -> tuple[Plan, Any]:
    """The plan and the profile."""
    mesh, how = layout
    try:
        found = spread(model, mesh, batch, precision=precision, **how)
    except RequestError as refused:
        note(f"refused: {refused}")
        assume(False)
    assume(mesh.degree("tp") == 1 or len(found[0].tensor_policies) == len(mesh.tp))
    return found


@st.composite
def cases(draw: st.DrawFn, most: int, precision: str, names: tuple[str, ...] = NAMES) -> Case:
    """A model and a plan that is legal for it."""
    model = draw(models(names))
    layout = draw(layouts(model, most))
    return (model, *spread_or_refuse(model, layout, smallest_batch(layout) * draw(st.integers(1, 2)), precision))
