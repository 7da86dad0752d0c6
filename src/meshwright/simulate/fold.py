"""Ranks that do the same at the same time: found once, simulated once.

[Note: which ranks are alike]
Ranks start out alike if they share a program, a speed, a fate and how their devices make calls. They stay alike only if, in each group that the
program uses, they meet ranks that are alike, over links that are alike; for messages also in the same places. Links are alike if they are equally
fast and carry as many calls of groups that are alike. Refining all three until nothing changes gives classes whose members get the same times in
any deterministic run: replicas and tensor-parallel ranks fall together, stages do not, and a straggler sets apart those that it meets, and no
others. Since all links of a class carry the same, fair shares are the same in all of them, and one of each class is enough to find them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.core.schedule import Schedule
from meshwright.simulate.disturb import Disturbances
from meshwright.simulate.meetings import Crossings, Meetings, crossings, hashed, mixed, numbered
from meshwright.simulate.network import Network

Ints = NDArray[np.int64]
Loads = Mapping[int, tuple[tuple[int, float], ...]]  # class of calls → classes of links, with bytes across one for each byte a rank sends


@dataclass(frozen=True)
class Links:
    """Classes of links from one moment on: what each can carry, and what calls put on them."""

    at: float
    capacity: tuple[float, ...]
    loads: Loads


@dataclass(frozen=True)
class Fold:
    """`of[rank]` is a rank's class; `first[class]` the rank that stands for it."""

    of: tuple[int, ...]
    first: tuple[int, ...]
    meetings: Meetings
    edges: Ints = field(repr=False)  # meeting → its class
    links: tuple[Links, ...] = ()  # moment by moment; none where nothing is shared

    def ranks(self, number: int) -> list[int]:
        return [rank for rank, mine in enumerate(self.of) if mine == number]

    @property
    def sizes(self) -> list[int]:
        """How many ranks each class has."""
        return np.bincount(np.array(self.of), minlength=len(self.first)).tolist()


def fold(schedule: Schedule, network: Network, disturbed: Disturbances, *, apart: bool = False) -> Fold:
    """The classes of a schedule's ranks; `apart` keeps every rank to itself."""
    meetings = Meetings(schedule, network)
    crossed = crossings(meetings, network, disturbed)
    if apart:
        ranks, edges, links = (np.arange(n) for n in (schedule.world, meetings.count, len(crossed.hops)))
    else:
        ranks, edges, links = _refined(meetings, crossed, _at_first(meetings, network, disturbed))
    first = np.unique(ranks, return_index=True)[1]
    shared = _quotient(crossed, edges, links, disturbed) if crossed.hops else ()
    return Fold(tuple(ranks.tolist()), tuple(first.tolist()), meetings, edges, shared)


def _at_first(meetings: Meetings, network: Network, disturbed: Disturbances) -> Ints:
    speeds, deaths = disturbed.speeds, disturbed.deaths
    alike = {rank: (speeds.get(rank, 1.0), deaths.get(rank)) for rank in {*speeds, *deaths}}
    numbers = {sign: at + 1 for at, sign in enumerate(dict.fromkeys(alike.values()))}
    found = meetings.programs * (len(numbers) + 1)
    for rank, sign in alike.items():
        found[rank] += numbers[sign]
    habits = hashed([network.habits(rank) for rank in range(len(found))])
    return numbered(mixed(found) + habits)


def _refined(meetings: Meetings, crossed: Crossings, ranks: Ints) -> tuple[Ints, Ints, Ints]:
    edges, links = numbered(hashed(meetings.kinds)), numbered(hashed(crossed.kinds))
    known = -1
    while True:
        met = meetings.by_edge.sums(mixed(mixed(ranks)[meetings.ranks] + meetings.tags))
        edges = numbered(mixed(mixed(edges) + met) + crossed.by_edge.sums(mixed(mixed(links)[crossed.links] + crossed.tags)))
        signs = mixed(edges)
        ranks = numbered(mixed(mixed(ranks) + meetings.by_rank.sums(mixed(signs[meetings.edges] + meetings.tags))))
        links = numbered(mixed(mixed(links) + crossed.by_link.sums(mixed(signs[crossed.edges] + crossed.tags))))
        count = sum(int(x.max(initial=-1)) for x in (ranks, edges, links))
        if count == known:
            return ranks, edges, links
        known = count


def _quotient(crossed: Crossings, edges: Ints, links: Ints, disturbed: Disturbances) -> tuple[Links, ...]:
    """One link of each class, with all that crosses it."""
    first = np.unique(links, return_index=True)[1]
    stands = np.zeros(len(links), dtype=bool)
    stands[first] = True
    found = []
    for number, at in enumerate(disturbed.moments):
        hops = [crossed.hops[i] for i in first]
        capacity = tuple(hop.bandwidth * disturbed.left(hop.key, at) for hop in hops)
        mine = stands[crossed.links] & (crossed.moments == number)
        loads: dict[int, dict[int, float]] = {}
        for edge, link, share in zip(
            edges[crossed.edges[mine]].tolist(), links[crossed.links[mine]].tolist(), crossed.shares[mine].tolist(), strict=True
        ):
            on = loads.setdefault(edge, {})
            on[link] = on.get(link, 0.0) + share
        found.append(Links(at, capacity, {edge: tuple(on.items()) for edge, on in loads.items()}))
    return tuple(found)
