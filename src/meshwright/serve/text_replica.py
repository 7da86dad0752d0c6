"""A replica that generates text, as the server sees it, and how a request finds one.

[Note: retries]
A request that was accepted is answered, though its replica may die: it goes to another, or waits for the next, with the tokens that it has. Its
random numbers depend on its seed and the position alone, so the answer goes on as it would have.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.errors import RequestError, RunError
from meshwright.serve.async_replica import AsyncReplica, ReplicaDied, ReplicaJob
from meshwright.serve.messages import decode_event, encode_params
from meshwright.serve.replica_ranks import ReplicaRanks
from meshwright.serve.replica_set import MAX_RETRIES, OverloadedError, ReplicaSet
from meshwright.serve.requests import SamplingParams, TokenEvent

_PREFIX_TOKENS, _MAX_PREFIXES = 64, 4096
_PREFIX_BONUS = 512  # tokens of load by which a replica that knows a prompt's beginning may be busier
_TRY_OUT_S = 120.0


@dataclass
class Submitted:
    """One request at one replica: its events, and how many tokens it may still cost."""

    id: int
    cost: int
    events: asyncio.Queue[TokenEvent | ReplicaDied] = field(default_factory=asyncio.Queue)


class TextReplica(AsyncReplica):
    """Requests are prompts; events are tokens."""

    def __init__(self, name: str, job: ReplicaJob, ranks: ReplicaRanks) -> None:
        super().__init__(name, job, ranks)
        self._requests: dict[int, Submitted] = {}
        self._next = 0

    @property
    def load(self) -> int:
        """Tokens that its requests may still cost."""
        return sum(request.cost for request in self._requests.values())

    def submit(self, tokens: Sequence[int], params: SamplingParams, num_prompt: int) -> Submitted:
        """Queue a request whose first `num_prompt` tokens are the prompt."""
        self._next += 1
        request = Submitted(self._next, len(tokens) - num_prompt + params.max_tokens + len(tokens) // 8)
        self._send({"submit": request.id, "tokens": list(tokens), "params": encode_params(params), "num_prompt": num_prompt})
        self._requests[request.id] = request
        return request

    def cancel(self, request: Submitted) -> None:
        if self._requests.pop(request.id, None) is not None:
            self._send({"cancel": request.id})

    async def try_out(self) -> None:
        """One short answer. The numbers must be finite, which greedy tokens of a broken model need not show: so must their log-probabilities."""
        request = self.submit([1, 2, 3], SamplingParams(max_tokens=4, seed=0, ignore_end=True, logprobs=0), 3)
        while True:
            event = await asyncio.wait_for(request.events.get(), _TRY_OUT_S)
            if isinstance(event, ReplicaDied) or event.error:
                raise RunError(f"the new model does not answer: {self.failure or getattr(event, 'error', '')}")
            if event.logprobs is not None and event.logprobs.logprob != event.logprobs.logprob:
                raise RunError("the new model's log-probabilities are NaN")
            if event.finish is not None:
                return

    def _receive(self, message: Mapping[str, Any], payload: bytes) -> None:
        if "refused" in message:
            self._give(TokenEvent(message["refused"], -1, "error", None, message["reason"]))
        for data in message.get("events", ()):
            self._give(decode_event(data))

    def _give(self, event: TokenEvent) -> None:
        request = self._requests.get(event.request)
        if request is None:  # cancelled
            return
        request.cost = max(request.cost - 1, 1)
        request.events.put_nowait(event)
        if event.finish is not None:
            del self._requests[event.request]

    def _give_up(self) -> None:
        for request in self._requests.values():
            request.events.put_nowait(ReplicaDied(self.failure))
        self._requests.clear()


class TextReplicas:
    """Answers over all replicas of a model that generates text."""

    def __init__(self, replicas: ReplicaSet[TextReplica], max_waiting: int) -> None:
        self.set, self._max_waiting = replicas, max_waiting
        self._known: OrderedDict[tuple[int, ...], TextReplica] = OrderedDict()  # beginnings of prompts, by who has computed them

    @property
    def facts(self) -> dict[str, Any]:
        return self.set.facts

    def check_room(self, requests: int = 1) -> None:
        """Refuse what would have to wait too long, or could never be taken."""
        self.set.check_ready()
        places = self._max_waiting + self.set.facts.get("sequences", 0) * self.set.count
        if requests > places:
            raise RequestError(f"it asks for {requests} answers, and this server takes {places} at once: send several requests")
        if self.set.accepted + requests > places:
            raise OverloadedError

    async def generate(self, tokens: Sequence[int], params: SamplingParams) -> AsyncGenerator[TokenEvent, None]:
        """Tokens of one answer; ends with the event that has a reason. RequestError if it can never run."""
        assert params.seed is not None
        self.set.accepted += 1
        given = list(tokens)
        try:
            for attempt in range(MAX_RETRIES + 1):
                replica = await self._choose(given)
                request = replica.submit(given, params, len(tokens))
                try:
                    while True:
                        event = await request.events.get()
                        if isinstance(event, ReplicaDied):
                            break
                        if event.error:
                            raise RequestError(event.error)
                        if event.token >= 0:
                            given.append(event.token)
                        yield event
                        if event.finish is not None:
                            return
                finally:
                    replica.cancel(request)
                self.set.log("retry", attempt=attempt + 1, tokens=len(given), reason=replica.failure)
                await self.set.notify()
            raise RunError(f"the request ended {MAX_RETRIES + 1} replicas: {replica.failure}")
        finally:
            self.set.accepted -= 1

    async def _choose(self, tokens: Sequence[int]) -> TextReplica:
        """The replica with the least to do, or one that has computed the beginning of this prompt and is not much busier."""
        ready = await self.set.wait_until_ready()
        prefix = tuple(tokens[:_PREFIX_TOKENS])
        known = self._known.get(prefix) if len(prefix) == _PREFIX_TOKENS else None
        chosen = min(ready, key=lambda replica: replica.load - _PREFIX_BONUS * (replica is known))
        if len(prefix) == _PREFIX_TOKENS:
            self._known[prefix] = chosen
            self._known.move_to_end(prefix)
            if len(self._known) > _MAX_PREFIXES:
                self._known.popitem(last=False)
        return chosen
