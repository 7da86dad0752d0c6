"""When no plan fits: by how much, and the smallest changes that make one fit. Each change is verified by an estimate before it is proposed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from meshwright.core.cluster import Cluster, Node
from meshwright.core.cluster_changes import map_nodes
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.core.workload import ITEM_BYTES, Precision
from meshwright.cost.step_cost import HEADROOM
from meshwright.plan.least_memory import LeastMemorySearch
from meshwright.plan.search import Ranking, ScoredPlan
from meshwright.plan.search_space import PartitionCache

_MAX_DEVICES = 4096
_MAX_DEVICES_PER_NODE = 64
_TIME_LIMIT_S = 5.0  # for the search over numbers of machines
_UNLIMITED_BYTES = 1 << 50  # more bytes than any device has


@dataclass(frozen=True)
class RetraceOptions:
    """Functions that trace the model again, for changes that need another profile; None where the model cannot be traced again."""

    with_length: Callable[[int], ModelProfile] | None = None  # by sample length
    with_precision: Callable[[Precision], ModelProfile] | None = None


def explain_oom(ranking: Ranking, retrace: RetraceOptions | None = None) -> str:
    """One line: what the smallest plan needs, what the devices have, and what would help."""
    least = _least_memory(ranking, ranking.partition_cache)
    smallest = min((s for s in (least.smallest_plan(ranking.cluster), ranking.best) if s is not None), key=lambda s: max(s.estimate.memory_bytes))
    plan, estimate = smallest.plan, smallest.estimate
    kind, size = max(estimate.memory_kinds.items(), key=lambda item: item[1])
    total = ""
    if plan.world > 1:
        have = sum(d.memory_bytes for d in ranking.cluster.devices[: plan.world])
        total = f", and {show_bytes(sum(estimate.memory_bytes))} on all {plan.world}, which have {show_bytes(have)}"
    need = f"the smallest plan ({plan.summary()}) {estimate.reason}{total} (largest part: {kind}, {show_bytes(size)} a device)"
    fixes = ", or ".join(_fixes(ranking, smallest, least, retrace or RetraceOptions())) or "nothing that was tried: use a smaller model"
    return f"No plan fits in memory: {need}. What would help: {fixes}."


def _least_memory(ranking: Ranking, partition_cache: PartitionCache | None = None) -> LeastMemorySearch:
    return LeastMemorySearch(ranking.profile, ranking.workload, ranking.calibration, ranking.constraints, partition_cache)


def _fixes(ranking: Ranking, smallest: ScoredPlan, least_memory: LeastMemorySearch, retrace: RetraceOptions) -> Iterator[str]:
    """The smallest change of a setting that does not affect the training result; if there is none, changes of the training, of the cluster and of
    the devices' memory."""
    if setting := next(_setting_fixes(ranking), ""):
        yield setting
        return
    yield from islice(_training_fixes(ranking, smallest, retrace), 1)
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
        smallest = _least_memory(replace(ranking, constraints=freed)).smallest_plan(ranking.cluster)
        if smallest is not None and smallest.estimate.fits:
            yield f"{_cli_flags(name, smallest.plan)} instead of the {name} that was asked for ({smallest.estimate.reason})"


def _cli_flags(name: str, plan: Plan) -> str:
    """The options that make a plan of this setting, or of the mesh and all settings about memory."""
    flags = {
        "recompute": f"--set recompute={plan.memory.recompute}",
        "zero": f"--mesh {plan.mesh} --set zero={plan.memory.zero}",
        "micro_batches": f"--set micro_batches={plan.micro_batches}",
        "schedule": f"--set schedule={plan.schedule}",
    }
    zero = f" --set zero={plan.memory.zero}" * bool(plan.memory.zero)
    micro = f" --set micro_batches={plan.micro_batches}" * (plan.micro_batches > 1)
    return flags.get(name, f"--mesh {plan.mesh}{zero}{micro} --set recompute={plan.memory.recompute}")


def _training_fixes(ranking: Ranking, smallest: ScoredPlan, retrace: RetraceOptions) -> Iterator[str]:
    """Changes that affect the training result: fewer samples a step, a lower precision, shorter samples."""
    if smallest.plan.max_micro_batch_size > 1 and (batch := largest_fitting_batch(ranking)):  # a micro-batch of one sample cannot shrink
        yield f"--global-batch {batch}"
    kinds, total = smallest.estimate.memory_kinds, max(smallest.estimate.memory_bytes)
    if kinds["activations"] + kinds["workspace"] < 0.1 * total:
        return  # activations are a small part of the memory: nothing below changes the rest
    lower: Precision | None = "bf16" if ITEM_BYTES[ranking.workload.precision] > 2 and ranking.cluster.devices[0].kind == "cuda" else None
    if lower is not None and retrace.with_precision is not None:
        in_lower = replace(ranking, profile=retrace.with_precision(lower), workload=replace(ranking.workload, precision=lower))
        if _least_memory(in_lower).fits(ranking.cluster):
            yield f"--set precision={lower}"
    if retrace.with_length is not None and (length := longest_fitting_sequence(ranking, retrace.with_length)):
        yield f"shorter samples (--seq {length})"


def largest_fitting_batch(ranking: Ranking) -> int | None:
    """The largest smaller global batch that fits: the batch is halved until it fits, then raised in steps that its layout can take."""
    cache = _least_memory(ranking, ranking.partition_cache).partition_cache

    def plan_if_fits(samples: int) -> Plan | None:
        workload = replace(ranking.workload, global_batch=samples)
        smallest = _least_memory(replace(ranking, workload=workload), cache).smallest_plan(ranking.cluster)
        return smallest.plan if smallest is not None and smallest.estimate.fits else None

    batch = ranking.workload.global_batch
    low, first = next(((n, plan) for n in _halves(batch) if (plan := plan_if_fits(n)) is not None), (0, None))
    if first is None:
        return None
    unit = first.mesh.data_parallel_size * first.micro_batches
    high = min(2 * low, batch)
    while high - low > unit:
        middle = low + max((high - low) // 2 // unit, 1) * unit
        low, high = (middle, high) if plan_if_fits(middle) is not None else (low, middle)
    return low


def longest_fitting_sequence(ranking: Ranking, trace_length: Callable[[int], ModelProfile]) -> int | None:
    """The longest sample that fits, among successive halves of the requested length."""
    for length in _halves(ranking.profile.tokens_per_sample or 1, minimum=16):
        try:
            profile = trace_length(length)
        except RequestError:
            return None
        if _least_memory(replace(ranking, profile=profile)).fits(ranking.cluster):
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
    deadline = time.monotonic() + _TIME_LIMIT_S
    units, _ = cluster_units(cluster)
    unit_bytes = sum(d.memory_bytes for d in cluster.devices) / units * HEADROOM
    low = high = max(units, int(min_total_bytes / unit_bytes))
    while high * _devices_per_unit(cluster) < (_MAX_DEVICES_PER_NODE if _grows_by_device(cluster) else _MAX_DEVICES):
        low, high = high, 1 << high.bit_length()
        if fits(resize_cluster(cluster, high)):
            break
        if time.monotonic() > deadline:
            return None
    else:
        return None
    while high - low > 1 and time.monotonic() < deadline:
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
        return _least_memory(replace(ranking, workload=workload), least_memory.partition_cache).fits(cluster)

    units = fewest_units(ranking.cluster, fits, least_memory.min_total_bytes)
    if units is not None:
        yield f"{_describe_cluster_size(ranking.cluster, units)} with --global-batch {units * _devices_per_unit(ranking.cluster)}"


def _grows_by_device(cluster: Cluster) -> bool:
    """Whether a unit is a device: this machine may get more GPUs. CPUs share their node's memory, and other clusters grow by whole nodes."""
    return cluster.name == "here" and cluster.devices[0].kind != "cpu"


def cluster_units(cluster: Cluster) -> tuple[int, str]:
    """The number of units, and the word for one."""
    return (len(cluster.devices), "device") if _grows_by_device(cluster) else (len(cluster.nodes), "node")


def _devices_per_unit(cluster: Cluster) -> int:
    return 1 if _grows_by_device(cluster) else len(cluster.nodes[0].devices)


def resize_cluster(cluster: Cluster, units: int) -> Cluster:
    """The cluster with `units` nodes like its first; this machine with `units` GPUs."""
    node = cluster.nodes[0]
    if not _grows_by_device(cluster):
        return replace(cluster, nodes=(node,) * units)
    devices = tuple(replace(node.devices[i % len(node.devices)], index=i) for i in range(units))
    return replace(cluster, nodes=(replace(node, devices=devices),))


def _describe_cluster_size(cluster: Cluster, units: int) -> str:
    if _grows_by_device(cluster):
        return f"{units} such devices"
    name = f"--cluster {cluster.name}:{units}" if cluster.name not in ("here", "ideal") else "such as this machine"
    return f"at least {units} nodes ({name})"


def _device_memory_fix(ranking: Ranking, least_memory: LeastMemorySearch) -> Iterator[str]:
    """How much memory each device would need: what the smallest plan needs, rounded up to three digits."""
    smallest = least_memory.smallest_plan(with_memory(ranking.cluster, lambda _: _UNLIMITED_BYTES))
    if smallest is None:
        return
    need = math.ceil(max(smallest.estimate.memory_bytes) / HEADROOM)
    step = 10 ** max(len(str(need)) - 3, 0)
    size = -(-need // step) * step
    if least_memory.fits(with_memory(ranking.cluster, lambda _: size)):
        yield f"{'devices' if len(ranking.cluster.devices) > 1 else 'a device'} with {show_bytes(size)}"


def with_memory(cluster: Cluster, change: Callable[[int], int]) -> Cluster:
    """The same devices with changed memory; CPUs use their node's memory, which changes too."""

    def resize_node(node: Node) -> Node:
        devices = tuple(replace(d, memory_bytes=change(d.memory_bytes)) for d in node.devices)
        node_bytes = change(node.memory_bytes) if node.devices[0].kind == "cpu" else node.memory_bytes
        return replace(node, memory_bytes=node_bytes, devices=devices)

    return map_nodes(cluster, resize_node)
