"""Process groups of a mesh: one `Comm` for each axis that has more than one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import ComposedComm, Ledger, NullComm, RoutedComm, SharedMemoryGroup, TorchComm, mpi, open_window
from meshwright.core.backends import backend_traits
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.mesh import GROUP_AXES, Mesh
from meshwright.core.plan import SyncPolicy
from meshwright.core.rank_devices import group_backend
from meshwright.core.routes import Route, applicable_routes, choose_route, group_by_node, has_two_levels, is_applicable
from meshwright.core.schedule import wire_factor

_DEFAULT_SYNC = SyncPolicy()
_REGISTERED: dict[str, Callable[[float], object]] = {"mpi": mpi.register}  # backends that Meshwright registers with torch


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups: the world, and one for each name in `GROUP_AXES`."""

    rank: int
    world: Comm
    batch: Comm
    data: Comm
    replica: Comm
    expert_replica: Comm
    pp: Comm
    dp: Comm
    shard: Comm
    cp: Comm
    ep: Comm
    tp: Comm
    tpx: Comm
    tpy: Comm
    ledger: Ledger = field(default_factory=Ledger)
    subgroups: list[Comm] = field(default_factory=list)  # made later, for parts of a group

    def get(self, name: str) -> Comm:
        return getattr(self, name)


def register_backend(backend: str, timeout_s: float) -> None:
    """Register a backend with torch before process groups are made: torch's wheels know `mpi` by name only."""
    if (register := _REGISTERED.get(backend)) is not None:
        register(timeout_s)


def make_process_groups(
    mesh: Mesh, sync: SyncPolicy = _DEFAULT_SYNC, rank_devices: Sequence[str] = (), *, shares_world: bool = True
) -> ProcessGroups:
    """Make this rank's groups. Collective: every rank of the default process group calls it with the same arguments. A group of all ranks is the
    default group itself or, unless it `shares_world`, a new one that can be destroyed."""
    ledger = Ledger()
    if mesh.size == 1:
        alone: dict[str, Any] = dict.fromkeys(GROUP_AXES, NullComm())
        return ProcessGroups(0, NullComm(), **alone, ledger=ledger)
    if dist.get_world_size() != mesh.size:
        raise RequestError(f"the plan's mesh {mesh} has {mesh.size} ranks, but {dist.get_world_size()} were started: use --nproc {mesh.size}")
    factory = _GroupFactory(ledger, sync, rank_devices, shares_world)
    comms: dict[str, Any] = {name: factory.comm_for(mesh.groups(*axes)) for name, axes in GROUP_AXES.items()}
    return ProcessGroups(dist.get_rank(), factory.comm_for([list(range(mesh.size))]), **comms, ledger=ledger)


def process_group(comm: Comm) -> dist.ProcessGroup:
    """The torch process group over the default backend, for what torch itself sends."""
    default = comm.default_comm if isinstance(comm, RoutedComm) else comm
    assert isinstance(default, TorchComm)
    return default.group


def destroy_process_groups(groups: ProcessGroups) -> None:
    """Destroy what `make_process_groups` has made; the default group stays. For plans that were only tried. Gloo's connections are closed when
    nothing refers to the groups any more, and ranks that wait in one fail then."""
    comms = [groups.world, *(getattr(groups, name) for name in GROUP_AXES), *groups.subgroups]
    made = {id(g): g for comm in comms if isinstance(comm, TorchComm) and (g := comm.group) is not dist.group.WORLD}
    for group in made.values():
        dist.destroy_process_group(group)


class _GroupFactory:
    """Makes this rank's groups, over every backend that the policy routes calls to; axes over the same ranks share one `Comm`."""

    def __init__(self, ledger: Ledger, sync: SyncPolicy, rank_devices: Sequence[str], shares_world: bool) -> None:
        self._ledger, self._sync, self._rank_devices, self._shares_world = ledger, sync, rank_devices, shares_world
        self._comms: dict[tuple[tuple[int, ...], ...], Comm] = {}
        self._other_backends = tuple(dict.fromkeys(r.backend for r in sync.routes if r.backend != dist.get_backend()))
        for backend in self._other_backends:
            register_backend(backend, sync.timeout_s)

    def comm_for(self, rank_groups: list[list[int]]) -> Comm:
        key = tuple(map(tuple, rank_groups))
        if key not in self._comms:
            self._comms[key] = self._make_comm(rank_groups) if len(rank_groups[0]) > 1 else NullComm()
        return self._comms[key]

    def _make_comm(self, rank_groups: list[list[int]]) -> Comm:
        default = TorchComm(self._new_group(rank_groups), self._ledger)
        if not self._sync.routes or not backend_traits(default.backend).routable:
            return default
        others = {b: _backend_comm(rank_groups, b, self._ledger) for b in self._other_backends}
        routes = applicable_routes(self._sync.routes, _my_group(rank_groups), self._sync.ranks_per_node)
        composed_backends = dict.fromkeys(r.backend for r in self._sync.routes if r.algorithm != "flat")
        memories = {b: shared_memory_group(rank_groups, b, self._sync) for b in composed_backends}
        routes = tuple(r for r in routes if r.algorithm == "flat" or memories[r.backend].has(r.algorithm))
        choose = lambda op, size: choose_route(routes, op, size * wire_factor(op, default.size), default.backend)  # noqa: E731
        return RoutedComm({default.backend: default, **others}, choose, composed_routes(memories, routes, self._ledger))

    def _new_group(self, rank_groups: list[list[int]]) -> dist.ProcessGroup:
        """This rank's group; if ranks are on unlike devices, each group has the backend of its own devices."""
        if len(rank_groups) == 1 and self._shares_world:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        timeout = None if self._shares_world else timedelta(seconds=self._sync.timeout_s)
        backends = [group_backend(self._rank_devices, group, dist.get_backend()) for group in rank_groups]
        groups = [dist.new_group(group, timeout, backend) for group, backend in zip(rank_groups, backends, strict=True)]
        return groups[rank_groups.index(_my_group(rank_groups))]


def shared_memory_group(ranks: list[list[int]], backend: str, sync: SyncPolicy) -> SharedMemoryGroup:
    """The shared memory that the policy's routes over one backend need, for this rank's group among `ranks`. Collective over the world."""
    comm, my_ranks = _backend_comm(ranks, backend, Ledger()), _my_group(ranks)
    algorithms = {r.algorithm for r in sync.routes if r.backend == backend}
    on_one_node = "shared" in algorithms and is_applicable("shared", my_ranks, sync.ranks_per_node)
    window = open_window(comm, my_ranks, sync.timeout_s) if on_one_node else None
    if "two-level" not in algorithms or not all(has_two_levels(group, sync.ranks_per_node) for group in ranks):
        return SharedMemoryGroup(comm, backend, window)
    nodes = [[[group[i] for i in node] for node in group_by_node(group, sync.ranks_per_node)] for group in ranks]
    node_ranks = [node for group in nodes for node in group]
    cross_node_ranks = [list(peers) for group in nodes for peers in zip(*group, strict=True)]
    node_comm, cross_node_comm = _backend_comm(node_ranks, backend, Ledger()), _backend_comm(cross_node_ranks, backend, Ledger())
    node_window = open_window(node_comm, _my_group(node_ranks), sync.timeout_s)
    opened = torch.tensor([node_window is not None], dtype=torch.int32)
    comm.all_reduce(opened, "window", "min").wait()  # one node without shared memory: no rank takes this route, or ranks would wait for each other
    return SharedMemoryGroup(comm, backend, window, node_window if opened.item() else None, cross_node_comm)


def _my_group(rank_groups: list[list[int]]) -> list[int]:
    return next(group for group in rank_groups if dist.get_rank() in group)


def _backend_comm(rank_groups: list[list[int]], backend: str, ledger: Ledger) -> TorchComm:
    return TorchComm(dist.new_subgroups_by_enumeration(rank_groups, backend=backend)[0], ledger)


def composed_routes(memories: Mapping[str, SharedMemoryGroup], routes: Sequence[Route], ledger: Ledger) -> dict[str, ComposedComm]:
    """Comms of the routes that do not use the backend's own collectives, by route name."""
    return {r.route_name: ComposedComm(memories[r.backend], r.algorithm, ledger) for r in routes if r.algorithm != "flat"}


def new_subgroup(mesh: Mesh, axis: str, coordinates: tuple[int, ...], ledger: Ledger) -> Comm | None:
    """A group of the ranks at `coordinates` of one axis; None if this rank is not among them. Collective."""
    ranks = [[r for r in group if mesh.coordinate(r, axis) in coordinates] for group in mesh.groups(axis)]
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    return TorchComm(group, ledger) if group is not None else None
