"""Random models, as a property: whatever modules are reused, shared, frozen or written by hand, a plan trains the model as one device does, or is
refused with a reason.

`make test` draws a few; `make prove` draws hundreds.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.procs.random_parts import CORES, LINEAR_KINDS, NORM_KINDS

QUICK = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True)
LONG = settings(QUICK, max_examples=150, derandomize=False)
MESHES: dict[str, dict[str, Any]] = {
    "dp=2": {}, "shard=2": {"zero": 3}, "tp=2": {}, "pp=2": {},
}  # fmt: skip


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    """One block. Plain choices come first: hypothesis shrinks towards them."""
    heads = draw(st.sampled_from([2, 4]))
    fused = draw(st.sampled_from(["", "view", "chunk", "by head", "split"]))
    kv_heads = draw(st.sampled_from([n for n in (heads, 2, 1) if n <= heads])) if fused in ("", "split") else heads
    options = {
        "core": sorted(CORES), "linear": ["plain", "plain", *LINEAR_KINDS], "norm": sorted(NORM_KINDS), "bias": [True, False],
        "hidden": [16, 8, 12, 10],
        "gate": ["none", "two", "glu", "chunk", "split", "strided"], "inner_norm": ["none", "none", "none", "layer", "rms"],
        "attend": ["matmul", "sdpa", "einsum", "bmm", "grouped"], "attention_bias": ["none", "mask", "alibi", "alibi buffer", "relative"],
        "rotary": [False, True], "qk_norm": [False, True], "conv": ["full", "depthwise", "grouped", "multiplied", "down and up"],
        "join": ["add", "cat"], "mixes": [False, True], "torch_layer": ["attention", "encoder", "gru", "bilinear"], "gain": [False, True],
        "repeats": [1, 1, 1, 2], "residual": [True, False], "norm_first": [True, False], "extra": [False, True],
        "returns": ["tensor", "tuple", "dict", "dataclass"],
    }  # fmt: skip
    return {"heads": heads, "fused": fused, "kv_heads": kv_heads, **{key: draw(st.sampled_from(values)) for key, values in options.items()}}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    options = {
        "front": ["tokens", "features"], "scaled_embedding": [False, True], "tied": [False, True],
        "positions": ["none", "embedding", "parameter", "buffer"],
        "shape": ["plain", "plain", "skips", "towers", "encoder and decoder"], "shares": ["nothing", "norm", "core", "weights"],
        "frozen": ["nothing", "nothing", "first half", "last half", "every other", "matrices"], "keywords": [False, True],
        "returns": ["tensor", "dict", "tuple"],
    }  # fmt: skip
    drawn = draw(st.lists(blocks(), min_size=2, max_size=4))
    if draw(st.booleans()):  # blocks alike, as most models have them
        drawn = [drawn[0]] * len(drawn)
    again = draw(st.lists(st.integers(0, 3), max_size=2))
    return {"blocks": drawn, "again": again, **{key: draw(st.sampled_from(values)) for key, values in options.items()}}


def check(pool: Any, drawn: dict[str, Any], meshes: dict[str, dict[str, Any]], world: int = 2) -> None:
    for mesh, constraints in meshes.items():
        for found in pool.run("procs.random_models:compare", world=world, drawn=drawn, mesh=mesh, **constraints):
            assert found["status"] in ("equal", "refused"), (mesh, found)
            assert found["status"] == "equal" or found["why"], mesh


def block(**changes: Any) -> dict[str, Any]:
    """A plain block but for the changes."""
    attention = {"heads": 2, "kv_heads": 2, "fused": "", "attend": "matmul", "attention_bias": "none", "rotary": False, "qk_norm": False}
    layers = {"core": "mlp", "linear": "plain", "norm": "layer", "bias": True, "hidden": 16, "gate": "none", "inner_norm": "none", "conv": "full"}
    others = {"join": "add", "mixes": False, "torch_layer": "attention", "gain": False, "repeats": 1, "extra": False, "returns": "tensor"}
    return {**attention, **layers, **others, "residual": True, "norm_first": True, **changes}


def model(*drawn: dict[str, Any], **changes: Any) -> dict[str, Any]:
    plain = {"front": "tokens", "scaled_embedding": False, "tied": False, "positions": "none", "shape": "plain", "shares": "nothing"}
    return {"blocks": list(drawn), "again": [], **plain, "frozen": "nothing", "keywords": False, "returns": "tensor", **changes}


TWICE = block(), block()
FOUND = {
    "a norm in two blocks": (model(*TWICE, shares="norm"), MESHES),
    "frozen layers that two stages share": (model(*TWICE, *TWICE, shares="core", frozen="last half", again=[1, 1]), {"pp=2": {}}),
    "a value that a later tower takes": (model(*TWICE, *TWICE, shape="towers", positions="parameter"), {"pp=2": {}}),
    "gradients that are not contiguous": (model(*[block(norm="group")] * 2, shape="encoder and decoder", frozen="matrices"), {"pp=2": {}}),
    "blocks that begin with an identity": (model(*[block(norm="none", core="experts", gain=True)] * 3, shape="encoder and decoder"), {"pp=2": {}}),
    "layers inside layers": (model(block(), block(core="mixer", gain=True), block(core="mixer", norm="none", norm_first=False)), {"pp=2": {}}),
    "a subclass that returns a partial sum": (model(block(linear="clipped", bias=False, norm_first=False), block()), {"tp=2": {}}),
    "a number added to a partial sum": (model(block(linear="scaled", bias=False), block()), {"tp=2": {}}),
    "a frozen bias": (model(block(core="recurrence", mixes=True, hidden=10), block(), frozen="every other"), {"tp=2": {}}),
    "samples and heads in one dim": (model(*[block(core="attention", fused="split", heads=4, kv_heads=4, attend="bmm")] * 2), {"tp=2": {}}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_draws_have_found(pool: Any, name: str) -> None:
    drawn, meshes = FOUND[name]
    for mesh, constraints in meshes.items():
        found = pool.run("procs.random_models:compare", world=2, drawn=drawn, mesh=mesh, **constraints)[0]
        assert found["status"] == "equal", (mesh, found)


@given(drawn=models())
@QUICK
def test_a_few_models_under_every_plan(pool: Any, drawn: dict[str, Any]) -> None:
    check(pool, drawn, MESHES)


@pytest.mark.prove
@given(drawn=models())
@LONG
def test_hundreds_of_models_under_every_plan(pool: Any, drawn: dict[str, Any]) -> None:
    check(pool, drawn, MESHES)
