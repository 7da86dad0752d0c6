"""Disturbances of a simulated step, as input: slow ranks, jitter, links that lose bandwidth or fail, devices that die."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.core.errors import RequestError, unknown_name_error


@dataclass(frozen=True)
class LinkDegradation:
    """From `at` seconds on, links have `factor` times their bandwidth. With factor 0 they are down, and calls take a detour or wait."""

    link: str  # a key, or a prefix of several: network/3, network
    factor: float
    at: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor >= 0):
            raise RequestError(f"degrade {self.link}={self.factor:g}: a link keeps this share of its bandwidth: give 0 (down) or more")
        if not (math.isfinite(self.at) and self.at >= 0):
            raise RequestError(f"degrade {self.link}@{self.at:g}: give seconds since the start of the step, 0 or more")

    def matches(self, key: str) -> bool:
        return key == self.link or key.startswith(f"{self.link}/")


@dataclass(frozen=True)
class Disturbances:
    """All disturbances of a step; none by default. Only `jitter` is random, drawn from `seed`."""

    slow: Mapping[str, float] = field(default_factory=dict)  # rank → factor on its computation times
    jitter: float = 0.0  # relative standard deviation of every computation time
    seed: int = 0
    degrade: tuple[LinkDegradation, ...] = ()
    fail: Mapping[str, float] = field(default_factory=dict)  # rank → when its device dies, in seconds of the step

    def __post_init__(self) -> None:
        for rank, factor in self.slow.items():
            if not (math.isfinite(factor) and factor > 0):
                raise RequestError(f"slow {rank}={factor:g}: computation times are multiplied by it: give a factor above 0, like {rank}=1.5")
        for rank, at in self.fail.items():
            if not (math.isfinite(at) and at >= 0):
                raise RequestError(f"fail {rank}@{at:g}: give seconds from 0 on, like {rank}@0.5")
        if not 0 <= self.jitter <= 1:
            raise RequestError(f"jitter {self.jitter:g}: give the standard deviation as a share of each computation's time, from 0 to 1")

    def __bool__(self) -> bool:
        return bool(self.slow or self.jitter or self.degrade or self.fail)

    def check(self, world: int, links: Iterable[str] | None) -> None:
        """Raise RequestError for an unknown rank or link; `links` is None if the network model has no links."""
        for what, ranks in (("slow", self.slow), ("fail", self.fail)):
            for rank in ranks:
                if not rank.isdigit() or int(rank) >= world:
                    raise RequestError(f"{what} {rank}: there is no such rank: ranks are 0 to {world - 1}")
        if not self.degrade:
            return
        if links is None:
            raise RequestError("degrade: this network was measured by collectives, without links: simulate a cluster file, which has links")
        keys = list(links)
        for degradation in self.degrade:
            if not any(degradation.matches(key) for key in keys):
                prefixes = {key.rpartition("/")[0] for key in keys}
                known = {*keys, *prefixes, *(prefix.partition("/")[0] for prefix in prefixes)} if world <= 64 else prefixes
                raise unknown_name_error("link", degradation.link, known)

    @property
    def slowdowns(self) -> dict[int, float]:
        return {int(rank): factor for rank, factor in self.slow.items()}

    @property
    def failure_times(self) -> dict[int, float]:
        return {int(rank): at for rank, at in self.fail.items()}

    @property
    def link_change_times(self) -> list[float]:
        """Times at which links change, in order, starting with 0."""
        return sorted({0.0, *(d.at for d in self.degrade)})

    def bandwidth_factor(self, key: str, time: float) -> float:
        """The share of its bandwidth that a link has at `time`: the product of all degradations that apply."""
        return math.prod(d.factor for d in self.degrade if d.at <= time and d.matches(key))

    def down_links(self, keys: Iterable[str], time: float) -> frozenset[str]:
        down = [d for d in self.degrade if d.factor == 0 and d.at <= time]
        return frozenset(key for key in keys for d in down if d.matches(key)) if down else frozenset()


def parse_flags(
    slow: Iterable[str], degrade: Iterable[str], fail: Iterable[str]
) -> tuple[dict[str, float], tuple[LinkDegradation, ...], dict[str, float]]:
    """Parse the command line's `RANK=FACTOR`, `LINK=FACTOR[@T]` and `RANK@T`."""
    slowdowns = {rank: _parse_number("--slow", text, factor) for text in slow for rank, _, factor in [text.partition("=")]}
    failures = {rank: _parse_number("--fail", text, at) for text in fail for rank, _, at in [text.partition("@")]}
    links = []
    for text in degrade:
        link, _, rest = text.rpartition("=")
        factor, sign, at = rest.partition("@")
        links.append(LinkDegradation(link, _parse_number("--degrade", text, factor), _parse_number("--degrade", text, at) if sign else 0.0))
    return slowdowns, tuple(links), failures


def _parse_number(flag: str, text: str, number: str) -> float:
    formats = {"--slow": "RANK=FACTOR, like 3=1.5", "--degrade": "LINK=FACTOR@SECONDS, like network/3=0.5@0.1", "--fail": "RANK@SECONDS, like 3@0.5"}
    try:
        return float(number)
    except ValueError:
        raise RequestError(f"{flag} {text}: write it as {formats[flag]}") from None
