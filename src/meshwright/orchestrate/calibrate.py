"""Calibrations: measures a machine once, keeps the result in the user's cache under a hash of its hardware, and adds what runs measure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.core.backends import BACKENDS, backend_for
from meshwright.core.cache import cache_folder
from meshwright.core.calibration import Calibration, CalibrationRecord, Rates
from meshwright.core.calibration_checks import check_calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.rank_devices import assign_rank_devices, node_rank_devices
from meshwright.core.serialization import from_data, read_json, write_json
from meshwright.cost.calibration_correction import add_record, measured_over_predicted
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.cost.memory_cost import EXACT_KINDS
from meshwright.describe.discover import discover
from meshwright.describe.foreign_load import (
    DISTURBING_LOAD,
    crowded_share,
    describe_load,
    foreign_share,
    foreign_share_now,
    probe_error,
    read_cpu_use,
)
from meshwright.describe.speed_groups import without_doubtful_groups
from meshwright.launch import ForkServer, WorkerPool

_PROBE_VERSION = 3  # version of what a probe's numbers mean; cache files of another version are ignored
_PROBE_TIMEOUT_S = 600  # for one rank count; a busy machine takes several times as long as an idle one
_MAX_REPEATS = 2  # measurements that a probe repeats because other processes disturbed them


def cache_path(cluster: Cluster, environ: Mapping[str, str]) -> Path:
    """The cache file of this machine. The same host with other devices or another number of cores has another file."""
    node = cluster.nodes[0]
    facts = f"{_PROBE_VERSION}|{node.name}|{node.cpu}|{node.cores}|{[d.name for d in node.devices]}" + "|".join(node_rank_devices(node.devices))
    return cache_folder(environ) / f"calibration-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"


def load_cached(cluster: Cluster, environ: Mapping[str, str]) -> Calibration | None:
    """The cached calibration; None if there is none. A file with impossible rates raises: predictions from it would be wrong in silence."""
    path = cache_path(cluster, environ)
    if not path.exists():
        return None
    try:
        calibration = from_data(Calibration, read_json(path), str(path))
        check_calibration(calibration, str(path))
    except RequestError as error:
        raise RequestError(f"{error}; delete {path}, and this machine is measured again") from None
    return calibration


def save_to_cache(calibration: Calibration, cluster: Cluster, environ: Mapping[str, str]) -> Path | None:
    """Write the calibration to the cache; None if it cannot be written, which only costs the next run a probe."""
    path = cache_path(cluster, environ)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, calibration, private=True)
    except OSError:
        return None
    return path


def probed_rank_counts(cluster: Cluster) -> list[int]:
    """The rank counts that a probe runs, one after another. CPUs also get two: ranks with a core each behave differently from ranks that share."""
    num_devices = len(cluster.devices)
    return sorted({1, num_devices} | ({min(2, num_devices)} if cluster.devices[0].kind == "cpu" else set()))


def probe(
    cluster: Cluster, fork_server: ForkServer, backend: str | None = None, *, quick: bool = True, log_progress: Callable[[str], None]
) -> Calibration:
    """Measure this machine with one rank, with two (CPUs only), and with all its ranks together. A measurement that other processes disturbed is
    repeated if they have stopped."""
    devices = cluster.devices
    kind, mixed = devices[0].kind, assign_rank_devices(cluster, len(devices))
    startable = [name for name, traits in BACKENDS.items() if not traits.launchers]  # only mpirun can start MPI ranks: `bench comm` measures those
    backend = backend if backend in startable else backend_for(kind, mixed)
    layouts: list[Rates] = []
    copies: Mapping[str, float] = {}
    repeats, worst_load = 0, 0.0
    for ranks in probed_rank_counts(cluster):
        kwargs = {"device": kind, "backend": backend, "threads": cluster.threads_per_rank(ranks), "quick": quick, "rank_devices": mixed[:ranks]}
        name = f"measuring {ranks} rank{'s' * (ranks > 1)}"
        log_progress(name)
        rates, rank_copies, load = _measure_layout(cluster, fork_server, ranks, kwargs)
        while load >= DISTURBING_LOAD and repeats < _MAX_REPEATS and foreign_share_now() < DISTURBING_LOAD:
            repeats += 1
            log_progress(f"{name} again: {describe_load(load)}")
            rates, rank_copies, load = min((rates, rank_copies, load), _measure_layout(cluster, fork_server, ranks, kwargs), key=lambda m: m[2])
        layouts += rates
        copies, worst_load = rank_copies or copies, max(worst_load, load)
    error, basis = probe_error(worst_load), ""
    if worst_load >= DISTURBING_LOAD:
        basis = f"a quick probe of this machine, measured while {describe_load(worst_load)}"
        log_progress(f"{describe_load(worst_load)} meanwhile: predictions are ± {error:.0%} until a quieter machine is measured")
    return Calibration(cluster.nodes[0].name, devices[0].name, _now(), tuple(layouts), copies, "probe", error, basis)


def _measure_layout(
    cluster: Cluster, fork_server: ForkServer, ranks: int, kwargs: Mapping[str, Any]
) -> tuple[list[Rates], Mapping[str, float], float]:
    """(rates, host copy rates, foreign load) of one rank count. The load counts on CPUs only: a GPU's work does not wait for the host's cores."""
    with WorkerPool(fork_server, ranks) as workers:
        before = read_cpu_use()
        rates, copies = workers.call("meshwright.orchestrate.rank_entrypoints:probe_rank", kwargs, timeout_s=_PROBE_TIMEOUT_S)[0]
        after = read_cpu_use()
    if cluster.devices[0].kind != "cpu":
        return rates, copies, 0.0
    threads = ranks * max(cluster.threads_per_rank(ranks), 1)
    used = foreign_share(before, after, threads)
    load = max(used, crowded_share(min(r.oversubscription for r in rates), threads, cluster.nodes[0].cores))
    return [replace(r, foreign_load=used) for r in without_doubtful_groups(rates, probe_error(load))], copies, load


def is_outdated(calibration: Calibration) -> bool:
    """Whether other processes disturbed its probe, and leave the cores alone now."""
    return calibration.foreign_load >= DISTURBING_LOAD and foreign_share_now() < DISTURBING_LOAD


def record_run(
    uncorrected: Calibration, plan: Plan, profile: ModelProfile, predicted: Estimate, measured: Mapping[str, Any], cluster: Cluster,
    environ: Mapping[str, str],
) -> CalibrationRecord | None:  # fmt: skip
    """Store what a run measured beside the prediction from uncorrected rates; None if devices are mixed or the cached calibration is not that one."""
    cached = load_cached(cluster, environ)
    if plan.rank_devices or cached is None or cached.when != uncorrected.when:
        return None
    step_s, exposed_s = measured["step_s"], measured["exposed_communication_s"]
    compute, network = measured_over_predicted((predicted.step_s, predicted.breakdown["communication"]), (step_s, exposed_s))
    exact = sum(predicted.memory_kinds.get(kind, 0) for kind in EXACT_KINDS)
    memory = max(max(measured["memory_bytes"]) - exact, 1) / max(max(predicted.memory_bytes) - exact, 1)
    key = (_now(), plan.model, layer_kinds_key(profile), plan.memory.precision, plan.strategy, plan.world)
    record = CalibrationRecord(*key, step_s / predicted.step_s, compute, network, memory)
    save_to_cache(add_record(cached, record), cluster, environ)
    return record


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def layer_kinds_key(profile: ModelProfile) -> str:
    """The sorted layer kinds of a model: the key under which similar models share corrections."""
    return ",".join(sorted({layer.kind for layer in profile.layers}))


def without_network(cluster: Cluster, environ: Mapping[str, str]) -> Calibration:
    """This machine's compute rates (measured, or else from data sheets), for a cluster whose network costs nothing."""
    calibration = load_cached(discover(environ), environ) or datasheet_calibration(cluster)
    return replace(calibration, layouts=tuple(replace(rates, collectives={}, overlap=1.0) for rates in calibration.layouts))
