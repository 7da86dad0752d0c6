"""From a mesh to live communication: one `Comm` for each axis that has more than one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from meshwright.comm import Ledger, NullComm, TorchComm, mpi
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.mesh import GROUP_AXES, Mesh


@dataclass(frozen=True)
class Groups:
    """This rank's groups: everyone, and one for each name in `GROUP_AXES`."""

    rank: int
    world: Comm
    batch: Comm
    data: Comm
    replica: Comm
    owned: Comm
    pp: Comm
    dp: Comm
    shard: Comm
    cp: Comm
    ep: Comm
    tp: Comm
    tpx: Comm
    tpy: Comm
    ledger: Ledger = field(default_factory=Ledger)

    def of(self, name: str) -> Comm:
        found: Comm = getattr(self, name)
        return found


def make_ready(backend: str, timeout_s: float) -> None:
    """Before ranks meet: torch's wheels know `mpi` by name only, and learn the rest here."""
    if backend == "mpi":
        mpi.register(timeout_s)


def make_groups(mesh: Mesh) -> Groups:
    """Collective: every rank of the default process group calls it with the same mesh."""
    ledger = Ledger()
    if mesh.size == 1:
        alone = NullComm()
        return Groups(0, alone, **dict.fromkeys(GROUP_AXES, alone), ledger=ledger)
    if dist.get_world_size() != mesh.size:
        raise RequestError(f"the plan's mesh {mesh} has {mesh.size} ranks, {dist.get_world_size()} were started: use --nproc {mesh.size}")
    world = dist.group.WORLD
    assert world is not None
    made: dict[tuple[tuple[int, ...], ...], Comm] = {}
    comms = {name: _comm(mesh.groups(*axes), world, ledger, made) for name, axes in GROUP_AXES.items()}
    return Groups(dist.get_rank(), TorchComm(world, ledger), **comms, ledger=ledger)


def _comm(ranks: list[list[int]], world: dist.ProcessGroup, ledger: Ledger, made: dict[tuple[tuple[int, ...], ...], Comm]) -> Comm:
    """The group that this rank is in; axes that join the same ranks share one."""
    key = tuple(map(tuple, ranks))
    if key not in made:
        if len(ranks[0]) == 1:
            made[key] = NullComm()
        elif len(ranks) == 1:
            made[key] = TorchComm(world, ledger)
        else:
            group, _ = dist.new_subgroups_by_enumeration(ranks)
            made[key] = TorchComm(group, ledger)
    return made[key]


def joined(mesh: Mesh, axis: str, coordinates: tuple[int, ...], ledger: Ledger) -> Comm | None:
    """A group of the ranks at some coordinates of one axis; None where this rank is not among them. Collective."""
    ranks = [[r for r in group if mesh.coordinate(r, axis) in coordinates] for group in mesh.groups(axis)]
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    return TorchComm(group, ledger) if group is not None else None
