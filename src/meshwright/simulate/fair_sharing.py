"""Max–min fair sharing of links: no flow's rate can grow without lowering that of a flow with no higher rate.

Rates are found by progressive filling: all rates grow together until a link is full or a flow reaches its maximum; those flows stop, the others go
on. When a flow starts or ends, rates are recomputed only for the flows connected to it through shared links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.simulate.rank_partition import LinkClasses

_RELATIVE_TOLERANCE = 1e-12  # limits within this are equal


@dataclass(slots=True, eq=False)
class Flow:
    """The bytes of one call on the network. `version` changes with the rate, so that outdated end events are recognised."""

    call_class: int  # determines the links that it crosses
    bytes_left: float  # per rank
    max_rate: float  # bytes/s
    rate: float = 0.0
    updated_at: float = 0.0  # the time that `bytes_left` refers to
    version: int = 0

    @property
    def end_time(self) -> float:
        return self.updated_at + self.bytes_left / self.rate if self.rate else float("inf")


class FairSharing:
    """The flows in flight. Every change returns the flows whose end time has changed."""

    def __init__(self, link_epochs: Sequence[LinkClasses]) -> None:
        self.link_epochs = link_epochs
        self._current_links = link_epochs[0]
        self._flows_on_link: dict[int, dict[Flow, float]] = {}  # link → its flows, each with its load on the link

    def add(self, flow: Flow, now: float) -> list[Flow]:
        flow.updated_at = now
        self._attach(flow)
        return self._update_rates(self._connected([flow]), now)

    def remove(self, flow: Flow, now: float) -> list[Flow]:
        neighbours = [other for link, _ in self._loads_of(flow) for other in self._flows_on_link[link] if other is not flow]
        for link, _ in self._loads_of(flow):
            del self._flows_on_link[link][flow]
        return self._update_rates(self._connected(neighbours), now)

    def change_links(self, epoch: int, now: float) -> list[Flow]:
        """Switch to the links of another epoch: paths and capacities change."""
        flows = list(dict.fromkeys(flow for on_link in self._flows_on_link.values() for flow in on_link))
        self._flows_on_link.clear()
        self._current_links = self.link_epochs[epoch]
        for flow in flows:
            self._attach(flow)
        return self._update_rates(flows, now)

    def _loads_of(self, flow: Flow) -> tuple[tuple[int, float], ...]:
        return self._current_links.loads.get(flow.call_class, ())

    def _attach(self, flow: Flow) -> None:
        for link, load in self._loads_of(flow):
            self._flows_on_link.setdefault(link, {})[flow] = load

    def _connected(self, flows: Iterable[Flow]) -> list[Flow]:
        """These flows and all flows connected to them through shared links, directly or indirectly."""
        connected = dict.fromkeys(flows)
        unvisited = list(connected)
        while unvisited:
            for link, _ in self._loads_of(unvisited.pop()):
                for other in self._flows_on_link[link]:
                    if other not in connected:
                        connected[other] = None
                        unvisited.append(other)
        return list(connected)

    def _update_rates(self, flows: list[Flow], now: float) -> list[Flow]:
        changed = []
        for flow, rate in self._max_min_rates(flows).items():
            if rate != flow.rate or not flow.version:
                flow.bytes_left = max(flow.bytes_left - flow.rate * (now - flow.updated_at), 0.0)
                flow.rate, flow.updated_at = rate, now
                flow.version += 1
                changed.append(flow)
        return changed

    def _max_min_rates(self, flows: list[Flow]) -> dict[Flow, float]:
        rates: dict[Flow, float] = {}
        room = {link: self._current_links.capacity[link] for flow in flows for link, _ in self._loads_of(flow)}
        growing = dict.fromkeys(flows)
        while growing:
            weight = dict.fromkeys(room, 0.0)
            for flow in growing:
                for link, load in self._loads_of(flow):
                    weight[link] += load
            level = min((room[link] / weight[link] for link in room if weight[link]), default=float("inf"))
            level = min(level, *(flow.max_rate for flow in growing))
            limit = level * (1 + _RELATIVE_TOLERANCE)
            full = {link for link in room if weight[link] and room[link] <= limit * weight[link]}
            stopped = [f for f in growing if f.max_rate <= limit or any(link in full for link, _ in self._loads_of(f))]
            for flow in stopped:
                rates[flow] = level
                del growing[flow]
                for link, load in self._loads_of(flow):
                    room[link] = max(room[link] - level * load, 0.0)
        return rates
