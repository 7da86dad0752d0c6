"""Verification of plans whose two ranks share one GPU over gloo: whole, with fewer blocks, in low precision; and what it leaves on the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import to_data

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]
UNITS = tuple(f"blocks.{i}" for i in range(8))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("mesh", "zero"), [("dp=2", 0), ("shard=2", 1), ("shard=2", 2), ("shard=2", 3)])
def test_equal_on_a_shared_gpu(pool: Any, mesh: str, zero: Any, precision: Any) -> None:
    memory = MemoryPolicy(zero, UNITS, precision=precision)
    plan = Plan("deep", 8, Mesh.parse(mesh), memory=memory, device="cuda", rank_devices=("cuda:0", "cuda:0"))
    for copies, left_out in ((5.0, 0), (3.0, 6), (1.2, 7)):
        for found, allocated in pool.run("procs.verify_jobs:verify_on", world=2, plan=to_data(plan), device="cuda:0", copies=copies):
            assert (found.verdict, found.reason) == ("equal", "")
            assert sum(map(len, found.stands_for.values())) == left_out
            assert allocated == 0  # training finds the card as it was
