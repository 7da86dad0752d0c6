"""On a CUDA device: single-device training equals the CPU's, low precision stays near, and two ranks share one GPU over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import to_data
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.plan import choose_expert_parallel, choose_tensor_grid
from meshwright.plan.context_planner import choose_context
from tests.procs.jobs import build, global_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]
MODEL: dict[str, Any] = {"zoo": "gpt-tiny"}


def plan(mesh: str, zero: int, precision: str = "fp32", device: str = "cuda", compile: str = "none", recompute: str = "none") -> dict[str, Any]:
    memory = MemoryPolicy(zero, ("blocks.0", "blocks.1"), recompute, precision)  # type: ignore[arg-type]
    made = Plan("gpt-tiny", 8, Mesh.parse(mesh), memory=memory, device=device, backend="gloo", compile=compile)  # type: ignore[arg-type]
    return to_data(made)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reference(pool: Any) -> list[float]:
    return pool.run("procs.jobs:train_curve", world=1, plan=plan("dp=1", 0, device="cpu"), model=MODEL, dtype="float32")[0]["losses"]


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("dp=2", 0), ("shard=2", 1), ("shard=2", 2), ("shard=2", 3)])
def test_same_curve_as_the_cpu(pool: Any, reference: list[float], mesh: str, zero: int) -> None:
    world = Mesh.parse(mesh).size
    losses = pool.run("procs.jobs:train_curve", world=world, plan=plan(mesh, zero), model=MODEL, dtype="float32")[0]["losses"]
    assert losses == pytest.approx(reference, rel=1e-3)


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("shard=2", 1), ("shard=2", 3)])
def test_states_in_host_memory(pool: Any, reference: list[float], mesh: str, zero: int) -> None:
    made = plan(mesh, zero)
    made["memory"]["offload"] = "optimizer"
    found = pool.run("procs.jobs:train_curve", world=Mesh.parse(mesh).size, plan=made, model=MODEL, dtype="float32")[0]
    assert found["losses"] == pytest.approx(reference, rel=1e-3)
    assert found["held"]["optimizer"] == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("shard=2", 3)])
def test_low_precision_stays_near(pool: Any, reference: list[float], mesh: str, zero: int, precision: str) -> None:
    world = Mesh.parse(mesh).size
    losses = pool.run("procs.jobs:train_curve", world=world, plan=plan(mesh, zero, precision), model=MODEL, dtype="float32")[0]["losses"]
    assert losses == pytest.approx(reference, rel=0.05)


@pytest.mark.parametrize("compile", ["model", "blocks"])
def test_compiled(pool: Any, reference: list[float], compile: str) -> None:
    losses = pool.run("procs.jobs:train_curve", world=1, plan=plan("dp=1", 0, compile=compile), model=MODEL, dtype="float32", timeout_s=280)[0]
    assert losses["losses"] == pytest.approx(reference, rel=1e-3)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "shared positions"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tensor_parallelism(pool: Any, reference: list[float], precision: str, sequence: bool) -> None:
    """Two ranks on the one GPU; a pipeline would need point-to-point calls, which gloo has for the host only."""
    network, loss = build(MODEL, torch.float32, 0)
    flow = trace_module_dataflow(network, loss, global_batch(MODEL, 2, 0, torch.float32), precision)
    memory = MemoryPolicy(precision=precision)  # type: ignore[arg-type]
    made = Plan(
        "gpt-tiny",
        8,
        Mesh(tp=(2,)),
        memory=memory,
        tensor=choose_tensor_grid(flow, (2,), sequence_parallel=sequence)[0],
        device="cuda",
        backend="gloo",
    )
    losses = pool.run("procs.jobs:train_curve", world=2, plan=to_data(made), model=MODEL, dtype="float32")[0]["losses"]
    assert losses == pytest.approx(reference, rel=1e-3 if precision == "fp32" else 0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_context_parallelism(pool: Any, name: str, precision: str) -> None:
    """Two ranks on the one GPU: the kernels for a late run of causal attention, with few key heads too."""
    model = {"zoo": name}
    network, loss = build(model, torch.float32, 0)
    flow = trace_module_dataflow(network, loss, global_batch(model, 2, 0, torch.float32), precision)
    memory = MemoryPolicy(precision=precision)  # type: ignore[arg-type]
    made = Plan(name, 8, Mesh(cp=2), memory=memory, context=choose_context(flow, 2, precision=precision), device="cuda", backend="gloo")
    alone = Plan(name, 8, memory=memory, device="cuda")
    found = [pool.run("procs.jobs:train_curve", world=p.world, plan=to_data(p), model=model, clip=1.0, dtype="float32")[0] for p in (made, alone)]
    for what in ("losses", "norms"):
        assert found[0][what] == pytest.approx(found[1][what], rel=1e-3 if precision == "fp32" else 0.05)
    size = round(8 * made.context.attention_sites[0].bytes)
    gathers = {line["op"]: line["bytes"] for line in found[0]["ledger"] if line["name"] == f"context/{made.context.attention_sites[0].module}"}
    assert gathers == {"all_gather": size, "reduce_scatter": size}


@pytest.mark.parametrize("kind", ["mixture", "tables"])
def test_owners(pool: Any, kind: str) -> None:
    """Two ranks on the one GPU exchange tokens, or indices and rows."""
    model = {"own": kind}
    network, loss = build(model, torch.float32, 0)
    flow = trace_module_dataflow(network, loss, global_batch(model, 2, 0, torch.float32))
    made = Plan("test", 8, Mesh(ep=2), expert=choose_expert_parallel(flow, 2), device="cuda", backend="gloo")
    alone = Plan("test", 8, device="cpu")
    one, two = (pool.run("procs.jobs:train_curve", world=p.world, plan=to_data(p), model=model, dtype="float32", clip=0.5)[0] for p in (alone, made))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3) and two["norms"] == pytest.approx(one["norms"], rel=1e-3)
