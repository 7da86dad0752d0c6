"""When nothing fits: by how much, and the smallest changes that make a plan fit. Each change is verified by an estimate before it is proposed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.cluster import Cluster, Node
from meshwright.core.cluster_changes import map_nodes
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.quantities import show_bytes
from meshwright.core.workload import ITEM_BYTES, Precision
from meshwright.cost.step_cost import HEADROOM
from meshwright.plan.least_memory import LeastMemorySearch
from meshwright.plan.search import Ranking, ScoredPlan

_MAX_DEVICES = 4096
_MAX_DEVICES_PER_NODE = 64  # per node
_TIME_LIMIT_S = 5.0  # for the search over numbers of machines
_UNLIMITED_BYTES = 1 << 50  # more bytes than any device has


@dataclass(frozen=True)
class RetraceOptions:
    """Functions that trace the model again, for changes that need another profile; None where the model cannot be traced again."""

    with_length: Callable[[int], ModelProfile] | None = None  # by sample length
    with_precision: Callable[[Precision], ModelProfile] | None = None


def explain_oom(ranking: Ranking, retrace: RetraceOptions | None = None) -> str:
    """One line: what the smallest plan needs, what the devices have, and what would help."""
    least = LeastMemorySearch(ranking.profile, ranking.workload, ranking.calibration, ranking.constraints, ranking.partition_cache)
    smallest = min((s for s in (least.smallest_plan(ranking.cluster), ranking.best) if s is not None), key=lambda s: max(s.estimate.memory_bytes))
    found = smallest.estimate
    kind, size = max(found.memory_kinds.items(), key=lambda item: item[1])
    total = ""
    if smallest.plan.world > 1:
        have = sum(d.memory_bytes for d in ranking.cluster.devices[: smallest.plan.world])
        total = f", and {show_bytes(sum(found.memory_bytes))} on all {smallest.plan.world}, which have {show_bytes(have)}"
    ways = list(_fixes(ranking, smallest, least, retrace or RetraceOptions()))
    need = f"the smallest plan ({smallest.plan.summary()}) {found.reason}{total} (largest part: {kind}, {show_bytes(size)} a device)"
    return f"Nothing fits: {need}. What would help: {', or '.join(ways) if ways else 'nothing that was tried: use a smaller model'}."


def _fixes(ranking: Ranking, smallest: ScoredPlan, least_memory: LeastMemorySearch, retrace: RetraceOptions) -> Iterator[str]:
    """The smallest change of a setting that does not affect the training result; if there is none, changes of the training, of the cluster and of
    the devices' memory."""
    setting = next(_setting_fixes(ranking), None)
    if setting is not None:
        yield setting
        return
    other = next(_training_fixes(ranking, smallest, retrace), None)
    yield from [other] if other is not None else []
    if ranking.constraints.mesh is None and ranking.constraints.world is None:
        yield from _cluster_fixes(ranking, least_memory)
    yield from _device_memory_fix(ranking, least_memory)


def _setting_fixes(ranking: Ranking) -> Iterator[str]:
    """Loosened constraints under which a plan fits: each one alone, then all about memory, then the mesh as well."""
    constraints = ranking.constraints
    loosened: dict[str, dict[str, None]] = {}
    if constraints.recompute in ("none", "selective"):
        loosened["recompute"] = {"recompute": None}
    loosened |= {name: {name: None} for name in ("zero", "micro_batches", "schedule") if getattr(constraints, name) is not None}
    memory = {name: None for name in ("zero", "micro_batches", "recompute") if getattr(constraints, name) is not None}
    if len(memory) > 1:
        loosened[" and ".join(memory)] = memory
    if constraints.mesh is not None:
        loosened["mesh"] = {"mesh": None}
        loosened[" and ".join(("mesh", *memory))] = {"mesh": None, **memory}
    for name, change in loosened.items():
        freed = replace(constraints, **change)  # type: ignore[arg-type]
        found = LeastMemorySearch(ranking.profile, ranking.workload, ranking.calibration, freed).smallest_plan(ranking.cluster)
        if found is not None and found.estimate.fits:
            yield f"{_cli_flags(name, found)} instead of the {name} that was asked for ({found.estimate.reason})"


def _cli_flags(name: str, scored: ScoredPlan) -> str:
    plan = scored.plan
    told = {
        "recompute": f"--set recompute={plan.memory.recompute}",
        "zero": f"--mesh {plan.mesh} --set zero={plan.memory.zero}",
        "micro_batches": f"--set micro_batches={plan.micro_batches}",
        "schedule": f"--set schedule={plan.schedule}",
    }
    zero = f" --set zero={plan.memory.zero}" * bool(plan.memory.zero)
    micro = f" --set micro_batches={plan.micro_batches}" * (plan.micro_batches > 1)
    return told.get(name, f"--mesh {plan.mesh}{zero}{micro} --set recompute={plan.memory.recompute}")


def _training_fixes(ranking: Ranking, smallest: ScoredPlan, retrace: RetraceOptions) -> Iterator[str]:
    """Changes that affect the training result: fewer samples a step, a lower precision, shorter samples."""
    batch = largest_fitting_batch(ranking) if smallest.plan.max_micro_batch_size > 1 else None  # a micro-batch of one sample cannot shrink
    if batch is not None:
        yield f"--global-batch {batch}"
    kinds, total = smallest.estimate.memory_kinds, max(smallest.estimate.memory_bytes)
    if kinds["activations"] + kinds["workspace"] < 0.1 * total:
        return  # activations are a small part of the memory: nothing below changes the rest
    lower: Precision | None = "bf16" if ITEM_BYTES[ranking.workload.precision] > 2 and ranking.cluster.devices[0].kind == "cuda" else None
    if lower is not None and retrace.with_precision is not None:
        profile = retrace.with_precision(lower)
        if LeastMemorySearch(profile, replace(ranking.workload, precision=lower), ranking.calibration, ranking.constraints).fits(ranking.cluster):
            yield f"--set precision={lower}"
    length = longest_fitting_sequence(ranking, retrace.with_length) if retrace.with_length is not None else None
    if length is not None:
        yield f"shorter samples (--seq {length})"


def largest_fitting_batch(ranking: Ranking) -> int | None:
    """The largest smaller global batch that fits: the batch is halved until it fits, then raised in steps that its layout can take."""
    batch = high = ranking.workload.global_batch
    cutter = ranking.partition_cache

    def plan_if_fits(samples: int) -> ScoredPlan | None:
        nonlocal cutter
        least = LeastMemorySearch(ranking.profile, replace(ranking.workload, global_batch=samples), ranking.calibration, ranking.constraints, cutter)
        cutter = least.partition_cache
        best = least.smallest_plan(ranking.cluster)
        return best if best is not None and best.estimate.fits else None

    low = next((n for n in _halves(batch) if plan_if_fits(n) is not None), None)
    if low is None:
        return None
    first = plan_if_fits(low)
    unit = first.plan.mesh.data_parallel_size * first.plan.micro_batches if first is not None else low
    high = min(2 * low, batch)
    while high - low > unit:
        middle = low + max((high - low) // 2 // unit, 1) * unit
        low, high = (middle, high) if plan_if_fits(middle) is not None else (low, middle)
    return low


def longest_fitting_sequence(ranking: Ranking, trace_length: Callable[[int], ModelProfile]) -> int | None:
    """The longest sample that fits, among successive halves of the length asked for."""
    for length in _halves(ranking.profile.tokens_per_sample or 1, minimum=16):
        try:
            profile = trace_length(length)
        except RequestError:
            return None
        if LeastMemorySearch(profile, ranking.workload, ranking.calibration, ranking.constraints).fits(ranking.cluster):
            return length
    return None


def _halves(number: int, minimum: int = 1) -> Iterator[int]:
    while number // 2 >= minimum:
        number //= 2
        yield number


# -- changes of the cluster --


def fewest_units(cluster: Cluster, fits: Callable[[Cluster], bool], min_total_bytes: float = 0.0) -> int | None:
    """The smallest number of units (`resize_cluster`) on which a plan fits; None beyond `_MAX_DEVICES` (`_MAX_DEVICES_PER_NODE` in one machine) or
    if the search takes too long. All units together must hold at least `min_total_bytes`, so fewer are not tried."""
    until = time.monotonic() + _TIME_LIMIT_S
    room = sum(d.memory_bytes for d in cluster.devices) / _num_units(cluster) * HEADROOM
    low = max(_num_units(cluster), int(min_total_bytes / room))
    high = low
    while high * _devices_per_unit(cluster) < (_MAX_DEVICES_PER_NODE if _grows_by_device(cluster) else _MAX_DEVICES):
        low, high = high, 1 << high.bit_length()
        if fits(resize_cluster(cluster, high)):
            break
        if time.monotonic() > until:
            return None
    else:
        return None
    while high - low > 1 and time.monotonic() < until:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(resize_cluster(cluster, middle)) else (middle, high)
    return high


def _cluster_fixes(ranking: Ranking, least_memory: LeastMemorySearch) -> Iterator[str]:
    """More machines of the same kind; where the batch is too small for that many, together with a larger batch."""
    units = fewest_units(ranking.cluster, least_memory.fits, least_memory.min_total_bytes)
    if units is not None:
        yield _describe_cluster_size(ranking.cluster, units)
        return

    def fits(cluster: Cluster) -> bool:
        workload = replace(ranking.workload, global_batch=len(cluster.devices))
        return LeastMemorySearch(ranking.profile, workload, ranking.calibration, ranking.constraints, least_memory.partition_cache).fits(cluster)

    units = fewest_units(ranking.cluster, fits, least_memory.min_total_bytes)
    if units is not None:
        yield f"{_describe_cluster_size(ranking.cluster, units)} with --global-batch {units * _devices_per_unit(ranking.cluster)}"


def _grows_by_device(cluster: Cluster) -> bool:
    """Whether a unit is a device: this machine may get more GPUs. CPUs share their node's memory, and other clusters grow by whole nodes."""
    return cluster.name == "here" and cluster.devices[0].kind != "cpu"


def _num_units(cluster: Cluster) -> int:
    return len(cluster.devices) if _grows_by_device(cluster) else len(cluster.nodes)


def cluster_units(cluster: Cluster) -> tuple[int, str]:
    """The number of units, and the word for one."""
    return _num_units(cluster), "device" if _grows_by_device(cluster) else "node"


def _devices_per_unit(cluster: Cluster) -> int:
    return 1 if _grows_by_device(cluster) else len(cluster.nodes[0].devices)


def resize_cluster(cluster: Cluster, units: int) -> Cluster:
    """The cluster with `units` nodes like its first; this machine with `units` GPUs."""
    node = cluster.nodes[0]
    if not _grows_by_device(cluster):
        return replace(cluster, nodes=(node,) * units)
    cards = tuple(replace(node.devices[i % len(node.devices)], index=i) for i in range(units))
    return replace(cluster, nodes=(replace(node, devices=cards),))


def _describe_cluster_size(cluster: Cluster, units: int) -> str:
    if _grows_by_device(cluster):
        return f"{units} such devices"
    name = f"--cluster {cluster.name}:{units}" if cluster.name not in ("here", "ideal") else "such as this machine"
    return f"at least {units} nodes ({name})"


def _device_memory_fix(ranking: Ranking, least_memory: LeastMemorySearch) -> Iterator[str]:
    """How much memory each device would need: what the smallest plan needs, rounded up to three digits."""
    roomy = least_memory.smallest_plan(with_memory(ranking.cluster, lambda _: _UNLIMITED_BYTES))
    if roomy is None:
        return
    need = math.ceil(max(roomy.estimate.memory_bytes) / HEADROOM)
    step = 10 ** max(len(str(need)) - 3, 0)
    size = -(-need // step) * step
    if least_memory.fits(with_memory(ranking.cluster, lambda _: size)):
        yield f"{'devices' if len(ranking.cluster.devices) > 1 else 'a device'} with {show_bytes(size)}"


def with_memory(cluster: Cluster, change: Callable[[int], int]) -> Cluster:
    """The same devices with changed memory; CPUs use their node's memory, which changes too."""

    def resize_node(node: Node) -> Node:
        devices = tuple(replace(d, memory_bytes=change(d.memory_bytes)) for d in node.devices)
        own = change(node.memory_bytes) if node.devices[0].kind == "cpu" else node.memory_bytes
        return replace(node, memory_bytes=own, devices=devices)

    return map_nodes(cluster, resize_node)
