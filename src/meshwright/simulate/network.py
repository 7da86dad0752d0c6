"""Networks as numbers: how long a call takes among which ranks, and which wire of a rank it keeps busy meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.core.calibration import Rates
from meshwright.core.cluster import Cluster
from meshwright.core.reach import Reach
from meshwright.core.schedule import wire_factor
from meshwright.cost.collective import joined, line_of


class Network(Protocol):
    """What the engine asks."""

    @property
    def queued(self) -> bool:
        """A call that must wait for another is left to the device and the rank goes on, as on a GPU's streams."""
        ...

    def seconds(self, op: str, size: int, ranks: tuple[int, ...]) -> tuple[float, float]:
        """One call by itself, once everybody is there: how long it keeps its wire busy, and how long it then still takes to arrive."""
        ...

    @property
    def duplex(self) -> bool:
        """A rank's wire carries one call in each direction at once."""
        ...

    def wire(self, ranks: tuple[int, ...]) -> str:
        """What these ranks share while they communicate: of the calls on one wire a rank makes one at a time. Empty: no limit."""
        ...


@dataclass(frozen=True)
class Ideal:
    """A network that costs nothing: what is left is computation and the order of things."""

    queued: bool = False
    duplex: bool = True

    def seconds(self, op: str, size: int, ranks: tuple[int, ...]) -> tuple[float, float]:
        return 0.0, 0.0

    def wire(self, ranks: tuple[int, ...]) -> str:
        return ""


@dataclass(frozen=True)
class Linked:
    """Measured α–β lines where there are any, otherwise the figures of the link that joins the ranks. More ranks than devices share
    one machine, or are as far apart as several machines are. `contended`: calls on one link go one after the other, but for the part of their
    latency that was seen to pass side by side."""

    cluster: Cluster
    rates: Rates
    backend: str = "gloo"
    contended: bool = True
    faster: float = 1.0  # every link's bandwidth, times this: what would a better network give?
    duplex: bool = True  # both directions at once; not where the cores of one machine copy every byte

    @property
    def queued(self) -> bool:
        return self.rates.queued

    def seconds(self, op: str, size: int, ranks: tuple[int, ...]) -> tuple[float, float]:
        if len(ranks) < 2:
            return 0.0, 0.0
        line = line_of(op, len(ranks), self.backend, self.rates, joined(self.cluster, ranks, op))
        gap = line.alpha_s if line.gap_s is None else min(line.gap_s, line.alpha_s)
        return gap + size * wire_factor(op, len(ranks)) / (line.bytes_per_s * self.faster), line.alpha_s - gap

    def wire(self, ranks: tuple[int, ...]) -> str:
        link = joined(self.cluster, ranks, "")
        return (link.slowest if isinstance(link, Reach) else link.name) if self.contended else ""
