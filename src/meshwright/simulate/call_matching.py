"""Which calls of different ranks are one call: the n-th of a group, or the n-th message from one rank to another."""

from __future__ import annotations

from meshwright.core.schedule import MESSAGES, Action
from meshwright.simulate.flight import Flight, Lane, Rank
from meshwright.simulate.fold import Fold
from meshwright.simulate.network import Network


class CallMatcher:
    """The calls of one step, by their stream (kind, axis and ranks) and their number in it."""

    def __init__(self, network: Network, fold: Fold) -> None:
        self.network, self.fold = network, fold
        self._calls: dict[tuple[Lane, int], Flight] = {}
        self._exclusive_links: dict[tuple[int, ...], str] = {}

    def match(self, rank: Rank, action: Action) -> Flight:
        """The call that a rank's action takes part in; a new one if no other rank has come to it."""
        site = (action.axis, action.peer, action.op if action.op in MESSAGES else "")
        if site not in rank.sites:
            rank.sites[site] = self._stream(rank, action)
        stream, group = rank.sites[site]
        direction = (stream, action.op == "recv")
        number = rank.calls[direction] = rank.calls.get(direction, -1) + 1
        call = self._calls.get((stream, number))
        if call is None:
            call = self._calls[stream, number] = self._open_call(rank, action, group, stream)
            call.place = rank.at
        return call

    def _stream(self, rank: Rank, action: Action) -> tuple[Lane, tuple[int, ...]]:
        """With the ranks of the group."""
        group = self.fold.meetings.group(action.axis, self.fold.first[rank.number])
        if action.op not in MESSAGES:
            return ("collective", action.axis, *sorted({self.fold.of[r] for r in group})), group
        other = self.fold.of[group[action.peer]]
        ends = (rank.number, other) if action.op == "send" else (other, rank.number)
        return ("message", action.axis, *ends), group

    def _open_call(self, rank: Rank, action: Action, group: tuple[int, ...], stream: Lane) -> Flight:
        classes = stream[2:]
        if action.op in MESSAGES:
            mine, other = self.fold.first[rank.number], group[action.peer]
            pair = (mine, other) if action.op == "send" else (other, mine)
            link = self._exclusive_link(pair)
            away, home = ("out", "in") if self.network.duplex else ("both", "both")
            return Flight(action, pair, 2, ((classes[0], link, away), (classes[1], link, home)) if link else self._stream_ports(stream), stream)
        link = self._exclusive_link(group)
        directions = ("out", "in") if self.network.duplex else ("both",)
        ports = tuple((number, link, way) for number in classes for way in directions) if link else self._stream_ports(stream)
        return Flight(action, group, len(classes), ports, stream)

    def _stream_ports(self, stream: Lane) -> tuple[Lane, ...]:
        """How long a call takes that shares links is not known when it starts: then its stream is in use until it ends."""
        return (stream,) if self.fold.links else ()

    def _exclusive_link(self, ranks: tuple[int, ...]) -> str:
        if ranks not in self._exclusive_links:
            self._exclusive_links[ranks] = self.network.wire(ranks)
        return self._exclusive_links[ranks]
