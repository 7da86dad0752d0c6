"""Recomputation: the words and what goes together, what the schedule repeats, what is kept in bytes, and the same numbers on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.pure.fake_inputs import blocks, calibration, cluster
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import zoo
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.model import Kernel
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import from_data, to_data
from meshwright.core.workload import Workload
from meshwright.cost.memory_cost import peak_live_memory, saved_activation_bytes
from meshwright.describe.fake_tensors import example_batch
from meshwright.describe.profile_tracer import trace_module, trace_task
from meshwright.execute.session import Session
from meshwright.orchestrate.config import load_config, parse_setting
from meshwright.plan import Constraints, check_selective_recompute, rank_plans
from meshwright.schedule import build_schedule

UNITS = ("blocks.0", "blocks.1")


def policy(recompute: str = "none", layers: dict[str, Any] | None = None, **more: Any) -> MemoryPolicy:
    return MemoryPolicy(0, UNITS, recompute, layers=layers or {}, **more)  # type: ignore[arg-type]


def test_a_layer_may_differ_from_the_rest() -> None:
    memory = policy("selective", {"blocks.1": "none"})
    assert [memory.recompute_mode(name) for name in ("blocks.0", "blocks.1", "head")] == ["selective", "none", "none"]
    assert memory.recompute_modes == {"blocks.0": "selective"}
    plan = Plan("m", 8, memory=memory)
    assert "recompute selective (blocks.1 none)" in plan.summary()
    assert from_data(Plan, to_data(plan), "plan") == plan


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Plan("m", 8, memory=policy("some")), "must be none, selective or full"),
        (lambda: Plan("m", 8, memory=policy(layers={"block.1": "full"})), "unknown layer 'block.1' in recompute; did you mean 'blocks.1'?"),
        (lambda: Plan("m", 8, memory=policy(layers={"blocks.1": "ful"})), "recompute.blocks.1=ful"),
        (lambda: Plan("m", 8, memory=MemoryPolicy(layers={"head": "full"})), "this model has no unit"),
        (lambda: Plan("m", 8, Mesh(tp=(2,)), memory=policy("selective"), compile="blocks"), "set compile=none or recompute=full"),
        (lambda: Plan("m", 8, Mesh(pp=2), 2, memory=policy("full"), schedule="zero_bubble"), "set recompute=none or use interleaved"),
    ],
)
def test_what_cannot_be_is_said_when_the_plan_is_made(made: Callable[[], Plan], said: str) -> None:
    with pytest.raises(RequestError, match=said.replace("?", r"\?")):
        made()


def test_settings_name_layers_too() -> None:
    found = load_config(None, dict(map(parse_setting, ["recompute=selective", "recompute.blocks.0=full", "recompute.blocks.1=none"])))
    assert (found.recompute, found.recompute_layers) == ("selective", {"blocks.0": "full", "blocks.1": "none"})
    with pytest.raises(RequestError, match=r"recompute_layers.blocks.0"):
        load_config(None, {"recompute.blocks.0": "most"})


def test_only_the_cheap_part_is_repeated() -> None:
    profile = blocks(3)
    memory = MemoryPolicy(0, tuple(x.name for x in profile.layers), "selective", layers={"blocks.1": "full", "blocks.2": "none"})
    again = {
        a.name: a.skips_expensive for a in build_schedule(Plan("m", 8, memory=memory), profile).program_for(0) if a.name.startswith("recompute/")
    }
    assert again == {"recompute/blocks.1/0": False, "recompute/blocks.0/0": True}


def wide(count: int = 8) -> Any:
    """Blocks that save 1,000 bytes a sample, of which products give 300 and element-wise work makes 500."""
    profile = blocks(count)
    kernels = (*profile.layers[0].kernels, Kernel("memory", "forward", 0.0, 1e3))
    layers = tuple(replace(x, expensive_output_bytes=300.0, fusible_bytes=500.0, kernels=kernels) for x in profile.layers)
    return replace(profile, layers=layers, per_sample_layers=layers)


def test_memory_lies_between_keeping_all_and_nothing() -> None:
    profile, units = wide(), tuple(x.name for x in wide().layers)
    most = {
        m: peak_live_memory(Plan("m", 8, micro_batches=2, memory=MemoryPolicy(0, units, m)), profile).activations
        for m in ("none", "selective", "full")
    }  # type: ignore[arg-type]
    assert most == {"none": 8000, "selective": 8 * 400 + 500, "full": 8 * 100 + 1000}


def test_the_planner_keeps_what_is_dear_where_not_everything_fits() -> None:
    profile = wide()
    many = Workload(4096)
    least = {
        mode: min(
            max(s.estimate.memory_bytes)
            for s in rank_plans(profile, cluster(1), many, calibration(1), Constraints(micro_batches=1, recompute=mode)).scored
        )
        for mode in ("none", "selective")  # type: ignore[misc]
    }
    small = cluster(1, memory=(least["none"] + least["selective"]) / 2 / 0.92)
    best = rank_plans(profile, small, many, calibration(1), Constraints(micro_batches=1)).best
    assert best.estimate.fits and set(best.plan.memory.recompute_modes.values()) == {"selective"}
    told = rank_plans(profile, small, many, calibration(1), Constraints(micro_batches=1, recompute_layers={"blocks.0": "full"})).best
    assert told.plan.memory.recompute_mode("blocks.0") == "full"


class Rude(nn.Module):
    """Changes a product's result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_result_that_is_changed_in_place_cannot_be_kept() -> None:
    profile = trace_module(Rude(), lambda m, b: m(b).square().mean(), torch.zeros(2, 8), name="rude")
    with pytest.raises(RequestError, match=r"set recompute.layers.0=full"):
        check_selective_recompute(MemoryPolicy(0, ("layers.0", "layers.1"), "selective"), profile)
    check_selective_recompute(MemoryPolicy(0, ("layers.0", "layers.1"), "full"), profile)


class Alive(TorchDispatchMode):
    """Bytes of what operations made and something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for ref, size in self.made.values() if not ref.expired())


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[float, list[float], int, float]]:
    """(loss, gradients' sums, bytes alive after forward, bytes predicted) of gpt-tiny with dropout, by mode."""
    task = zoo.load("gpt-tiny", dropout=0.2)
    profile = trace_task(task).at_batch(4)
    found = {}
    for mode in ("none", "selective", "full"):
        torch.manual_seed(0)
        memory = policy(mode)
        model = task.build()
        session = Session(Plan("m", 4, memory=memory), model, torch.optim.SGD(model.parameters(), lr=0.0))
        session.applied.random_keys.set(0, 0, 0)
        batch = {k: torch.randint(0, 256, v.shape) for k, v in example_batch(task, 4).items()}
        with Alive() as alive:
            loss = task.loss(model, batch)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        size = alive.bytes()
        session.applied.random_keys.set(0, 1, 9)  # another micro-batch's: the second run must still have the first one's
        loss.backward()
        kept = sum(saved_activation_bytes(Plan("m", 4, memory=memory), layer, memory.recompute_mode(layer.name))[0] for layer in profile.layers)
        found[mode] = float(loss.detach()), [float(p.grad.double().sum()) for p in model.parameters()], size, kept  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_same_gradients_to_the_bit(runs: Any, mode: str) -> None:
    assert runs[mode][:2] == runs["none"][:2]


def test_bytes_kept_are_those_predicted(runs: Any) -> None:
    """What each mode saves is exact. (What the loss holds besides is the same for all of them.)"""
    none, selective, full = (runs[mode][2] for mode in ("none", "selective", "full"))
    assert full < 0.8 * selective < 0.8 * 0.9 * none
    for mode in ("selective", "full"):
        assert none - runs[mode][2] == runs["none"][3] - runs[mode][3]
