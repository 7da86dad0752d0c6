"""Calls on the network: once everybody is there a call takes its ports, sends its bytes, alone or beside others, and frees the ports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.core.schedule import MESSAGES
from meshwright.simulate.flight import Changes, EventQueue, Flight, Flown, Flows, Freed, Lane, Starts
from meshwright.simulate.fold import Fold
from meshwright.simulate.network import Call, Network
from meshwright.simulate.sharing import Flow, Sharing


class Transfers:
    """What is in use, and who waits for it."""

    def __init__(self, network: Network, fold: Fold, events: EventQueue) -> None:
        self.network, self.fold, self.events = network, fold, events
        self._sharing = Sharing(fold.links) if fold.links else None
        self._costs: dict[tuple[str, int, bool, Lane], tuple[Call, int, float]] = {}
        self._stream_free_at: dict[Lane, float] = {}
        self._port_queues: dict[Any, list[Flight]] = {}  # a port in use, and the calls that wait for it
        self._flow_calls: dict[Flow, Flight] = {}

    def start(self, event: Starts, now: float) -> None:
        """Everybody is there. The call may have to wait for a port, or for the call before it in its stream."""
        call = event.flight
        taken = next((port for port in call.ports if port in self._port_queues), None)
        if call.lost:
            return
        if taken is not None:
            self._port_queues[taken].append(call)
            return
        for port in call.ports:
            self._port_queues[port] = []
        cost, kind, _ = self._cost(call)
        if kind >= 0:
            call.flow = Flow(kind, cost.sent, cost.most)
            self.events.push(now + cost.gap_s, Flows(call))
            return
        begin = now if call.ports else max(now, self._stream_free_at.get(call.lane, 0.0))
        self._stream_free_at[call.lane] = begin + cost.busy_s
        if call.ports and cost.rest_s:
            self.events.push(begin + cost.busy_s, Freed(call))
        self.events.push(begin + cost.busy_s + cost.rest_s, call)

    def start_flow(self, event: Flows, now: float) -> None:
        """The first byte leaves."""
        flow = event.flight.flow
        if flow is not None and self._sharing is not None and not event.flight.lost:
            self._flow_calls[flow] = event.flight
            self._schedule_ends(self._sharing.add(flow, now))

    def end_flow(self, event: Flown, now: float) -> None:
        """The last byte leaves, unless rates have changed since this was foreseen."""
        call, flow = event.flight, event.flight.flow
        if flow is None or flow.version != event.version or self._sharing is None:
            return
        self._drop_flow(call, now)
        self.release_ports(call, now)
        self.events.push(now + self._cost(call)[0].rest_s, call)

    def change_links(self, event: Changes, now: float) -> None:
        if self._sharing is not None:
            self._schedule_ends(self._sharing.change(event.moment, now))

    def fail(self, call: Flight, now: float) -> None:
        """One of its ranks has died: the call is never done."""
        call.lost = True
        self._drop_flow(call, now)
        self.release_ports(call, now)

    def release_ports(self, call: Flight, now: float) -> None:
        """Calls that wait for them go on, in the order in which they came."""
        ports, call.ports = call.ports, ()
        for other in [other for port in ports for other in self._port_queues.pop(port, [])]:
            self.events.request_start(other, now)

    def seconds_alone(self, call: Flight) -> float:
        """With nobody beside it but its like."""
        return self._cost(call)[2]

    def _drop_flow(self, call: Flight, now: float) -> None:
        flow, call.flow = call.flow, None
        if flow in self._flow_calls and self._sharing is not None:
            del self._flow_calls[flow]
            self._schedule_ends(self._sharing.remove(flow, now))

    def _schedule_ends(self, changed: Iterable[Flow]) -> None:
        for flow in changed:
            if flow.end < float("inf"):
                self.events.push(flow.end, Flown(self._flow_calls[flow], flow.version))

    def _cost(self, call: Flight) -> tuple[Call, int, float]:
        """What a call costs; its class where it shares links, else -1; and its seconds with nobody beside it but its like."""
        action = call.action
        op = "send" if action.op in MESSAGES else action.op
        size = action.bytes if action.likely is None else action.likely
        key = (op, size, action.blocks, call.lane)
        if key not in self._costs:
            cost, kind = self.network.call(op, size, call.ranks, blocks=action.blocks), -1
            most = cost.most
            if self._sharing is not None:
                ends = call.ranks if op == "send" else (call.ranks[0], -1)
                kind = int(self.fold.edges[self.fold.meetings.edge(op, action.axis, *ends)])
                links = self.fold.links[0]
                most = min([most, *(links.capacity[link] / load for link, load in links.loads.get(kind, ()))])
            self._costs[key] = cost, kind, cost.gap_s + (cost.sent / most if most else 0.0)
        return self._costs[key]
