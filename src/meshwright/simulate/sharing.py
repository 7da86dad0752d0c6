"""Links shared by the calls that cross them, max–min fairly: nobody can be given more without taking from one that has no more than it has.

Rates are found by filling up: all flows grow together until a link is full or a flow has what it can use; those stop, the others go on. When a flow
starts or ends, only those are looked at again that are joined to it by links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.simulate.fold import Links

_ROUNDING = 1e-12  # relative: two limits nearer than this are one


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way. `version` tells a foreseen end that still holds from one that does not."""

    kind: int  # class of calls, which says what links it crosses
    left: float  # bytes that a rank still has to send
    most: float  # bytes/s that it can use
    rate: float = 0.0
    since: float = 0.0  # `left` is as of here
    version: int = 0

    @property
    def end(self) -> float:
        return self.since + self.left / self.rate if self.rate else float("inf")


class Sharing:
    """The flows under way. Whatever changes, what comes back are the flows whose end is now another."""

    def __init__(self, links: Sequence[Links]) -> None:
        self.links = links
        self._now = links[0]
        self._on: dict[int, dict[Flow, float]] = {}  # link → its flows, with what each puts on it

    def add(self, flow: Flow, now: float) -> list[Flow]:
        flow.since = now
        self._put(flow)
        return self._settle(self._joined([flow]), now)

    def remove(self, flow: Flow, now: float) -> list[Flow]:
        near = [other for link, _ in self._crossed(flow) for other in self._on[link]]
        self._take(flow)
        return self._settle(self._joined(other for other in near if other is not flow), now)

    def change(self, moment: int, now: float) -> list[Flow]:
        """Links are as they are from this moment on: flows go other ways, and links carry more or less."""
        every = list(dict.fromkeys(flow for flows in self._on.values() for flow in flows))
        self._on.clear()
        self._now = self.links[moment]
        for flow in every:
            self._put(flow)
        return self._settle(every, now)

    def _crossed(self, flow: Flow) -> tuple[tuple[int, float], ...]:
        return self._now.loads.get(flow.kind, ())

    def _put(self, flow: Flow) -> None:
        for link, load in self._crossed(flow):
            self._on.setdefault(link, {})[flow] = load

    def _take(self, flow: Flow) -> None:
        for link, _ in self._crossed(flow):
            del self._on[link][flow]

    def _joined(self, flows: Iterable[Flow]) -> list[Flow]:
        """These, and all that share a link with one of them, or with one of those."""
        found = dict.fromkeys(flows)
        waiting = list(found)
        while waiting:
            for link, _ in self._crossed(waiting.pop()):
                for other in self._on[link]:
                    if other not in found:
                        found[other] = None
                        waiting.append(other)
        return list(found)

    def _settle(self, flows: list[Flow], now: float) -> list[Flow]:
        changed = []
        for flow, rate in self._fair(flows).items():
            if rate != flow.rate or not flow.version:
                flow.left = max(flow.left - flow.rate * (now - flow.since), 0.0)
                flow.rate, flow.since = rate, now
                flow.version += 1
                changed.append(flow)
        return changed

    def _fair(self, flows: list[Flow]) -> dict[Flow, float]:
        found: dict[Flow, float] = {}
        room = {link: self._now.capacity[link] for flow in flows for link, _ in self._crossed(flow)}
        growing = dict.fromkeys(flows)
        while growing:
            weight = dict.fromkeys(room, 0.0)
            for flow in growing:
                for link, load in self._crossed(flow):
                    weight[link] += load
            level = min((room[link] / weight[link] for link in room if weight[link]), default=float("inf"))
            level = min(level, *(flow.most for flow in growing))
            limit = level * (1 + _ROUNDING)
            full = {link for link in room if weight[link] and room[link] <= limit * weight[link]}
            stopped = [f for f in growing if f.most <= limit or any(link in full for link, _ in self._crossed(f))]
            for flow in stopped:
                found[flow] = level
                del growing[flow]
                for link, load in self._crossed(flow):
                    room[link] = max(room[link] - level * load, 0.0)
        return found
