"""Ranks on unlike devices: a GPU rank and CPU ranks in one job, or several ranks that share a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.cluster import Cluster, Device, DeviceKind
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh

DEVICES_VARIABLE = "MESHWRIGHT_DEVICES"  # where a script's ranks find what each of them is on, like "cuda:0,cpu"
_SAME_RNG_AXES = ("tp", "cp", "ep")  # axes whose ranks draw the same random numbers, which a CPU and a GPU do not


def device_kind(device: str) -> DeviceKind:
    return "cpu" if device == "cpu" else "cuda"


def device_index(device: str) -> int:
    """Which card, of those that the job uses."""
    return int(device.partition(":")[2] or 0)


def assign_rank_devices(cluster: Cluster, world: int) -> tuple[str, ...]:
    """What the first `world` ranks are on, one entry each, cards counted in each node; nothing where all are alike and have their devices to
    themselves."""
    if len(cluster.distinct_nodes) == 1 and not node_rank_devices(cluster.nodes[0].devices):
        return ()  # of a large cluster's nodes there is one
    nodes, left = [], world
    for node in cluster.nodes:
        if left <= 0:
            break
        nodes.append(node if len(node.devices) <= left else replace(node, devices=node.devices[:left]))
        left -= len(node.devices)
    found = {id(node): node_rank_devices(node.devices) for node in {id(node): node for node in nodes}.values()}
    if not any(found.values()) and len({node.devices[0].kind for node in nodes}) == 1:
        return ()
    alone = {id(node): tuple("cpu" if d.kind == "cpu" else f"cuda:{i}" for i, d in enumerate(node.devices)) for node in nodes}
    return tuple(place for node in nodes for place in found[id(node)] or alone[id(node)])


def node_rank_devices(devices: Sequence[Device]) -> tuple[str, ...]:
    """The same for one node."""
    cards = list(dict.fromkeys(d.index for d in devices if d.kind == "cuda"))
    on_cards = sum(d.kind == "cuda" for d in devices)
    if on_cards == len(cards) in (0, len(devices)):
        return ()
    return tuple("cpu" if d.kind == "cpu" else f"cuda:{cards.index(d.index)}" for d in devices)


def rank_devices_from_env(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What a launcher said that ranks are on; nothing where they are alike."""
    return tuple(filter(None, environ.get(DEVICES_VARIABLE, "").split(",")))


def device_selection(rank_devices: Sequence[str]) -> tuple[int | Literal["cpu"], ...]:
    """Places as one names devices: the number of a card, or cpu."""
    return tuple("cpu" if place == "cpu" else device_index(place) for place in rank_devices)


def check_rank_devices(rank_devices: Sequence[str], mesh: Mesh, backend: str, precision: str) -> None:
    """What ranks on unlike devices cannot do, with the reason."""
    if len(rank_devices) != mesh.size:
        raise RequestError(f"plan: places has {len(rank_devices)} entries for mesh {mesh} of {mesh.size} ranks: give {mesh.size}")
    for place in rank_devices:
        if place != "cpu" and not (place.startswith("cuda:") and place[5:].isdigit()):
            raise RequestError(f"plan: places: '{place}' is no place for a rank: write cpu or cuda:0")
    if not backend_traits(backend).shares_gpus:
        raise RequestError(f"plan: {backend.upper()} needs a card for every rank, and places has CPUs or a card twice: use backend=gloo")
    if precision == "fp8" and "cpu" in rank_devices:
        raise RequestError("plan: precision=fp8 needs a GPU for every rank, and some are on CPUs: use bf16")
    for axis in (a for a in _SAME_RNG_AXES if mesh.degree(a) > 1):
        for group in mesh.groups(axis):
            if len({device_kind(rank_devices[r]) for r in group}) > 1:
                raise RequestError(
                    f"plan: mesh {mesh}: {axis} joins ranks on a CPU and on a GPU, which draw other random numbers: use dp, shard or pp for them"
                )


def group_backend(rank_devices: Sequence[str], group: Sequence[int], backend: str) -> str:
    """That of GPUs where every rank of a group has one to itself, else what all ranks meet by."""
    mine = [rank_devices[rank] for rank in group] if rank_devices else []
    return backend_for("cuda") if mine and "cpu" not in mine and len(set(mine)) == len(mine) else backend


def show_rank_devices(rank_devices: Sequence[str], world: int, kind: str) -> str:
    """'2 × cuda', or '1 × cuda + 2 × cpu'."""
    counts = Counter(map(device_kind, rank_devices)) if rank_devices else {kind: world}
    return " + ".join(f"{count} × {name}" for name, count in counts.items())
