"""Network transfers: a call whose ranks have all arrived takes its ports, sends its bytes, alone or sharing links, and frees the ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from meshwright.core.schedule import P2P_OPS
from meshwright.simulate.engine_state import EventQueue, InFlightCall, Port, StreamKey
from meshwright.simulate.fair_sharing import FairSharing, Flow
from meshwright.simulate.network_model import CallCost, Network
from meshwright.simulate.rank_partition import RankPartition


class Transfers:
    """The ports and links in use, and the calls that wait for them. `complete` is called when the last byte of a call has arrived."""

    def __init__(self, network: Network, partition: RankPartition, events: EventQueue, complete: Callable[[InFlightCall, float], None]) -> None:
        self.network, self.partition, self.events, self.complete = network, partition, events, complete
        self._sharing = FairSharing(partition.link_epochs) if partition.link_epochs else None
        self._costs: dict[tuple[str, int, bool, StreamKey], tuple[CallCost, int, float]] = {}
        self._stream_free_at: dict[StreamKey, float] = {}
        self._port_queues: dict[Port, list[InFlightCall]] = {}  # port in use → the calls that wait for it
        self._flow_calls: dict[Flow, InFlightCall] = {}

    def request_start(self, call: InFlightCall, now: float) -> None:
        """Start a call after all other events of this time: which call gets a port must not depend on the order in which ranks are processed."""
        self.events.push(now, partial(self._start, call), (call.ready, call.program_index))

    def _start(self, call: InFlightCall, now: float) -> None:
        """Start a call whose ranks have all arrived. It may have to wait for a port, or for the call before it in its stream."""
        if call.failed:
            return
        if (busy_port := next((port for port in call.ports if port in self._port_queues), None)) is not None:
            self._port_queues[busy_port].append(call)
            return
        for port in call.ports:
            self._port_queues[port] = []
        cost, call_class, _ = self._cost(call)
        if call_class >= 0:
            call.flow = Flow(call_class, cost.bytes_sent, cost.max_rate)
            self.events.push(now + cost.gap_s, partial(self._start_flow, call))
            return
        start = now if call.ports else max(now, self._stream_free_at.get(call.stream, 0.0))
        self._stream_free_at[call.stream] = start + cost.busy_s
        if call.ports and cost.latency_s:
            self.events.push(start + cost.busy_s, partial(self.release_ports, call))
        self.events.push(start + cost.busy_s + cost.latency_s, partial(self.complete, call))

    def _start_flow(self, call: InFlightCall, now: float) -> None:
        """Begin sending the bytes of a call that shares links."""
        if call.flow is not None and self._sharing is not None and not call.failed:
            self._flow_calls[call.flow] = call
            self._schedule_ends(self._sharing.add(call.flow, now))

    def _end_flow(self, call: InFlightCall, version: int, now: float) -> None:
        """End the flow of a call, unless its rate has changed since this event was scheduled."""
        if call.flow is not None and call.flow.version == version and self._sharing is not None:
            self._drop_flow(call, now)
            self.release_ports(call, now)
            self.events.push(now + self._cost(call)[0].latency_s, partial(self.complete, call))

    def change_links(self, epoch: int, now: float) -> None:
        """Switch to the bandwidths and paths of another epoch."""
        if self._sharing is not None:
            self._schedule_ends(self._sharing.change_links(epoch, now))

    def fail(self, call: InFlightCall, now: float) -> None:
        """Fail a call of which a rank has died: it never completes."""
        call.failed = True
        self._drop_flow(call, now)
        self.release_ports(call, now)

    def release_ports(self, call: InFlightCall, now: float) -> None:
        """Free a call's ports; the calls that wait for them retry in the order of their arrival."""
        ports, call.ports = call.ports, ()
        for other in [other for port in ports for other in self._port_queues.pop(port, [])]:
            self.request_start(other, now)

    def seconds_alone(self, call: InFlightCall) -> float:
        """Seconds of the call's transfer if only calls of its own class share its links."""
        return self._cost(call)[2]

    def _drop_flow(self, call: InFlightCall, now: float) -> None:
        flow, call.flow = call.flow, None
        if flow in self._flow_calls and self._sharing is not None:
            del self._flow_calls[flow]
            self._schedule_ends(self._sharing.remove(flow, now))

    def _schedule_ends(self, changed: Iterable[Flow]) -> None:
        for flow in changed:
            if flow.end_time < float("inf"):
                self.events.push(flow.end_time, partial(self._end_flow, self._flow_calls[flow], flow.version))

    def _cost(self, call: InFlightCall) -> tuple[CallCost, int, float]:
        """A call's cost; its call class if links are shared, else -1; and its seconds if only calls of its own class share its links."""
        action = call.action
        op = "send" if action.op in P2P_OPS else action.op
        size = action.bytes if action.expected_bytes is None else action.expected_bytes
        key = (op, size, action.is_blocking, call.stream)
        if key not in self._costs:
            cost, call_class = self.network.call_cost(op, size, call.ranks, blocks=action.is_blocking), -1
            rate = cost.max_rate
            if self._sharing is not None:
                ends = call.ranks if op == "send" else (call.ranks[0], -1)
                call_class = int(self.partition.call_classes[self.partition.call_graph.call_number(op, action.axis, *ends)])
                links = self.partition.link_epochs[0]
                rate = min([rate, *(links.capacity[link] / load for link, load in links.loads.get(call_class, ()))])
            self._costs[key] = cost, call_class, cost.gap_s + (cost.bytes_sent / rate if rate else 0.0)
        return self._costs[key]
