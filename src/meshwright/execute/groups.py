"""From a mesh to live communication: one `Comm` for each axis that has more than one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from meshwright.comm import Ledger, NullComm, TorchComm
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh


@dataclass(frozen=True)
class Groups:
    """This rank's groups: everyone, its replicas (dp) and its shard partners (shard)."""

    rank: int
    world: Comm
    dp: Comm
    shard: Comm
    ledger: Ledger = field(default_factory=Ledger)


def make_groups(mesh: Mesh) -> Groups:
    """Collective: every rank of the default process group calls it with the same mesh."""
    ledger = Ledger()
    if mesh.size == 1:
        return Groups(0, NullComm(), NullComm(), NullComm(), ledger)
    if dist.get_world_size() != mesh.size:
        raise RequestError(f"the plan's mesh {mesh} has {mesh.size} ranks, {dist.get_world_size()} were started: use --nproc {mesh.size}")
    world = dist.group.WORLD
    assert world is not None
    comms = {axis: _axis_comm(mesh, axis, world, ledger) for axis in ("dp", "shard")}
    return Groups(dist.get_rank(), TorchComm(world, ledger), comms["dp"], comms["shard"], ledger)


def _axis_comm(mesh: Mesh, axis: str, world: dist.ProcessGroup, ledger: Ledger) -> Comm:
    if mesh.degree(axis) == 1:
        return NullComm()
    if mesh.degree(axis) == mesh.size:
        return TorchComm(world, ledger)
    group, _ = dist.new_subgroups_by_enumeration(mesh.groups(axis))
    return TorchComm(group, ledger)
