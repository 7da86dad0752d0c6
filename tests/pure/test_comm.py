"""The communication layer without processes: routing, what mpirun is told and says, what `bench comm` makes of measurements."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from meshwright.comm import Ledger, RoutedComm, ThreadComm, ThreadWorld
from meshwright.comm.mpi import mpi_library
from meshwright.core.calibration import AlphaBetaModel, Calibration, Rates
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan, SyncPolicy
from meshwright.core.routes import Route, choose_route
from meshwright.core.schedule import Action
from meshwright.core.serialization import from_data, to_data
from meshwright.cost.collective_cost import collective_seconds
from meshwright.cost.route_selection import choose_routes, explain_routes, keep_used_routes
from meshwright.describe.collective_bench import OPERATIONS, fit_by_operation, measure_routes, merge_ranks
from meshwright.describe.discover import discover
from meshwright.launch import LaunchedRank, default_backend
from meshwright.launch import mpi_launcher as launch
from meshwright.orchestrate import bench_comm
from meshwright.orchestrate.mpirun import needs_mpirun
from meshwright.schedule import LedgerLine

LINES = {"gloo/all_reduce": AlphaBetaModel(500e-6, 2e9), "mpi/all_reduce": AlphaBetaModel(20e-6, 1e9), "gloo/broadcast": AlphaBetaModel(1e-4, 1e9)}


def rates(ranks: int = 2) -> Rates:
    return Rates(ranks, 1, {}, ((1e6, 1e10),), 1e-6, LINES)


def test_the_quickest_backend_is_chosen_by_size() -> None:
    """gloo's line is 5% ahead: (500 − 20 · 1.05) µs more a call against half of 1 / 1 GB/s less a byte."""
    small, large = choose_routes(rates(), ("gloo", "mpi"), ("all_reduce", "broadcast", "reduce"))
    assert small == Route("all_reduce", "mpi")
    assert (large.op, large.backend, large.min_sent_bytes) == ("all_reduce", "gloo", pytest.approx(870_000, rel=0.01))
    found = (small, large)
    assert [choose_route(found, "all_reduce", size, "gloo") for size in (0, 1000, 10**8)] == ["mpi", "mpi", "gloo"]
    assert choose_route(found, "broadcast", 1000, "gloo") == "gloo"  # the only one that was measured
    assert choose_route(found, "reduce", 1000, "gloo") == "gloo"  # none was: the plan's own


@pytest.mark.parametrize("size", [8, 10**4, 10**6, 10**8])
def test_the_choice_is_never_much_slower_than_the_best(size: int) -> None:
    chosen = choose_route(choose_routes(rates(), ("gloo", "mpi"), ["all_reduce"]), "all_reduce", size, "gloo")
    times = {b: LINES[f"{b}/all_reduce"].seconds(size) for b in ("gloo", "mpi")}
    assert times[chosen] <= 1.05 * min(times.values())


def test_a_plan_keeps_the_routes_that_its_calls_take() -> None:
    routed = SyncPolicy(routes=(Route("all_reduce", "mpi", 1000), Route("all_gather", "mpi")))
    plan = Plan("gpt", 8, Mesh(dp=2), sync=routed)
    line = LedgerLine("step", "grads/bucket0", "all_reduce", "replica", 2, 2, 4000, 0, 4000.0)
    kept = keep_used_routes(plan, [line])
    assert kept.sync.routes == (Route("all_reduce", "mpi", 1000),)
    assert kept.backends == ("gloo", "mpi")
    (why,) = explain_routes(kept, rates())
    assert why == "all_reduce goes over gloo below 1.00 kB, mpi from 1.00 kB on (gloo 500 µs a call and 2.00 GB/s; mpi 20 µs a call and 1.00 GB/s)."
    assert keep_used_routes(plan, [replace(line, bytes=400, sent=400.0)]).sync.routes == ()
    assert keep_used_routes(plan, [replace(line, axis="pp")]).sync.routes == ()  # torch's pipelines send by the plan's backend
    assert from_data(Plan, to_data(kept), "plan") == kept


def test_a_plan_is_priced_by_its_routes() -> None:
    action = Action("grads/bucket0", "all_reduce", bytes=1000, axis="replica")
    plain = Plan("gpt", 8, Mesh(dp=2))
    routed = replace(plain, sync=SyncPolicy(routes=(Route("all_reduce", "mpi"),)))
    cluster = discover({}, ranks=2)
    seconds = [collective_seconds(action, plan, cluster, rates()) for plan in (plain, routed)]
    assert seconds == pytest.approx([LINES[f"{b}/all_reduce"].seconds(1000) for b in ("gloo", "mpi")])


@pytest.mark.parametrize(("backend", "other"), [("mpi", "gloo"), ("gloo", "nccl"), ("nccl", "mpi")])
def test_routes_join_gloo_and_mpi_only(backend: str, other: str) -> None:
    with pytest.raises(RequestError, match=r"sync\.routes"):
        Plan("gpt", 8, Mesh(dp=2), backend=backend, sync=SyncPolicy(routes=(Route("all_reduce", other),)))


def test_calls_go_where_the_choice_says() -> None:
    def job(comm: ThreadComm) -> tuple[Any, ...]:
        small, large = comm.subgroup([0, 1]), ThreadComm(other, comm.rank, (0, 1), Ledger())
        routed = RoutedComm({"small": small, "large": large}, lambda op, size: "large" if size > 100 else "small")
        tensors = torch.ones(4), torch.ones(400)
        for tensor, one in zip(tensors, (routed, routed.sync), strict=True):
            one.all_reduce(tensor, "x").wait()
        routed.barrier()
        return [float(t[0]) for t in tensors], *([(line.name, line.bytes) for line in one.ledger.drain()] for one in (small, large))

    other = ThreadWorld(2)
    for values, by_small, by_large in ThreadWorld(2).run(job):
        assert values == [2.0, 2.0]
        assert by_small == [("x", 16)]
        assert by_large == [("x", 1600)]


def test_threads_record_every_call() -> None:
    def job(comm: ThreadComm) -> list[tuple[str, str, int, int, int]]:
        comm.all_reduce(torch.ones(3), "a").wait()
        comm.gather(torch.empty(4) if comm.rank == 0 else None, torch.ones(2), "g").wait()
        comm.exchange([(1 - comm.rank, torch.ones(5))], [(1 - comm.rank, torch.empty(5))], "m").wait()
        return [(line.name, line.op, line.group, line.calls, line.bytes) for line in comm.ledger.drain()]

    wanted = [("a", "all_reduce", 2, 1, 12), ("g", "gather", 2, 1, 16), ("m", "send", 2, 1, 20)]
    assert ThreadWorld(2).run(job) == [wanted, wanted]


def test_a_rank_that_fails_is_heard() -> None:
    def job(comm: ThreadComm) -> None:
        if comm.rank == 1:
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        ThreadWorld(2).run(job)


# -- bench comm --


def test_every_operation_is_measured_checked_fitted_and_drawn(tmp_path: Path) -> None:
    sizes = bench_comm.message_sizes(4096)
    assert sizes == (8, 64, 512, 4096)
    every = ThreadWorld(2).run(lambda comm: measure_routes({"": comm}, torch.device("cpu"), OPERATIONS, sizes, 0.001))
    points = merge_ranks("threads", every)
    assert {p.op for p in points} == set(OPERATIONS)
    assert all(p.correct and p.median_s <= p.p95_s <= p.p99_s and p.bus_bandwidth > 0 for p in points)
    lines = fit_by_operation(points)
    assert set(lines) == {f"threads/{op}" for op in OPERATIONS}
    files = bench_comm.write_results(tmp_path, points, lines, discover(os.environ))
    assert len(json.loads(Path(files["json"]).read_text())["points"]) == len(points)
    assert len(Path(files["csv"]).read_text().splitlines()) == len(points) + 1
    drawn = ElementTree.parse(files["svg"]).getroot()
    assert len(drawn.findall(".//{*}polyline")) == len(OPERATIONS)


def test_a_measurement_replaces_only_its_own_lines() -> None:
    before = Calibration("m", "cpu", "now", (rates(1), rates(2)))
    after = bench_comm.with_measured_collectives(before, 2, {"mpi/all_reduce": AlphaBetaModel(1.0, 1.0)})
    assert after.rates_for(2).collectives == {**LINES, "mpi/all_reduce": AlphaBetaModel(1.0, 1.0)}
    assert after.rates_for(1) == before.rates_for(1)
    four = bench_comm.with_measured_collectives(before, 4, {"mpi/send": AlphaBetaModel(1.0, 1.0)})
    assert [r.ranks for r in four.layouts] == [1, 2, 4]
    assert four.rates_for(4).collectives == {"mpi/send": AlphaBetaModel(1.0, 1.0)}


@pytest.mark.parametrize(
    ("change", "said"),
    [({"operations": ("allreduce",)}, "did you mean 'all_reduce'"), ({"ranks": 1}, "--nproc 2"), ({"sizes": (8, 10**12)}, "--to 2000MB or less")],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_allocated(change: dict[str, Any], said: str) -> None:
    given = {"ranks": 2, "operations": ("all_reduce",), "sizes": (8,), "budget_s": 0.1, "device": "cpu", **change}
    with pytest.raises(RequestError, match=said):
        bench_comm.check_request(bench_comm.BenchRequest(**given), 10**10)


# -- MPI --


def test_an_mpi_that_is_not_mpiruns_is_named() -> None:
    mpi_library.check_world(4, "Open MPI v5", {"OMPI_COMM_WORLD_SIZE": "4"})
    with pytest.raises(RequestError, match=r"4 ranks were started \(OMPI_COMM_WORLD_SIZE\), but MPICH 4, which mpi4py loaded, sees 1"):
        mpi_library.check_world(1, "MPICH 4", {"OMPI_COMM_WORLD_SIZE": "4"})
    mpi_library.check_launcher("Open MPI v5", {"OMPI_COMM_WORLD_SIZE": "4"})
    mpi_library.check_launcher("MPICH Version: 5.0.2", {"PMI_SIZE": "4"})
    with pytest.raises(RequestError, match=r"Open MPI's mpirun has started this rank, but mpi4py loaded MPICH Version: 5\.0\.2: start with"):
        mpi_library.check_launcher("MPICH Version: 5.0.2", {"OMPI_COMM_WORLD_SIZE": "4"})


def test_mixed_versions_are_named() -> None:
    mpi_library.compare_versions([{"torch": "2.13.0"}] * 3)
    with pytest.raises(RequestError, match=r"rank 0 has torch 2\.13\.0, rank 1 has torch 2\.11\.0"):
        mpi_library.compare_versions([{"torch": "2.13.0"}, {"torch": "2.11.0"}])


def test_without_mpi_the_pip_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_mpirun", lambda: None)
    with pytest.raises(RequestError, match=r"pip install 'meshwright\[mpi\]'"):
        launch.mpirun_command(2, {})
    monkeypatch.setattr(bench_comm, "find_mpirun", lambda: None)
    assert bench_comm.available_backends("cpu", None) == ["gloo"]
    with pytest.raises(RequestError, match=r"backend mpi is not present: pip install"):
        bench_comm.available_backends("cpu", ["mpi"])


def test_mpirun_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mpirun").touch()
    (tmp_path / "ompi_info").touch()
    monkeypatch.setattr(launch, "find_mpirun", lambda: tmp_path / "mpirun")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    command, environ = launch.mpirun_command(4, {"A": "b"}, cores=2)
    assert command == [str(tmp_path / "mpirun"), "-n", "4", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"]
    bound = {(ranks, cores): launch.mpirun_command(ranks, {}, cores=cores)[0][-1] != "none" for ranks in (4, 5) for cores in (2, 4, 7, 8)}
    assert [pair for pair, yes in bound.items() if yes] == [(4, 2), (4, 4), (4, 7), (5, 7), (5, 8)]
    assert environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == environ["OMPI_MCA_mpi_yield_when_idle"] == "1" and environ["A"] == "b"
    (tmp_path / "ompi_info").unlink()  # MPICH knows none of these
    assert launch.mpirun_command(4, {}, cores=2)[0] == [str(tmp_path / "mpirun"), "-n", "4"]


def test_mpiruns_page_on_an_exit_is_left_out() -> None:
    rule = "-" * 74 + "\n"
    page = [rule, "prterun detected that one or more processes exited with non-zero status,\n", rule]
    other = [rule, "There are not enough slots available\n", rule]
    assert list(launch.strip_exit_banners(["meshwright: a line\n", *page, *other, "end\n"])) == ["meshwright: a line\n", *other, "end\n"]


def test_who_starts_the_ranks() -> None:
    assert needs_mpirun("mpi", None, is_launched=False) and needs_mpirun(None, "mpi", is_launched=False)
    assert not needs_mpirun(None, "mpi", is_launched=True) and not needs_mpirun(None, "gloo", is_launched=False)
    with pytest.raises(RequestError, match="--launcher mpi"):
        needs_mpirun("local", "mpi", is_launched=False)
    with pytest.raises(RequestError, match="did you mean 'mpi'"):
        needs_mpirun("mpirun", None, is_launched=False)


def test_ranks_of_mpirun_meet_over_mpi() -> None:
    place = LaunchedRank(0, 4, 0, 4, "", "mpirun")
    assert default_backend(place, "cpu") == "mpi"
    assert default_backend(place, "cuda") == "nccl"
    assert default_backend(LaunchedRank(0, 4, 0, 4, "", "torchrun"), "cpu") == default_backend(None, "cpu") == "gloo"


def test_the_c_library_is_told_to_keep_memory_unless_it_was_told_already(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    def mallopt(option: int, size: int) -> int:
        told.append((option, size))
        return size <= 1 << 25  # an older one

    monkeypatch.setattr(mpi_library.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert mpi_library.tune_malloc({})
    assert told == [(-3, 1 << 28), (-3, 1 << 25), (-1, 1 << 28), (-1, 1 << 25)]
    assert not mpi_library.tune_malloc({"MALLOC_TRIM_THRESHOLD_": "0"}) and len(told) == 4
    monkeypatch.setattr(mpi_library.ctypes, "CDLL", lambda _: SimpleNamespace())  # another C library
    assert not mpi_library.tune_malloc({})
