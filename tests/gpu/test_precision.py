"""Precision, recomputation and pipelines on a GPU. Small worlds share one card over gloo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data
from meshwright.execute.fp8 import has_fp8
from tests.procs.plan_cases import counted, listed, model_of, spread

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]
needs_fp8 = pytest.mark.skipif(not torch.cuda.is_available() or not has_fp8("cuda"), reason="needs compute capability 8.9")
CASES = {"one": (Mesh(), 0), "dp": (Mesh(dp=2), 0), "zero3": (Mesh(shard=2), 3), "tp": (Mesh(tp=(2,)), 0), "pp": (Mesh(pp=2), 0)}


def curve(pool: Any, plan: Plan, model: dict[str, Any], steps: int = 5) -> list[dict[str, Any]]:
    told = to_data(replace(plan, device="cuda"))
    found: list[dict[str, Any]] = pool.run(
        "procs.jobs:train_curve", world=plan.world, plan=told, model=model, steps=steps, dtype="float32", clip=0.5, timeout_s=280
    )
    return found


def made(model: dict[str, Any], case: str, precision: str, recompute: str = "none") -> tuple[Plan, Any]:
    mesh, zero = CASES[case]
    plan, profile = spread(model, mesh, 8, zero=zero, micro=2 if case == "pp" else 1, recompute=recompute, precision="fp32")
    return replace(plan, device="cuda", memory=replace(plan.memory, precision=precision)), profile  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(pool: Any) -> list[float]:
    return curve(pool, made(model_of("gpt-tiny"), "one", "fp32")[0], model_of("gpt-tiny"))[0]["losses"]


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_curve_and_the_same_ledger(pool: Any, alone: list[float], case: str, recompute: str) -> None:
    model = model_of("gpt-tiny")
    plan, profile = made(model, case, "fp32", recompute)
    ranks = curve(pool, plan, model)
    assert ranks[0]["losses"] == pytest.approx(alone, rel=1e-3)
    for rank, mine in enumerate(ranks):
        assert counted(mine["ledger"]) == listed(plan, profile, rank, "step")


@needs_fp8
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("case", CASES)
def test_fp8_stays_near(pool: Any, alone: list[float], case: str, recompute: str) -> None:
    """Fifty steps in bf16 and in fp8 end within a few percent of each other; the first ones are near fp32's."""
    model = model_of("gpt-tiny")
    low, half = (curve(pool, made(model, case, kind, recompute)[0], model, 50)[0]["losses"] for kind in ("fp8", "bf16"))
    assert low[:5] == pytest.approx(alone, rel=0.05)
    assert low[-10:] == pytest.approx(half[-10:], rel=0.05)
    assert low != half


@needs_fp8
def test_fp8_for_the_layers_of_transformers(pool: Any) -> None:
    """Its Conv1D holds its matrix the other way round."""
    pytest.importorskip("transformers")
    model = model_of("GPT2")
    low, half = (curve(pool, made(model, "one", kind)[0], model, 10)[0]["losses"] for kind in ("fp8", "bf16"))
    assert low == pytest.approx(half, rel=0.05) and low != half


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "selective"), ("bf16", "full"), ("fp8", "selective"), ("fp8", "none")])
def test_compiled_blocks(pool: Any, alone: list[float], precision: str, recompute: str) -> None:
    if precision == "fp8" and not has_fp8("cuda"):
        pytest.skip("needs compute capability 8.9")
    plan, _ = made(model_of("gpt-tiny"), "one", precision, recompute)
    losses = curve(pool, replace(plan, compile="blocks"), model_of("gpt-tiny"))[0]["losses"]
    assert losses == pytest.approx(alone, rel=1e-3 if precision == "fp32" else 0.05)
