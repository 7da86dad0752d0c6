"""Ranks on unlike devices: how they are named, what they may do together, and how many samples each takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import zoo
from meshwright.core.calibration import AlphaBetaModel, Calibration, Rates
from meshwright.core.cluster import Cluster, Device, Node
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy, MemoryPolicy, Plan
from meshwright.core.rank_devices import DEVICES_VARIABLE, assign_rank_devices, device_selection, group_backend, rank_devices_from_env
from meshwright.core.serialization import from_data, to_data
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.describe import nvml
from meshwright.describe.discover import discover
from meshwright.describe.profile_tracer import trace_task
from meshwright.plan import rank_plans
from meshwright.plan.balance import distribute_samples
from meshwright.plan.search_space import Constraints
from meshwright.schedule import plan_ledgers

CARD = nvml.Gpu(0, "NVIDIA H200", "GPU-1", 150 * 2**30, 150 * 2**30, (9, 0), 0)
GPU, CPU = Device("cuda", "fast", 0, 2**34), Device("cpu", "slow", 0, 2**34)


def rates(ranks: int, kind: str, speed: float) -> Rates:
    lines = {f"gloo/{op}": AlphaBetaModel(1e-4, 1e9) for op in ("all_reduce", "all_gather", "reduce_scatter")} if ranks > 1 else {}
    return Rates(ranks, 1, {"matmul/fp32": ((1e3, speed), (1e12, speed))}, ((1e3, speed), (1e9, speed)), 1e-6, lines, device=kind)


MEASURED = Calibration("here", "both", "now", tuple(rates(n, kind, speed) for n in (1, 3) for kind, speed in (("cuda", 8e10), ("cpu", 1e10))))


def test_cpus_are_named_beside_gpus_and_a_card_may_be_shared() -> None:
    def found(*devices: Any) -> list[tuple[str, int]]:
        return [(d.kind, d.memory_bytes) for d in discover({}, devices=devices, gpus=(CARD, CARD)).devices]

    mixed = found(0, "cpu", "cpu")
    assert [kind for kind, _ in mixed] == ["cuda", "cpu", "cpu"] and mixed[1] == mixed[2]
    assert found(1, 1) == [("cuda", CARD.memory_total // 2)] * 2
    assert {kind for kind, _ in found("cpu", "cpu", "cpu")} == {"cpu"}
    assert len(discover({}, devices=("cpu",) * 5, gpus=()).devices) == 5
    with pytest.raises(RequestError, match=r"--devices 0,2,cpu: there is no device 2; this machine has 2 GPUs"):
        found(0, 2, "cpu")


def test_places_are_said_only_where_ranks_differ() -> None:
    def found(*nodes: list[Device]) -> tuple[str, ...]:
        cluster = Cluster("test", tuple(Node("one", tuple(devices), 8, 2**35) for devices in nodes))
        return assign_rank_devices(cluster, len(cluster.devices))

    second = replace(GPU, index=3)
    assert found([GPU, second]) == found([CPU, CPU]) == found([GPU, second], [GPU, second]) == ()
    assert found([second, GPU, CPU]) == ("cuda:0", "cuda:1", "cpu")
    assert found([GPU, GPU]) == ("cuda:0", "cuda:0")
    assert found([GPU, second], [CPU]) == ("cuda:0", "cuda:1", "cpu")
    assert device_selection(rank_devices_from_env({DEVICES_VARIABLE: "cuda:1,cpu"})) == (1, "cpu") and rank_devices_from_env({}) == ()


def test_a_group_of_cards_meets_by_nccl_and_others_by_what_all_share() -> None:
    devices = ("cuda:0", "cuda:1", "cpu", "cuda:0")
    assert group_backend(devices, (0, 1), "gloo") == "nccl"
    assert {group_backend(devices, group, "gloo") for group in ((0, 2), (0, 3), (2,))} == {"gloo"}
    assert group_backend((), (0, 1), "gloo") == "gloo"


@pytest.mark.parametrize(
    ("mesh", "devices", "changes", "reason"),
    [
        ("dp=2", ("cuda:0",), {}, "1 entries for mesh dp=2 of 2 ranks"),
        ("dp=2", ("gpu", "cpu"), {}, "'gpu' is no device"),
        ("dp=2", ("cuda:0", "cpu"), {"backend": "nccl"}, "NCCL needs a card for every rank"),
        ("dp=2", ("cuda:0", "cpu"), {"memory": MemoryPolicy(precision="fp8")}, "fp8 needs a GPU for every rank"),
        ("tp=2", ("cuda:0", "cpu"), {}, "tp joins ranks on a CPU and on a GPU"),
    ],
)
def test_what_unlike_ranks_cannot_do_is_refused(mesh: str, devices: tuple[str, ...], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Plan("m", 8, Mesh.parse(mesh), **{"device": "cuda", "rank_devices": devices, **changes})


def test_each_rank_sees_its_own_device() -> None:
    plan = Plan("m", 8, Mesh(dp=2, tp=(2,)), device="cuda", rank_devices=("cuda:0", "cuda:0", "cpu", "cpu"))
    assert [plan.for_rank(rank).device for rank in range(4)] == ["cuda", "cuda", "cpu", "cpu"]
    assert [plan.device_of(rank, rank) for rank in range(4)] == ["cuda:0", "cuda:0", "cpu", "cpu"]
    assert from_data(Plan, to_data(plan), "plan") == plan
    assert "2 × cuda + 2 × cpu" in plan.summary()


@given(lines=st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 5)), min_size=2, max_size=3), samples=st.integers(0, 6), least=st.integers(1, 2))
def test_no_other_shares_end_sooner(lines: list[tuple[float, float]], samples: int, least: int) -> None:
    total = samples + least * len(lines)

    def ends(shares: tuple[int, ...]) -> float:
        return max(a + b * share for (a, b), share in zip(lines, shares, strict=True))

    every = [s for s in product(range(least, total + 1), repeat=len(lines)) if sum(s) == total]
    shares = distribute_samples(total, [lambda n, a=a, b=b: a + b * n for a, b in lines], least)  # type: ignore[misc]
    assert shares is not None and ends(shares) == pytest.approx(min(map(ends, every)))


def test_the_planner_gives_samples_by_speed() -> None:
    """A device eight times as quick as each of two others takes most of the batch, and the last sample evens them out."""
    profile, cluster = trace_task(zoo.load("gpt-tiny")), Cluster("test", (Node("here", (GPU, CPU, CPU), 8, 2**35),))
    ranking = rank_plans(profile, cluster, Workload(40), MEASURED, Constraints(mesh=Mesh(dp=3)))
    best = ranking.best.plan
    assert best.rank_devices == ("cuda:0", "cpu", "cpu") and (best.backend, best.compile, best.threads) == ("gloo", "none", 3)
    assert best.balance.shares == (32, 4, 4)
    equal = replace(best, balance=BalancePolicy((14, 13, 13)))
    slower = estimate(equal, profile, Workload(40), cluster, MEASURED)
    assert slower.step_s > 1.8 * ranking.best.estimate.step_s
    memory = ranking.best.estimate.memory_bytes
    assert memory[0] > memory[1] == memory[2]
    assert len(plan_ledgers(best, profile)) == 2  # a ledger for each kind of device
