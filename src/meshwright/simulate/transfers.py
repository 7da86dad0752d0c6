"""Network transfers: a call whose ranks have all arrived takes its ports, sends its bytes, alone or sharing links, and frees the ports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.core.schedule import P2P_OPS
from meshwright.simulate.engine_state import (
    EventQueue,
    InFlightCall,
    LinkChangeEvent,
    PortsFreedEvent,
    StartEvent,
    StreamKey,
    TransferEndEvent,
    TransferStartEvent,
)
from meshwright.simulate.fair_sharing import FairSharing, Flow
from meshwright.simulate.network_model import CallCost, Network
from meshwright.simulate.rank_partition import RankPartition


class Transfers:
    """The ports and links in use, and the calls that wait for them."""

    def __init__(self, network: Network, fold: RankPartition, events: EventQueue) -> None:
        self.network, self.fold, self.events = network, fold, events
        self._sharing = FairSharing(fold.link_epochs) if fold.link_epochs else None
        self._costs: dict[tuple[str, int, bool, StreamKey], tuple[CallCost, int, float]] = {}
        self._stream_free_at: dict[StreamKey, float] = {}
        self._port_queues: dict[Any, list[InFlightCall]] = {}  # port in use → the calls that wait for it
        self._flow_calls: dict[Flow, InFlightCall] = {}

    def start(self, event: StartEvent, now: float) -> None:
        """Start a call whose ranks have all arrived. It may have to wait for a port, or for the call before it in its stream."""
        call = event.call
        taken = next((port for port in call.ports if port in self._port_queues), None)
        if call.failed:
            return
        if taken is not None:
            self._port_queues[taken].append(call)
            return
        for port in call.ports:
            self._port_queues[port] = []
        cost, kind, _ = self._cost(call)
        if kind >= 0:
            call.flow = Flow(kind, cost.bytes_sent, cost.max_rate)
            self.events.push(now + cost.gap_s, TransferStartEvent(call))
            return
        begin = now if call.ports else max(now, self._stream_free_at.get(call.stream, 0.0))
        self._stream_free_at[call.stream] = begin + cost.busy_s
        if call.ports and cost.latency_s:
            self.events.push(begin + cost.busy_s, PortsFreedEvent(call))
        self.events.push(begin + cost.busy_s + cost.latency_s, call)

    def start_flow(self, event: TransferStartEvent, now: float) -> None:
        """Begin sending the bytes of a call that shares links."""
        flow = event.call.flow
        if flow is not None and self._sharing is not None and not event.call.failed:
            self._flow_calls[flow] = event.call
            self._schedule_ends(self._sharing.add(flow, now))

    def end_flow(self, event: TransferEndEvent, now: float) -> None:
        """End the flow of a call, unless its rate has changed since the event was scheduled."""
        call, flow = event.call, event.call.flow
        if flow is None or flow.version != event.version or self._sharing is None:
            return
        self._drop_flow(call, now)
        self.release_ports(call, now)
        self.events.push(now + self._cost(call)[0].latency_s, call)

    def change_links(self, event: LinkChangeEvent, now: float) -> None:
        if self._sharing is not None:
            self._schedule_ends(self._sharing.change_links(event.epoch, now))

    def fail(self, call: InFlightCall, now: float) -> None:
        """Fail a call of which a rank has died: it never completes."""
        call.failed = True
        self._drop_flow(call, now)
        self.release_ports(call, now)

    def release_ports(self, call: InFlightCall, now: float) -> None:
        """Free a call's ports; the calls that wait for them retry in the order of their arrival."""
        ports, call.ports = call.ports, ()
        for other in [other for port in ports for other in self._port_queues.pop(port, [])]:
            self.events.request_start(other, now)

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
                self.events.push(flow.end_time, TransferEndEvent(self._flow_calls[flow], flow.version))

    def _cost(self, call: InFlightCall) -> tuple[CallCost, int, float]:
        """A call's cost; its call class if links are shared, else -1; and its seconds if only calls of its own class share its links."""
        action = call.action
        op = "send" if action.op in P2P_OPS else action.op
        size = action.bytes if action.expected_bytes is None else action.expected_bytes
        key = (op, size, action.is_blocking, call.stream)
        if key not in self._costs:
            cost, kind = self.network.call_cost(op, size, call.ranks, blocks=action.is_blocking), -1
            most = cost.max_rate
            if self._sharing is not None:
                ends = call.ranks if op == "send" else (call.ranks[0], -1)
                kind = int(self.fold.call_classes[self.fold.call_graph.call_number(op, action.axis, *ends)])
                links = self.fold.link_epochs[0]
                most = min([most, *(links.capacity[link] / load for link, load in links.loads.get(kind, ()))])
            self._costs[key] = cost, kind, cost.gap_s + (cost.bytes_sent / most if most else 0.0)
        return self._costs[key]
