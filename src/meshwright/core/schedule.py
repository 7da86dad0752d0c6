"""A schedule: the ordered actions of one step, as data. Other packages run, price, count or draw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.mesh import Mesh

COLLECTIVE_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
P2P_OPS = ("send", "recv")
COMPUTE_OPS = ("forward", "backward", "optimizer")
Op = Literal["forward", "backward", "optimizer", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "wait"]
GroupRanks = Mapping[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Action:
    """One action of a rank. A collective starts at its position in the program and runs asynchronously, after the actions in `depends_on`."""

    name: str
    op: Op
    layer: int = -1  # index into the profile's layers, for computation
    bytes: int = 0  # size of the whole tensor that a collective works on, padding included
    padding: int = 0  # of `bytes`, padding
    expected_bytes: int | None = None  # where the data decides the size and `bytes` is its upper bound: the size for evenly spread data
    axis: str = ""
    group_size: int = 0  # participating ranks, where not all of the axis's group: two for a send
    depends_on: tuple[str, ...] = ()
    skips_expensive: bool = False  # a layer's forward without matmuls, convolutions and attention: selective recomputation
    seconds: float = 0.0  # of computation, where given: a schedule with its own times needs no profile
    flops: float = 0.0  # likewise, for a runner that computes instead of sleeping
    peer: int = -1  # of a message: the peer's index in the group of `axis`, so that equivalent ranks share a program
    is_blocking: bool = False  # the rank continues only when this has finished

    @property
    def is_collective(self) -> bool:
        return self.op in COLLECTIVE_OPS

    @property
    def is_communication(self) -> bool:
        return self.is_collective or self.op == "send"  # a recv is counted at its send

    def renamed(self, name: str, depends_on: tuple[str, ...] = ()) -> Action:
        """A copy with another name and other dependencies. A search makes millions of them, and `replace` takes ten times as long."""
        copy = object.__new__(Action)
        copy.__dict__.update(self.__dict__, name=name, depends_on=depends_on)
        return copy

    def num_ranks(self, mesh: Mesh) -> int:
        """The number of participating ranks."""
        return self.group_size or mesh.group_size(self.axis)


@dataclass(frozen=True)
class Schedule:
    """The steady-state step of every rank. Ranks with the same actions share one program: `program_of_rank` maps a rank to its program.

    A plan's schedule names groups by the axes of its mesh and leaves `groups` empty. A standalone schedule, such as a proxy's, lists
    them: for each name the ranks of every group, in the order that `peer` indexes; a rank is in at most one group of each name.
    """

    programs: tuple[tuple[Action, ...], ...]
    program_of_rank: Mapping[str, int] = field(default_factory=dict)
    groups: GroupRanks = field(default_factory=dict)
    world: int = 0
    name: str = ""

    def program_for(self, rank: int) -> tuple[Action, ...]:
        return self.programs[self.program_of_rank.get(str(rank), 0)]

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """By name, the group that a rank is in."""
        return {name: group for name, groups in self.groups.items() for group in groups if rank in group}


def wire_factor(op: str, group_size: int) -> float:
    """Bytes that a rank must send per byte of the tensor, by the bandwidth-optimal algorithm; an all-reduce is reduce-scatter plus all-gather."""
    others = (group_size - 1) / group_size
    tree = float(group_size > 1)
    return {"all_reduce": 2 * others, "broadcast": tree, "reduce": tree, "send": 1.0, "recv": 1.0}.get(op, others)
