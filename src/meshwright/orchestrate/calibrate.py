"""Calibrations: measures a machine once, keeps the result in the user's cache under a hash of its hardware, and adds what runs measure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from meshwright.core.backends import BACKENDS, backend_for
from meshwright.core.cache import cache_folder
from meshwright.core.calibration import Calibration, CalibrationRecord, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.model import ModelProfile
from meshwright.core.rank_devices import assign_rank_devices, node_rank_devices
from meshwright.core.serialization import from_data, read_json, write_json
from meshwright.cost.calibration_correction import add_record, measured_over_predicted
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.cost.memory_cost import EXACT_KINDS
from meshwright.describe.discover import discover
from meshwright.launch import ForkServer, WorkerPool

_PROBE_VERSION = 2  # version of what a probe's numbers mean; cache files of another version are ignored
PROBE_ERROR = 0.25  # relative; step times predicted from a quick probe were off by 4 to 23% (docs/measured/planner.md)


def cache_path(cluster: Cluster, environ: Mapping[str, str]) -> Path:
    """The cache file of this machine. The same host with other devices or another number of cores has another file."""
    node = cluster.nodes[0]
    facts = f"{_PROBE_VERSION}|{node.name}|{node.cpu}|{node.cores}|{[d.name for d in node.devices]}" + "|".join(node_rank_devices(node.devices))
    return cache_folder(environ) / f"calibration-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"


def load_cached(cluster: Cluster, environ: Mapping[str, str]) -> Calibration | None:
    """The cached calibration; None if there is none or this version cannot read it."""
    path = cache_path(cluster, environ)
    if not path.exists():
        return None
    try:
        return from_data(Calibration, read_json(path), str(path))
    except RequestError:
        return None


def save_to_cache(calibration: Calibration, cluster: Cluster, environ: Mapping[str, str]) -> Path | None:
    """Write the calibration to the cache; None if it cannot be written, which only costs the next run a probe."""
    path = cache_path(cluster, environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, calibration)
    except OSError:
        return None
    return path


def probed_rank_counts(cluster: Cluster) -> list[int]:
    """The rank counts that a probe runs, one after another. CPUs also get two: ranks with a core each behave differently from ranks that share."""
    most = len(cluster.devices)
    return sorted({1, min(2, most), most}) if cluster.devices[0].kind == "cpu" else sorted({1, most})


def probe(
    cluster: Cluster, fork_server: ForkServer, backend: str | None = None, *, quick: bool = True, log_progress: Callable[[str], None]
) -> Calibration:
    """Measure this machine with one rank, with two (CPUs only), and with all its ranks together."""
    devices = cluster.devices
    kind, mixed = devices[0].kind, assign_rank_devices(cluster, len(devices))
    started = [name for name, traits in BACKENDS.items() if not traits.launchers]  # only mpirun can start MPI ranks: `bench comm` measures those
    chosen = backend if backend in started else backend_for(kind, mixed)
    layouts: list[Rates] = []
    copies: Mapping[str, float] = {}
    for ranks in probed_rank_counts(cluster):
        threads = cluster.threads_per_rank(ranks)
        log_progress(f"measuring {ranks} rank{'s' * (ranks > 1)}")
        with WorkerPool(fork_server, ranks) as workers:
            kwargs = {"device": kind, "backend": chosen, "threads": threads, "quick": quick, "rank_devices": mixed[:ranks]}
            rates, found = workers.call("meshwright.orchestrate.rank_entrypoints:probe_rank", kwargs, timeout_s=300)[0]
        layouts += rates
        copies = found or copies
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(cluster.nodes[0].name, devices[0].name, when, tuple(layouts), copies, "probe", PROBE_ERROR)


def record_run(uncorrected: Calibration, run: MeasuredRun, cluster: Cluster, environ: Mapping[str, str]) -> CalibrationRecord | None:
    """Store a run's measurement beside the cached rates' prediction; None if no calibration is cached, it has changed since, or devices are mixed."""
    if run.has_mixed_devices or (found := load_cached(cluster, environ)) is None or found.when != uncorrected.when:
        return None
    guess = run.estimate
    compute, network = measured_over_predicted((guess.step_s, guess.breakdown["communication"]), (run.step_s, run.exposed_s))
    exact = sum(guess.memory_kinds.get(kind, 0) for kind in EXACT_KINDS)
    held = max(run.memory_bytes - exact, 1) / max(max(guess.memory_bytes) - exact, 1)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    record = CalibrationRecord(when, run.model, run.kind, run.precision, run.strategy, run.ranks, run.step_s / guess.step_s, compute, network, held)
    save_to_cache(add_record(found, record), cluster, environ)
    return record


def layer_kinds_key(profile: ModelProfile) -> str:
    """The sorted layer kinds of a model: the key under which similar models share corrections."""
    return ",".join(sorted({layer.kind for layer in profile.layers}))


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: its model and plan, the estimate by uncorrected rates, and what it measured."""

    model: str
    kind: str
    precision: str
    strategy: str
    ranks: int
    has_mixed_devices: bool
    estimate: Estimate
    step_s: float
    exposed_s: float | None
    memory_bytes: int


def without_network(cluster: Cluster, environ: Mapping[str, str]) -> Calibration:
    """This machine's compute rates (measured, or else from data sheets), for a cluster whose network costs nothing."""
    found = load_cached(discover(environ), environ) or datasheet_calibration(cluster)
    return replace(found, layouts=tuple(replace(rates, collectives={}, overlap=1.0) for rates in found.layouts))
