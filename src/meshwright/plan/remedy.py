"""When nothing fits: by how much, and the smallest changes that make it possible. Each is verified by an estimate before it is proposed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.cluster import Cluster, Node
from meshwright.core.cluster_changes import map_nodes
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.units import show_bytes
from meshwright.core.workload import ITEM_BYTES, Precision
from meshwright.cost.step import HEADROOM
from meshwright.plan.least import Least
from meshwright.plan.search import Ranking, Scored

_MOST_DEVICES = 4096
_MOST_CARDS = 64  # in one machine
_PATIENCE_S = 5.0  # for a number of machines
_LARGEST = 1 << 50  # bytes: what no device has


@dataclass(frozen=True)
class Retrace:
    """How the model can be traced again, for what a profile cannot say of itself; None where it cannot."""

    shorter: Callable[[int], ModelProfile] | None = None  # by the length of a sample
    lower: Callable[[Precision], ModelProfile] | None = None


def too_big(ranking: Ranking, retrace: Retrace | None = None) -> str:
    """One line: what the smallest plan needs, what there is, and what would help."""
    least = Least(ranking.profile, ranking.workload, ranking.calibration, ranking.wishes, ranking.cutter)
    smallest = min((s for s in (least.on(ranking.cluster), ranking.best) if s is not None), key=lambda s: max(s.estimate.memory_bytes))
    found = smallest.estimate
    kind, size = max(found.memory_kinds.items(), key=lambda item: item[1])
    total = ""
    if smallest.plan.world > 1:
        have = sum(d.memory_bytes for d in ranking.cluster.devices[: smallest.plan.world])
        total = f", and {show_bytes(sum(found.memory_bytes))} on all {smallest.plan.world}, which have {show_bytes(have)}"
    ways = list(_ways(ranking, smallest, least, retrace or Retrace()))
    need = f"the smallest plan ({smallest.plan.summary()}) {found.reason}{total} (largest part: {kind}, {show_bytes(size)} a device)"
    return f"Nothing fits: {need}. What would help: {', or '.join(ways) if ways else 'nothing that was tried: use a smaller model'}."


def _ways(ranking: Ranking, smallest: Scored, least: Least, retrace: Retrace) -> Iterator[str]:
    """The smallest change of a setting that leaves the result as it is; else of the training; and of the machine."""
    setting = next(_settings(ranking), None)
    if setting is not None:
        yield setting
        return
    other = next(_trainings(ranking, smallest, retrace), None)
    yield from [other] if other is not None else []
    if ranking.wishes.mesh is None and ranking.wishes.world is None:
        yield from _wider(ranking, least)
    yield from _memory(ranking, least)


def _settings(ranking: Ranking) -> Iterator[str]:
    """Wishes that stand in the way, one at a time; then all of those about memory, then the mesh as well."""
    wishes = ranking.wishes
    loosened: dict[str, dict[str, None]] = {}
    if wishes.recompute in ("none", "selective"):
        loosened["recompute"] = {"recompute": None}
    loosened |= {name: {name: None} for name in ("zero", "micro_batches", "schedule") if getattr(wishes, name) is not None}
    memory = {name: None for name in ("zero", "micro_batches", "recompute") if getattr(wishes, name) is not None}
    if len(memory) > 1:
        loosened[" and ".join(memory)] = memory
    if wishes.mesh is not None:
        loosened["mesh"] = {"mesh": None}
        loosened[" and ".join(("mesh", *memory))] = {"mesh": None, **memory}
    for name, change in loosened.items():
        freed = replace(wishes, **change)  # type: ignore[arg-type]
        found = Least(ranking.profile, ranking.workload, ranking.calibration, freed).on(ranking.cluster)
        if found is not None and found.estimate.fits:
            yield f"{_flags(name, found)} instead of the {name} that was asked for ({found.estimate.reason})"


def _flags(name: str, found: Scored) -> str:
    plan = found.plan
    told = {
        "recompute": f"--set recompute={plan.memory.recompute}",
        "zero": f"--mesh {plan.mesh} --set zero={plan.memory.zero}",
        "micro_batches": f"--set micro_batches={plan.micro_batches}",
        "schedule": f"--set schedule={plan.schedule}",
    }
    zero = f" --set zero={plan.memory.zero}" * bool(plan.memory.zero)
    micro = f" --set micro_batches={plan.micro_batches}" * (plan.micro_batches > 1)
    return told.get(name, f"--mesh {plan.mesh}{zero}{micro} --set recompute={plan.memory.recompute}")


def _trainings(ranking: Ranking, smallest: Scored, retrace: Retrace) -> Iterator[str]:
    """Fewer samples a step, a lower precision, shorter samples: what is trained is then not quite the same."""
    batch = most_samples(ranking) if smallest.plan.largest_micro_batch > 1 else None  # one at a time is as few as can be
    if batch is not None:
        yield f"--global-batch {batch}"
    kinds, total = smallest.estimate.memory_kinds, max(smallest.estimate.memory_bytes)
    if kinds["activations"] + kinds["workspace"] < 0.1 * total:
        return  # what samples need is little: nothing below changes the rest
    lower: Precision | None = "bf16" if ITEM_BYTES[ranking.workload.precision] > 2 and ranking.cluster.devices[0].kind == "cuda" else None
    if lower is not None and retrace.lower is not None:
        profile = retrace.lower(lower)
        if Least(profile, replace(ranking.workload, precision=lower), ranking.calibration, ranking.wishes).fits(ranking.cluster):
            yield f"--set precision={lower}"
    length = longest(ranking, retrace.shorter) if retrace.shorter is not None else None
    if length is not None:
        yield f"shorter samples (--seq {length})"


def most_samples(ranking: Ranking) -> int | None:
    """The largest smaller global batch that fits: halved until one does, then as many more as its layout takes."""
    batch = high = ranking.workload.global_batch
    cutter = ranking.cutter

    def found(samples: int) -> Scored | None:
        nonlocal cutter
        least = Least(ranking.profile, replace(ranking.workload, global_batch=samples), ranking.calibration, ranking.wishes, cutter)
        cutter = least.cutter
        best = least.on(ranking.cluster)
        return best if best is not None and best.estimate.fits else None

    low = next((n for n in _halves(batch) if found(n) is not None), None)
    if low is None:
        return None
    first = found(low)
    unit = first.plan.mesh.data_width * first.plan.micro_batches if first is not None else low
    high = min(2 * low, batch)
    while high - low > unit:
        middle = low + max((high - low) // 2 // unit, 1) * unit
        low, high = (middle, high) if found(middle) is not None else (low, middle)
    return low


def longest(ranking: Ranking, shorter: Callable[[int], ModelProfile]) -> int | None:
    """The longest sample, among halves of the one asked for, that fits."""
    for length in _halves(ranking.profile.tokens_per_sample or 1, least=16):
        try:
            profile = shorter(length)
        except RequestError:
            return None
        if Least(profile, ranking.workload, ranking.calibration, ranking.wishes).fits(ranking.cluster):
            return length
    return None


def _halves(number: int, least: int = 1) -> Iterator[int]:
    while number // 2 >= least:
        number //= 2
        yield number


# -- the machine --


def fewest_nodes(cluster: Cluster, fits: Callable[[Cluster], bool], total: float = 0.0) -> int | None:
    """The smallest number of units (`grown`) on which something fits, one less than which does not; None where that is beyond reason, or takes too
    long to find. Together they hold at least `total` bytes, so fewer are not tried."""
    until = time.monotonic() + _PATIENCE_S
    room = sum(d.memory_bytes for d in cluster.devices) / _units(cluster) * HEADROOM
    low = max(_units(cluster), int(total / room))
    high = low
    while high * _unit_size(cluster) < (_MOST_CARDS if _by_device(cluster) else _MOST_DEVICES):
        low, high = high, 1 << high.bit_length()
        if fits(grown(cluster, high)):
            break
        if time.monotonic() > until:
            return None
    else:
        return None
    while high - low > 1 and time.monotonic() < until:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(grown(cluster, middle)) else (middle, high)
    return high


def _wider(ranking: Ranking, least: Least) -> Iterator[str]:
    """More of the same machines; where the batch is too small to be shared among as many, with a batch that is not."""
    units = fewest_nodes(ranking.cluster, least.fits, least.total)
    if units is not None:
        yield _more(ranking.cluster, units)
        return

    def fits(cluster: Cluster) -> bool:
        workload = replace(ranking.workload, global_batch=len(cluster.devices))
        return Least(ranking.profile, workload, ranking.calibration, ranking.wishes, least.cutter).fits(cluster)

    units = fewest_nodes(ranking.cluster, fits, least.total)
    if units is not None:
        yield f"{_more(ranking.cluster, units)} with --global-batch {units * _unit_size(ranking.cluster)}"


def _by_device(cluster: Cluster) -> bool:
    """This machine may get more cards; CPUs share the memory that there is, and machines elsewhere come as they are."""
    return cluster.name == "here" and cluster.devices[0].kind != "cpu"


def _units(cluster: Cluster) -> int:
    return len(cluster.devices) if _by_device(cluster) else len(cluster.nodes)


def units_of(cluster: Cluster) -> tuple[int, str]:
    """How many units there are, and what one is called."""
    return _units(cluster), "device" if _by_device(cluster) else "node"


def _unit_size(cluster: Cluster) -> int:
    return 1 if _by_device(cluster) else len(cluster.nodes[0].devices)


def grown(cluster: Cluster, units: int) -> Cluster:
    """The cluster with as many nodes like its first; this machine with as many cards."""
    node = cluster.nodes[0]
    if not _by_device(cluster):
        return replace(cluster, nodes=(node,) * units)
    cards = tuple(replace(node.devices[i % len(node.devices)], index=i) for i in range(units))
    return replace(cluster, nodes=(replace(node, devices=cards),))


def _more(cluster: Cluster, units: int) -> str:
    if _by_device(cluster):
        return f"{units} such devices"
    name = f"--cluster {cluster.name}:{units}" if cluster.name not in ("here", "ideal") else "such as this machine"
    return f"at least {units} nodes ({name})"


def _memory(ranking: Ranking, least: Least) -> Iterator[str]:
    """How much memory each device would need: what the smallest plan needs, rounded up to three digits."""
    roomy = least.on(with_memory(ranking.cluster, lambda _: _LARGEST))
    if roomy is None:
        return
    need = math.ceil(max(roomy.estimate.memory_bytes) / HEADROOM)
    step = 10 ** max(len(str(need)) - 3, 0)
    size = -(-need // step) * step
    if least.fits(with_memory(ranking.cluster, lambda _: size)):
        yield f"{'devices' if len(ranking.cluster.devices) > 1 else 'a device'} with {show_bytes(size)}"


def with_memory(cluster: Cluster, change: Callable[[int], int]) -> Cluster:
    """The same devices with other memory; CPUs have their node's."""

    def changed(node: Node) -> Node:
        devices = tuple(replace(d, memory_bytes=change(d.memory_bytes)) for d in node.devices)
        own = change(node.memory_bytes) if node.devices[0].kind == "cpu" else node.memory_bytes
        return replace(node, memory_bytes=own, devices=devices)

    return map_nodes(cluster, changed)
