"""When nothing fits: what is proposed fits, and one less does not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fake_inputs import blocks, calibration, cluster
from tests.procs.plan_cases import traced

from meshwright import zoo
from meshwright.core.cluster import Cluster
from meshwright.core.dataflow import Dataflow
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.workload import Workload
from meshwright.cost.step_cost import HEADROOM
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.plan import Constraints, Ranking, RetraceOptions, explain, rank_plans
from meshwright.plan.least_memory import LeastMemorySearch
from meshwright.plan.oom_advice import fewest_units, largest_fitting_batch, resize_cluster, with_memory

FLAT = blocks(16, ((1024, 1024),), flops=1e9, saved=1e5)  # 67 MB of parameters: 268 MB with gradients and Adam's states
WIDE = blocks(4, ((64, 64),), flops=1e9, saved=1e7)  # little to hold, much to keep of a sample


def rank(profile: ModelProfile, machine: Cluster, batch: int, constraints: Constraints = Constraints()) -> Ranking:  # noqa: B008 - frozen
    return rank_plans(profile, machine, Workload(batch), calibration(len(machine.devices)), constraints)


def least(found: Ranking) -> LeastMemorySearch:
    return LeastMemorySearch(found.profile, found.workload, found.calibration, found.constraints)


@pytest.mark.parametrize("memory", [4e7, 6e7, 9e7])
def test_the_fewest_devices_fit_and_one_less_do_not(memory: float) -> None:
    found = rank(FLAT, replace(cluster(2, memory), name="here"), 64)
    assert not found.best.estimate.fits
    text = explain(found)
    assert "\n" not in text
    assert text.startswith("No plan fits in memory: the smallest plan ")
    (count,) = map(int, re.findall(r"(\d+) such devices", text))
    assert rank(FLAT, resize_cluster(found.cluster, count), 64).best.estimate.fits
    assert not rank(FLAT, resize_cluster(found.cluster, count - 1), 64).best.estimate.fits


def test_nodes_are_asked_for_where_machines_come_as_they_are() -> None:
    found = rank(FLAT, cluster(2, 4e7), 64)
    (count,) = map(int, re.findall(r"at least (\d+) nodes \(--cluster made-up:\1\)|at least (\d+) nodes", explain(found))[0][:1])
    machines = resize_cluster(found.cluster, count)
    assert len(machines.devices) == 2 * count
    assert rank(FLAT, machines, 64).best.estimate.fits
    assert not rank(FLAT, resize_cluster(found.cluster, count - 1), 64).best.estimate.fits
    assert fewest_units(found.cluster, least(found).fits) == count


def test_the_memory_that_is_named_is_enough_and_a_step_less_is_not() -> None:
    found = rank(FLAT, cluster(1, 4e7), 64)
    size, unit = re.findall(r"a device with ([\d.]+) (MB|GB)", explain(found))[0]
    enough = float(size) * {"MB": 1e6, "GB": 1e9}[unit]
    assert rank(FLAT, with_memory(found.cluster, lambda _: int(enough)), 64).best.estimate.fits
    assert not rank(FLAT, with_memory(found.cluster, lambda _: int(0.98 * enough)), 64).best.estimate.fits


@pytest.mark.parametrize("batch", [7, 30])
def test_fewer_samples_are_proposed_where_they_cannot_be_cut_further(batch: int) -> None:
    """Odd numbers of samples go in one piece: an even one may be cut."""
    constraints = Constraints(micro_batches=1, recompute="selective")
    found = rank(WIDE, cluster(1, 2.5e7), batch, constraints)
    assert not found.best.estimate.fits
    most = largest_fitting_batch(found)
    assert most is not None
    assert rank(WIDE, found.cluster, most, constraints).best.estimate.fits
    assert not rank(WIDE, found.cluster, most + 1, constraints).best.estimate.fits


def test_a_wish_that_stands_in_the_way_is_named_first() -> None:
    machine = cluster(1, 1.5e8)
    assert "--set recompute=selective instead of the recompute" in explain(rank(WIDE, machine, 8, Constraints(recompute="none", micro_batches=1)))
    text = explain(rank(WIDE, cluster(1, 2.5e7), 8, Constraints(micro_batches=1)))
    assert "--set micro_batches=" in text
    text = explain(rank(FLAT, cluster(4, 1e8), 64, Constraints(mesh=Mesh(dp=4))))
    assert re.search(r"--mesh shard=4 --set zero=3.* instead of the mesh", text)


def test_shorter_samples_are_traced_and_tried() -> None:
    profile = replace(WIDE, tokens_per_sample=64)

    def shorter(length: int) -> ModelProfile:
        return replace(blocks(4, ((64, 64),), flops=1e9, saved=1e7 * length / 64), tokens_per_sample=length)

    found = rank(profile, cluster(1, 3e6), 1)
    assert not found.best.estimate.fits
    text = explain(found, RetraceOptions(shorter))
    (length,) = map(int, re.findall(r"--seq (\d+)", text))
    assert rank(shorter(length), found.cluster, 1).best.estimate.fits
    assert not rank(shorter(2 * length), found.cluster, 1).best.estimate.fits


def test_what_nothing_helps_promises_nothing() -> None:
    text = explain(rank(FLAT, replace(cluster(1, 1e5), name="here"), 1))
    assert "such devices" not in text
    assert "a device with" in text


def test_large_clusters_are_answered_too() -> None:
    found = rank(FLAT, cluster(16, 2.6e7), 64)
    assert not found.best.estimate.fits
    count = fewest_units(found.cluster, least(found).fits)
    assert count is not None and count > 1
    assert least(found).fits(resize_cluster(found.cluster, count))
    assert not least(found).fits(resize_cluster(found.cluster, count - 1))


# -- axes beside the plain ones --


def long_samples() -> tuple[ModelProfile, Dataflow]:
    task = zoo.load("llama-tiny", seq=4096)
    return trace_task(task), trace_dataflow(task)


def tables() -> tuple[ModelProfile, Dataflow]:
    task = zoo.load("dlrm-tiny")
    return trace_task(task), trace_dataflow(task)


MODELS = {  # with the axes that can make the least of their memory: experts have owners, or their features are sharded
    "positions": (long_samples, 1, ("cp",)), "experts": (lambda: traced({"own": "mixture"}), 4, ("ep", "tp")), "tables": (tables, 8, ("tp",)),
}  # fmt: skip


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_no_plan_that_a_search_prices_needs_less_than_the_least(name: str, devices: int) -> None:
    made, batch, _ = MODELS[name]
    profile, flow = made()
    machine, known, constraints = cluster(devices, 1e12), calibration(devices), Constraints(flow=flow, compile="none", offload="none")
    every = rank_plans(profile, machine, Workload(batch, objective="memory"), known, constraints).scored
    found = LeastMemorySearch(profile, Workload(batch), known, constraints).smallest_plan(machine)
    assert found is not None
    assert max(found.estimate.memory_bytes) == min(max(s.estimate.memory_bytes) for s in every)


@pytest.mark.parametrize(("name", "devices"), [("positions", 4), ("experts", 2), ("experts", 4)])
def test_what_only_shared_positions_or_owners_make_possible_is_proposed_and_holds(name: str, devices: int) -> None:
    made, batch, axes = MODELS[name]
    profile, flow = made()
    constraints, workload = Constraints(flow=flow, compile="none", offload="none"), Workload(batch)
    best = LeastMemorySearch(profile, workload, calibration(devices), constraints).smallest_plan(cluster(devices, 1e12))
    assert best is not None and max(map(best.plan.mesh.degree, axes)) == devices
    here = replace(cluster(1, max(best.estimate.memory_bytes) / HEADROOM * 1.02), name="here")
    found = rank_plans(profile, here, workload, calibration(devices), constraints)
    assert f"{devices} such devices" in explain(found)
    enough, fewer = (
        rank_plans(profile, resize_cluster(here, count), workload, calibration(devices), constraints).best for count in (devices, devices - 1)
    )
    assert enough.estimate.fits and max(map(enough.plan.mesh.degree, axes)) > 1 and not fewer.estimate.fits
