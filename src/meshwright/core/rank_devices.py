"""Assigning ranks to mixed devices: GPU and CPU ranks in one job, or several ranks that share a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.cluster import Cluster, Device, DeviceKind
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh

DEVICES_VARIABLE = "MESHWRIGHT_DEVICES"  # the devices of a script's ranks, like "cuda:0,cpu"
_SAME_RNG_AXES = ("tp", "cp", "ep")  # axes whose ranks must draw the same random numbers, which a CPU and a GPU do not


def device_kind(device: str) -> DeviceKind:
    return "cpu" if device == "cpu" else "cuda"


def device_index(device: str) -> int:
    """The index of the card among those that the job uses; 0 for a CPU."""
    return int(device.partition(":")[2] or 0)


def assign_rank_devices(cluster: Cluster, world: int) -> tuple[str, ...]:
    """The devices of the first `world` ranks, one entry each, with cards numbered within each node; empty where all are of one kind and no two
    ranks share a card."""
    if len(cluster.distinct_nodes) == 1 and not node_rank_devices(cluster.nodes[0].devices):
        return ()  # avoids a loop over the nodes of a large cluster
    used = cluster.first_devices(min(world, len(cluster.devices)))
    mixed = {id(node): node_rank_devices(node.devices) for node in used.distinct_nodes}
    if not any(mixed.values()) and len({node.devices[0].kind for node in used.nodes}) == 1:
        return ()
    uniform = {id(node): tuple("cpu" if d.kind == "cpu" else f"cuda:{i}" for i, d in enumerate(node.devices)) for node in used.distinct_nodes}
    return tuple(device for node in used.nodes for device in mixed[id(node)] or uniform[id(node)])


def node_rank_devices(devices: Sequence[Device]) -> tuple[str, ...]:
    """`assign_rank_devices` for one node."""
    cards = list(dict.fromkeys(d.index for d in devices if d.kind == "cuda"))
    on_cards = sum(d.kind == "cuda" for d in devices)
    if on_cards == len(cards) in (0, len(devices)):
        return ()
    return tuple("cpu" if d.kind == "cpu" else f"cuda:{cards.index(d.index)}" for d in devices)


def rank_devices_from_env(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The devices of ranks, as set by the launcher; empty where all are of one kind."""
    return tuple(filter(None, environ.get(DEVICES_VARIABLE, "").split(",")))


def device_selection(rank_devices: Sequence[str]) -> tuple[int | Literal["cpu"], ...]:
    """The devices as a user selects them: the index of a card, or cpu."""
    return tuple("cpu" if device == "cpu" else device_index(device) for device in rank_devices)


def check_rank_devices(rank_devices: Sequence[str], mesh: Mesh, backend: str, precision: str) -> None:
    """Check that mesh, backend and precision support these devices."""
    if len(rank_devices) != mesh.size:
        raise RequestError(f"plan: rank_devices has {len(rank_devices)} entries for mesh {mesh} of {mesh.size} ranks: give {mesh.size}")
    for device in rank_devices:
        if device != "cpu" and not (device.startswith("cuda:") and device[5:].isdigit()):
            raise RequestError(f"plan: rank_devices: '{device}' is no device: write cpu or cuda:0")
    if not backend_traits(backend).shares_gpus:
        raise RequestError(f"plan: {backend.upper()} needs a card for every rank, and rank_devices has CPUs or a card twice: use backend=gloo")
    if precision == "fp8" and "cpu" in rank_devices:
        raise RequestError("plan: precision=fp8 needs a GPU for every rank, and some are on CPUs: use bf16")
    for axis in (a for a in _SAME_RNG_AXES if mesh.degree(a) > 1):
        for group in mesh.groups(axis):
            if len({device_kind(rank_devices[r]) for r in group}) > 1:
                why = f"{axis} joins ranks on a CPU and on a GPU, which draw different random numbers"
                raise RequestError(f"plan: mesh {mesh}: {why}: use dp, shard or pp for them")


def group_backend(rank_devices: Sequence[str], group: Sequence[int], backend: str) -> str:
    """The GPU backend for a group whose ranks all have a GPU to themselves, else the plan's process-group backend."""
    devices = [rank_devices[rank] for rank in group] if rank_devices else []
    return backend_for("cuda") if devices and "cpu" not in devices and len(set(devices)) == len(devices) else backend


def show_rank_devices(rank_devices: Sequence[str], world: int, kind: str) -> str:
    """'2 × cuda', or '1 × cuda + 2 × cpu'."""
    counts = Counter(map(device_kind, rank_devices)) if rank_devices else {kind: world}
    return " + ".join(f"{count} × {name}" for name, count in counts.items())
