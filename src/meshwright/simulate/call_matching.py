"""Matches actions of different ranks to calls: the n-th collective of a group, or the n-th message from one rank to another, is one call."""

from __future__ import annotations

from meshwright.core.schedule import P2P_OPS, Action
from meshwright.simulate.engine_state import InFlightCall, Port, RankState, StreamKey
from meshwright.simulate.network_model import Network
from meshwright.simulate.rank_partition import RankPartition


class CallMatcher:
    """The calls of one step, by their stream (kind, axis and ranks) and their number in it."""

    def __init__(self, network: Network, partition: RankPartition) -> None:
        self.network, self.partition = network, partition
        self._calls: dict[tuple[StreamKey, int], InFlightCall] = {}
        self._exclusive_links: dict[tuple[int, ...], str] = {}

    def match(self, rank: RankState, action: Action) -> InFlightCall:
        """The call that a rank's action takes part in; a new one if no other rank has reached it."""
        site = (action.axis, action.peer, action.op if action.op in P2P_OPS else "")
        if site not in rank.streams:
            rank.streams[site] = self._stream(rank, action)
        stream, group = rank.streams[site]
        direction = (stream, action.op == "recv")
        number = rank.call_counts[direction] = rank.call_counts.get(direction, -1) + 1
        call = self._calls.get((stream, number))
        if call is None:
            call = self._calls[stream, number] = self._open_call(rank, action, group, stream)
            call.program_index = rank.program_counter
        return call

    def _stream(self, rank: RankState, action: Action) -> tuple[StreamKey, tuple[int, ...]]:
        """The stream of a rank's action, and the ranks of its group."""
        group = self.partition.call_graph.group_of(action.axis, self.partition.representatives[rank.rank_class])
        if action.op not in P2P_OPS:
            return ("collective", action.axis, *sorted({self.partition.class_of[r] for r in group})), group
        other = self.partition.class_of[group[action.peer]]
        ends = (rank.rank_class, other) if action.op == "send" else (other, rank.rank_class)
        return ("message", action.axis, *ends), group

    def _open_call(self, rank: RankState, action: Action, group: tuple[int, ...], stream: StreamKey) -> InFlightCall:
        classes = stream[2:]
        if action.op in P2P_OPS:
            own, peer = self.partition.representatives[rank.rank_class], group[action.peer]
            group = (own, peer) if action.op == "send" else (peer, own)
        if group not in self._exclusive_links:
            self._exclusive_links[group] = self.network.exclusive_link(group)
        ports: tuple[Port, ...] = ()
        if link := self._exclusive_links[group]:
            directions = ("out", "in") if self.network.duplex else ("both", "both")
            if action.op in P2P_OPS:
                ports = tuple((number, link, direction) for number, direction in zip(classes, directions, strict=True))
            else:
                ports = tuple((number, link, direction) for number in classes for direction in dict.fromkeys(directions))
        elif self.partition.link_epochs:  # links are shared: a call's duration is unknown at its start, so its stream is in use until it ends
            ports = (stream,)
        return InFlightCall(action, group, 2 if action.op in P2P_OPS else len(classes), ports, stream)
