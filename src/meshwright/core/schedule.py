"""A schedule: the ordered actions of one step, as data. It can be run, priced, counted or drawn; it does none of that itself."""

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
    """One thing a rank does. A collective runs beside computation from where it stands; `depends_on` names what must be over first."""

    name: str
    op: Op
    layer: int = -1  # index into the profile's layers, for computation
    bytes: int = 0  # size of the whole tensor that a collective works on, padding included
    padding: int = 0  # of these, bytes that carry nothing
    expected_bytes: int | None = None  # where the data decides and `bytes` is the most that it can be: what an even spread of it gives
    axis: str = ""
    group_size: int = 0  # ranks that take part, where they are not all of the axis's: two for a send
    depends_on: tuple[str, ...] = ()
    skips_expensive: bool = False  # of a layer's forward only what is neither product, convolution nor attention: selective recomputation
    seconds: float = 0.0  # of computation, where that is settled: a schedule that carries its times needs no profile
    flops: float = 0.0  # likewise, for those who would rather compute than wait
    peer: int = -1  # of a message: the other's place in the group of `axis`, so that ranks alike share a program
    is_blocking: bool = False  # the rank goes on only when this is over

    @property
    def is_collective(self) -> bool:
        return self.op in COLLECTIVE_OPS

    @property
    def is_communication(self) -> bool:
        return self.is_collective or self.op == "send"  # what is received was counted where it was sent

    def renamed(self, name: str, depends_on: tuple[str, ...] = ()) -> Action:
        """The same under another name, after other things. A search makes millions of them, and `replace` takes ten times as long."""
        made = object.__new__(Action)
        made.__dict__.update(self.__dict__, name=name, depends_on=depends_on)
        return made

    def num_ranks(self, mesh: Mesh) -> int:
        """How many ranks take part."""
        return self.group_size or mesh.group_size(self.axis)


@dataclass(frozen=True)
class Schedule:
    """The steady step of every rank. Ranks that do the same share one entry: `program_of_rank` maps a rank to its program.

    A plan's schedule names groups by the axes of its mesh and leaves `groups` empty. One that stands by itself, as a proxy's does, lists
    them: for each name the ranks of every group, in the order in which `peer` counts them; a rank is in at most one group of a name.
    """

    programs: tuple[tuple[Action, ...], ...]
    program_of_rank: Mapping[str, int] = field(default_factory=dict)
    groups: GroupRanks = field(default_factory=dict)
    world: int = 0
    name: str = ""

    def program_for(self, rank: int) -> tuple[Action, ...]:
        return self.programs[self.program_of_rank.get(str(rank), 0)]

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The group that a rank is in, for each name."""
        return {name: group for name, groups in self.groups.items() for group in groups if rank in group}


def wire_factor(op: str, group_size: int) -> float:
    """Bytes a rank must send for each byte of the tensor, by the bandwidth-optimal algorithm; an all-reduce is both halves."""
    share = (group_size - 1) / group_size
    several = float(group_size > 1)
    return {"all_reduce": 2 * share, "broadcast": several, "reduce": several, "send": 1.0, "recv": 1.0}.get(op, share)
