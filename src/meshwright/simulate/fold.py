"""Ranks that do the same at the same time: found once, simulated once.

[Note: which ranks are alike]
Ranks start out alike if they share a program and a speed. They stay alike only if, in each group that the program uses, they meet ranks that are
alike, over a link that is alike; for messages also in the same places. Refining until nothing changes gives classes whose members get the
same times in any deterministic run: replicas and tensor-parallel ranks fall together, stages do not.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.core.schedule import COLLECTIVES, MESSAGES, Schedule
from meshwright.simulate.network import Network

_PROBE_BYTES = 2**20  # links are alike if a message of this size takes the same time


@dataclass(frozen=True)
class Fold:
    """`of[rank]` is a rank's class; `first[class]` the rank that stands for it."""

    of: tuple[int, ...]
    first: tuple[int, ...]
    home: Mapping[tuple[str, int], tuple[int, ...]]  # (axis, rank) → the ranks of its group

    def ranks(self, number: int) -> list[int]:
        return [rank for rank, mine in enumerate(self.of) if mine == number]


def fold(schedule: Schedule, network: Network, speeds: Mapping[int, float], *, apart: bool = False) -> Fold:
    """The classes of a schedule's ranks; `apart` keeps every rank to itself."""
    world = schedule.world
    home = {(axis, rank): group for axis, groups in schedule.groups.items() for group in groups for rank in group}
    if apart:
        return Fold(tuple(range(world)), tuple(range(world)), home)
    programs = [schedule.ranks.get(str(rank), 0) for rank in range(world)]
    used = [_axes(program) for program in schedule.programs]
    links = {group: _link(network, group) for group in set(home.values())}
    of = _numbered([(programs[r], speeds.get(r, 1.0)) for r in range(world)])
    while True:
        met = {group: _Met(group, of, links[group]) for group in links}
        signs: list[Hashable] = [
            (of[r], *(met[home[axis, r]].sign(r, ordered) for axis, ordered in used[programs[r]] if (axis, r) in home)) for r in range(world)
        ]
        finer = _numbered(signs)
        if max(finer, default=0) == max(of, default=0):
            break
        of = finer
    first: dict[int, int] = {}
    for rank, number in enumerate(of):
        first.setdefault(number, rank)
    return Fold(tuple(of), tuple(first[n] for n in range(len(first))), home)


class _Met:
    """Whom the members of one group meet there, as short keys."""

    def __init__(self, group: tuple[int, ...], of: Sequence[int], link: Hashable) -> None:
        self.classes = tuple(of[r] for r in group)
        self.alike = hash((link, tuple(sorted(self.classes))))
        self.ordered = hash((link, self.classes))
        self.places = {rank: at for at, rank in enumerate(group)}

    def sign(self, rank: int, ordered: bool) -> tuple[int, int]:
        return (self.places[rank], self.ordered) if ordered else (-1, self.alike)


def _axes(program: Sequence[object]) -> list[tuple[str, bool]]:
    """The groups that a program uses, and whether for messages, where places count."""
    found: dict[str, bool] = {}
    for action in program:
        op, axis = getattr(action, "op", ""), getattr(action, "axis", "")
        if op in COLLECTIVES or op in MESSAGES:
            found[axis] = found.get(axis, False) or op in MESSAGES
    return sorted(found.items())


def _link(network: Network, group: tuple[int, ...]) -> Hashable:
    return network.wire(group), len(group), network.seconds("all_reduce", _PROBE_BYTES, group)


def _numbered(signs: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(sign, len(numbers)) for sign in signs]
