"""Every axis at once, as a property: for random models, meshes, schedules and policies, one device's curve and the plan's own ledger.

`make test` draws a dozen on up to four ranks; `make prove` draws hundreds on up to eight. What a plan or the planner refuses is drawn again.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from tests.procs.plan_cases import check, model_of, spread

QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True)
LONG = settings(QUICK, max_examples=150, derandomize=False)
NAMES = ("gpt-tiny", "llama-tiny", "vae", "cnn", "cosmoflow-tiny", "GPT2", "Llama", "Qwen3", "Bert", "T5", "ViT")
Case = tuple[dict[str, Any], Plan, Any]


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
def cases(draw: st.DrawFn, most: int, precision: str, names: tuple[str, ...] = NAMES) -> Case:
    """A model and a plan that is legal for it."""
    model = draw(models(names))
    degree = st.sampled_from([1, 1, 2, 2, 3, 4] if most > 4 else [1, 1, 2, 2, 4])
    grid = draw(st.one_of(degree.map(lambda n: (n,)), st.sampled_from([(2, 2), (2, 3)] if most > 4 else [(2, 2)])))
    attends = model.get("zoo") in ("gpt-tiny", "llama-tiny")
    mesh = Mesh(pp=draw(degree), dp=draw(degree), shard=draw(degree), cp=draw(degree) if attends else 1, tp=grid)
    assume(1 < mesh.size <= most and mesh.pp < 4)
    micro = draw(st.integers(1, 4))
    how = {
        "zero": draw(st.integers(1, 3)) if mesh.shard > 1 else 0,
        "micro": micro,
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"])),
        "sequence": "sizes" not in model
        and model.get("zoo") not in ("vae", "cnn")
        and len(grid) == 1 < grid[0]
        and mesh.cp == 1
        and draw(st.booleans()),
    }
    batch = mesh.data_parallel_size * micro * draw(st.integers(1, 2))
    try:
        found = spread(model, mesh, batch, precision=precision, **how)  # type: ignore[arg-type]
    except RequestError as refused:
        note(f"refused: {refused}")
        assume(False)
    assume(mesh.degree("tp") == 1 or len(found[0].tensor_policies) == len(mesh.tp))
    return (model, *found)


@given(case=cases(4, "fp64"))
@QUICK
def test_a_dozen_plans_over_every_axis(pool: Any, case: Case) -> None:
    check(pool, *case, steps=5)


@pytest.mark.prove
@given(case=cases(8, "fp64"))
@LONG
def test_hundreds_of_plans_over_every_axis(large_pool: Any, case: Case) -> None:
    check(large_pool, *case, steps=20)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("model", "mesh", "how"),
    [
        (model_of("Mixtral"), Mesh(pp=2, shard=2, ep=2), {"zero": 3, "micro": 2}),
        (model_of("Mixtral"), Mesh(dp=2, shard=2, ep=2), {"zero": 3, "recompute": "selective"}),
        (model_of("Mixtral"), Mesh(pp=2, ep=2, tp=(2,)), {"micro": 2, "recompute": "full"}),
        (model_of("llama-tiny"), Mesh(pp=2, cp=2, tp=(2,)), {"micro": 2, "schedule": "interleaved"}),
        (model_of("gpt-tiny"), Mesh(pp=2, shard=2, cp=2), {"zero": 3, "micro": 2, "recompute": "selective"}),
        (model_of("gpt-tiny"), Mesh(pp=2, dp=2, tp=(2,)), {"micro": 2, "sequence": True}),
        (model_of("T5"), Mesh(shard=4, tp=(2,)), {"zero": 3, "sequence": True, "recompute": "full"}),
    ],
    ids=str,
)
def test_three_axes_at_once(large_pool: Any, model: dict[str, Any], mesh: Mesh, how: dict[str, Any]) -> None:
    check(large_pool, model, *spread(model, mesh, 8, **how))


@pytest.mark.prove
@given(case=cases(8, "fp32"))
@settings(LONG, max_examples=50)
def test_plans_over_every_axis_in_fp32(large_pool: Any, case: Case) -> None:
    check(large_pool, *case, steps=20)
