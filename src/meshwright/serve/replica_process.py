"""A replica in processes of its own: the entry point of its ranks, and the loop of the first one, which takes requests from a socket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.execute.rank_device import setup_device
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.serve.engine import Engine
from meshwright.serve.messages import LineSocket, connect_channel, decode_params, encode_event
from meshwright.serve.model_source import ModelSource
from meshwright.serve.replica import Replica, StepSender, follow_steps, make_replica
from meshwright.serve.requests import TokenEvent
from meshwright.serve.scheduler import Sequence

_KEEP_ALIVE_S = 10.0  # between messages to ranks that wait; less than any timeout of a collective
_STATS_S = 0.5  # between reports of counters


def serve_rank(
    rank: int, world: int, init_method: str, source: Mapping[str, Any], plan: Mapping[str, Any], end_tokens: list[int], channel: str,
    devices: list[int] | None = None,
) -> None:  # fmt: skip
    """One rank of a replica. The first connects to `channel`; the replica ends when that is closed. `devices`: of each rank,
    among those that its process sees; in order unless given."""
    own = from_data(Plan, plan, "plan")
    place = own.device_order[rank] if own.device_order else rank
    local = devices[place] if devices else place
    device = setup_device(own.device_of(rank, local), own.threads)
    join_process_group(Rendezvous(rank, world, init_method, own.backend, device.type, local, own.sync.timeout_s))
    try:
        replica = make_replica(from_data(ModelSource, source, "source"), own, device)
        if rank:
            follow_steps(replica.decoder, replica.loaded.applied.groups.world)
            return
        with connect_channel(channel) as peer:
            ReplicaLoop(replica, replica.make_engine(tuple(end_tokens)), LineSocket(peer)).run()
    finally:
        leave_process_group()


class ReplicaLoop:
    """Takes requests, runs steps, and sends what they give.

    In: {"submit": id, "tokens": […], "params": {…}, "num_prompt": n}, {"cancel": id}, {"report": id}. Out: {"ready": facts}, {"events": […]},
    {"refused": id, "reason": …}, {"stats": {…}}, which has the id of a report that was asked for. Ids are the client's.
    """

    def __init__(self, replica: Replica, engine: Engine, lines: LineSocket) -> None:
        self._engine, self._lines, self._facts = engine, lines, replica.facts()
        self._by_id: dict[int, Sequence] = {}
        self._ids: dict[int, int] = {}  # the engine's to the client's
        self._told = 0.0

    def run(self) -> None:
        self._lines.send({"ready": self._facts})
        runner = self._engine.runner
        assert isinstance(runner, StepSender)
        try:
            while True:
                idle = not self._engine.has_work
                if idle:
                    self._report(at_once=True)
                messages = self._lines.receive(_KEEP_ALIVE_S if idle else 0.0)
                if idle and not messages:
                    runner.keep_alive()
                for message in messages:
                    self._handle(message)
                if events := self._engine.step():
                    self._lines.send({"events": [encode_event(self._renumbered(event)) for event in events]})
                self._report()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        finally:
            runner.stop()

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "submit" in message:
            try:
                sequence = self._engine.submit(message["tokens"], decode_params(message["params"]), message.get("num_prompt"))
            except MeshwrightError as error:
                self._lines.send({"refused": message["submit"], "reason": str(error)})
                return
            self._by_id[message["submit"]], self._ids[sequence.id] = sequence, message["submit"]
        elif "report" in message:
            self._lines.send({"stats": {**self._engine.facts(), "report": message["report"]}})
        elif "cancel" in message and (found := self._by_id.pop(message["cancel"], None)) is not None:
            self._ids.pop(found.id, None)
            self._engine.cancel(found)

    def _renumbered(self, event: TokenEvent) -> TokenEvent:
        """The event with the client's id."""
        client = self._ids[event.request]
        if event.finish is not None:
            del self._ids[event.request], self._by_id[client]
        return event._replace(request=client)

    def _report(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._told >= _STATS_S:
            self._told = now
            self._lines.send({"stats": self._engine.facts()})
