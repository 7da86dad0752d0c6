"""Which way a call goes: chosen from measured points, over backends and algorithms; and what of a plan is tuned after it was chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pure import fake_inputs
from tests.pure.test_shared_memory_window import near

from meshwright.comm import ComposedComm, Ledger, RoutedComm, SharedMemoryGroup, ThreadComm, ThreadWorld
from meshwright.core.calibration import AlphaBetaModel, Calibration, Rates
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan, SyncPolicy
from meshwright.core.routes import ALGORITHMS, Route, applicable_routes, choose_route, group_by_node, has_two_levels, routes_for_world
from meshwright.core.schedule import Action
from meshwright.core.serialization import from_data, to_data
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.collective_cost import collective_seconds
from meshwright.cost.route_selection import choose_routes, explain_routes
from meshwright.describe.collective_bench import fit_by_operation, measure_routes, merge_ranks, timing_curves
from meshwright.describe.discover import discover
from meshwright.orchestrate import bench_comm
from meshwright.orchestrate.backend_selection import add_measured_routes
from meshwright.plan import Constraints
from meshwright.plan.search import rank_plans

WAYS = ("gloo", "gloo:shared", "mpi")
SIZES = (8.0, 512.0, 32_768.0, 2_097_152.0, 67_108_864.0)


def measured(times: dict[str, list[float]], ranks: int = 2, op: str = "all_reduce") -> Rates:
    points = {f"{w}/{op}": tuple(zip(SIZES, seconds, strict=True)) for w, seconds in times.items()}
    lines = {name: AlphaBetaModel(of_way[0][1], of_way[-1][0] / of_way[-1][1]) for name, of_way in points.items()}
    return Rates(ranks, 1, {}, ((1e6, 1e10),), 1e-6, lines, curves=points)


@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5), min_size=2, max_size=3))
def test_at_each_size_measured_the_selected_way_is_as_quick_as_the_best(times: list[list[float]]) -> None:
    of_ways = dict(zip(WAYS, times, strict=False))
    found = choose_routes(measured(of_ways), ("gloo", "mpi"), ["all_reduce"], (2,))
    for at, size in enumerate(SIZES):
        best = min(seconds[at] for seconds in of_ways.values())
        assert of_ways[choose_route(found, "all_reduce", size, "gloo")][at] <= 1.05 * best


CROSSING = {"gloo": [6e-4, 6e-4, 7e-4, 3e-3, 8e-2], "gloo:shared": [3e-4, 3e-4, 4e-4, 6e-3, 3e-1], "mpi": [9e-4, 9e-4, 9e-4, 9e-4, 7e-2]}


def test_routes_name_algorithms_and_say_why() -> None:
    found = choose_routes(measured(CROSSING), ("gloo", "mpi"), ["all_reduce"], (2,))
    assert [r.route_name for r in found] == ["gloo:shared", "mpi"]
    assert found[0].min_sent_bytes == 0 and 32_768 < found[1].min_sent_bytes < 2_097_152
    plan = Plan("gpt", 8, Mesh(dp=2), sync=SyncPolicy(routes=found, ranks_per_node=(2,)))
    assert from_data(Plan, to_data(plan), "plan") == plan
    (why,) = explain_routes(plan, measured(CROSSING))
    assert why.startswith("all_reduce goes over gloo:shared, mpi from ")
    assert "measured at 8 B, 32.8 kB, 67.1 MB sent: gloo 600 µs, 700 µs, 80 ms; gloo:shared 300 µs" in why


def test_a_plan_is_priced_by_the_points_of_its_ways() -> None:
    rates = measured(CROSSING)
    plan = Plan("gpt", 8, Mesh(dp=2), sync=SyncPolicy(routes=(Route("all_reduce", "gloo", 0, "shared"),)))
    cluster = discover({}, ranks=2)
    seconds = [
        collective_seconds(Action("g", "all_reduce", bytes=size, axis="replica"), plan, cluster, rates) for size in (1, 512, 4096, 2 * 67_108_864)
    ]
    between = math.exp(math.log(3e-4) + math.log(4e-4 / 3e-4) * math.log(8) / math.log(64))
    assert seconds == pytest.approx([3e-4, 3e-4, between, 6e-1])
    assert rates.measured_seconds("gloo:two-level/all_reduce", 8) is None


def test_two_levels_need_nodes() -> None:
    assert group_by_node([0, 2, 3, 5], (2, 2, 2)) == ((0,), (1, 2), (3,))
    assert has_two_levels(range(4), (2, 2)) and not has_two_levels(range(4), (4,)) and not has_two_levels([0, 2], (2, 2))
    assert not has_two_levels(range(4), (3, 1))
    both = (Route("all_reduce", "gloo", 0, "two-level"), Route("all_reduce", "mpi", 9))
    assert routes_for_world(both, (2, 2), 4) == (both, (2, 2))
    assert routes_for_world(both, (2, 2), 3) == (both[1:], (2, 1))
    assert routes_for_world(both, (2, 2), 2) == (both[1:], (2,))
    times = {"gloo": [1.0] * 5, "gloo:two-level": [0.5] * 5}
    assert choose_routes(measured(times, 4), ["gloo"], ["all_reduce"], ()) == ()
    assert choose_routes(measured(times, 4), ["gloo"], ["all_reduce"], (2, 2)) == both[:1]


def test_algorithms_that_are_unknown_are_not_chosen() -> None:
    """A calibration may have been measured by another version."""
    assert choose_routes(measured({"gloo": [1.0] * 5, "gloo:ring": [0.1] * 5}), ["gloo"], ["all_reduce"], (2,)) == ()


def test_memory_is_shared_on_one_node() -> None:
    shared = (Route("all_reduce", "gloo", 0, "shared"),)
    assert routes_for_world(shared, (2, 2), 2) == (shared, (2,)) and routes_for_world(shared, (2, 2), 4) == ((), (2, 2))
    assert applicable_routes(shared, [2, 3], (2, 2)) == shared and applicable_routes(shared, [1, 2], (2, 2)) == ()
    times = {"gloo": [1.0] * 5, "gloo:shared": [0.5] * 5}
    assert choose_routes(measured(times, 4), ["gloo"], ["all_reduce"], (4,)) == shared
    assert choose_routes(measured(times, 4), ["gloo"], ["all_reduce"], (2, 2)) == ()
    near = {"gloo": [2.0] * 5, "mpi": [1.0] * 5, "mpi:shared": [1.02] * 5}  # measured by ranks that do nothing else
    assert [r.route_name for r in choose_routes(measured(near, 4), ["gloo", "mpi"], ["all_reduce"], (4,))] == ["mpi:shared"]
    twice = near | {"gloo:shared": [1.025] * 5}
    assert [r.route_name for r in choose_routes(measured(twice, 4), ["gloo", "mpi"], ["all_reduce"], (4,))] == ["gloo:shared"]


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        (SyncPolicy(routes=(Route("all_reduce", "gloo", 0, "two-level"),)), "sync.ranks_per_node"),
        (SyncPolicy(routes=(Route("all_gather", "gloo", 0, "two-level"),)), "unknown algorithm 'two-level'"),
        (SyncPolicy(ranks_per_node=(2, 2)), "the mesh has 2"),
    ],
)
def test_routes_that_cannot_be_are_refused(sync: SyncPolicy, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Plan("gpt", 8, Mesh(dp=2), sync=sync)


def test_every_route_is_measured_in_turn_and_kept_as_points() -> None:
    def job(comm: ThreadComm) -> list[Any]:
        routed = {"threads:shared": ComposedComm(SharedMemoryGroup(comm, "threads", windows[comm.rank]), "shared", Ledger())}
        having = {op for op, names in ALGORITHMS.items() if "shared" in names}
        shared = RoutedComm({"threads": comm}, lambda op, _: "threads:shared" if op in having else "threads", routed)
        made: dict[str, Any] = {"threads": comm, "threads:shared": shared}
        return measure_routes(made, torch.device("cpu"), ["all_reduce", "all_gather", "broadcast"], (8, 4096), 0.001)

    windows = near(2)
    points = merge_ranks("threads", ThreadWorld(2).run(job))
    assert all(p.correct for p in points)
    lines, found = fit_by_operation(points), timing_curves(points)
    assert set(lines) == set(found) == {
        "threads/all_reduce", "threads:shared/all_reduce", "threads/all_gather", "threads:shared/all_gather", "threads/broadcast",
    }  # fmt: skip
    before = Calibration("m", "cpu", "now", (measured(CROSSING),))
    after = bench_comm.with_measured_collectives(
        before, 2, {"mpi/all_reduce": AlphaBetaModel(1.0, 1.0)}, {"mpi/all_reduce": ((8.0, 1.0),)}
    ).rates_for(2)
    assert after.curves["mpi/all_reduce"] == ((8.0, 1.0),) and after.curves["gloo/all_reduce"] == before.rates_for(2).curves["gloo/all_reduce"]
    assert (
        "mpi/all_reduce" not in bench_comm.with_measured_collectives(before, 2, {"mpi/all_reduce": AlphaBetaModel(1.0, 1.0)}).rates_for(2).curves
    )  # a probe's line is newer


def test_what_is_measured_is_asked_for_or_all_that_applies() -> None:
    one = discover({}, ranks=4)
    assert bench_comm.count_ranks_per_node(4, None, one) == (4,)
    assert bench_comm.count_ranks_per_node(4, 3, one) == (2, 1, 1)
    assert bench_comm.applicable_algorithms(4, (4,), None) == ("flat", "shared")
    assert bench_comm.applicable_algorithms(4, (2, 2), None) == ("flat", "two-level")
    request = bench_comm.BenchRequest(4, ("all_reduce",), (8,), 0.1, "cpu", ("two-level",), (4,))
    with pytest.raises(RequestError, match="--nodes 2"):
        bench_comm.check_request(request, 10**9)
    with pytest.raises(RequestError, match="--nodes 1"):
        bench_comm.check_request(replace(request, algorithms=("shared",), ranks_per_node=(2, 2)), 10**9)
    with pytest.raises(RequestError, match="did you mean 'shared'"):
        bench_comm.check_request(replace(request, algorithms=("share",)), 10**9)
    with pytest.raises(RequestError, match="--nodes 5"):
        bench_comm.count_ranks_per_node(4, 5, one)


def test_auto_takes_algorithms_of_gloo_alone_too() -> None:
    cluster = discover({}, ranks=2)
    slow = {name: times for name, times in CROSSING.items() if name != "mpi"}
    constraints, why = add_measured_routes(Constraints(world=2), cluster, Calibration("m", "cpu", "now", (measured(slow),)))
    assert why == "" and constraints.routes is not None and {r.backend for r in constraints.routes} == {"gloo"}
    constraints, why = add_measured_routes(Constraints(world=2), cluster, Calibration("m", "cpu", "now", (measured({"gloo": [1.0] * 5}),)))
    assert constraints.routes is None and "meshwright bench comm --nproc 2" in why


# -- tuning --


def ranked(alpha: float, bandwidth: float, **constraints: Any) -> Any:
    """Twenty blocks of 4 MB on two ranks, a quarter of a second of work."""
    made = fake_inputs.blocks(20, ((1024, 1024), (1024,)), flops=1e9).layers
    profile = fake_inputs.model(
        [replace(x, tensors=tuple(replace(t, registration_index=2 * i + j) for j, t in enumerate(x.tensors))) for i, x in enumerate(made)]
    )
    calibration = fake_inputs.calibration(2, alpha=alpha, network=bandwidth, overlap=0.9)
    return rank_plans(
        profile, fake_inputs.cluster(2, kind="cpu"), Workload(8), calibration, Constraints(mesh=Mesh(dp=2), micro_batches=1, **constraints)
    )


def test_buckets_are_as_large_as_calls_are_dear() -> None:
    dear, cheap = ranked(0.5, 1e9).best.plan.sync, ranked(1e-6, 1e9).best.plan.sync
    assert dear.bucket_bytes >= cheap.bucket_bytes
    assert cheap.bucket_bytes < SyncPolicy().bucket_bytes
    assert any(line.startswith("Gradient buckets:") for line in ranked(1e-6, 1e9).tuning_notes)
    fixed = ranked(1e-6, 1e9, bucket_bytes=10 * 2**20)
    assert fixed.best.plan.sync.bucket_bytes == 10 * 2**20 and fixed.tuning_notes == ()


def test_gradients_are_compressed_only_where_that_is_allowed_and_quicker() -> None:
    assert ranked(1e-3, 1e7).best.plan.sync.compression == "none"
    slow = ranked(1e-3, 1e7, allow=("bf16", "powersgd"))
    assert slow.best.plan.sync.compression == "powersgd"
    assert "not exact" in slow.tuning_notes[0] and "none " in slow.tuning_notes[0]
    assert ranked(1e-3, 1e7, allow=("bf16",)).best.plan.sync.compression == "bf16"
    quick = ranked(1e-9, 1e14, allow=("bf16", "powersgd"))
    assert quick.best.plan.sync.compression == "none"
    compressed, plain = slow.best, ranked(1e-3, 1e7).best
    assert compressed.estimate.step_s == estimate(compressed.plan, slow.profile, slow.workload, slow.cluster, slow.calibration).step_s
    assert max(compressed.estimate.memory_bytes) > max(plain.estimate.memory_bytes)
    with pytest.raises(RequestError, match="compression_rank=2"):
        ranked(1e-3, 1e7, compression_rank=2)
