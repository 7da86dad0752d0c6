"""Building blocks of proxies: a base config that scales sizes and times down, a builder of programs, and grids of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.errors import RequestError
from meshwright.core.schedule import Action, GroupRanks, Op, Schedule

FLOAT_BYTES = 4  # the originals communicate single precision


@dataclass(frozen=True)
class ProxyConfig:
    """Settings of every proxy."""

    scale_down: float = 1.0  # divisor of sizes and times
    gradients: Literal["bucketed", "tensor"] = "bucketed"  # aggregated, the originals' default, or one call per parameter

    def __post_init__(self) -> None:
        if self.scale_down < 1:
            raise RequestError(f"scale_down={self.scale_down:g}: sizes and waits are divided by it; give 1 or more")
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
                raise RequestError(f"{name}={value}: give 0 or more")

    def float_bytes(self, number: float) -> int:
        """Bytes of `number` floats, scaled down and rounded down, as C divides; at least one float."""
        return FLOAT_BYTES * max(1, int(number / self.scale_down))

    def scaled_seconds(self, microseconds: float) -> float:
        return microseconds * 1e-6 / self.scale_down

    def scaled_flops(self, number: float) -> float:
        return number / self.scale_down


@dataclass
class ProgramBuilder:
    """Collects the actions of one rank's program."""

    actions: list[Action] = field(default_factory=list)

    def compute(self, name: str, seconds: float, flops: float = 0.0, *, op: Op = "forward", waits: Sequence[str] = ()) -> None:
        self.actions.append(Action(name, op, seconds=seconds, flops=flops, depends_on=tuple(waits)))

    def collective(self, name: str, op: Op, axis: str, size: int, *, blocks: bool = True, waits: Sequence[str] = ()) -> str:
        self.actions.append(Action(name, op, bytes=size, axis=axis, is_blocking=blocks, depends_on=tuple(waits)))
        return name

    def all_reduces(self, name: str, axis: str, sizes: Iterable[int]) -> list[str]:
        """Add an async all-reduce of each size; return their names."""
        return [self.collective(f"{name}/{i}", "all_reduce", axis, size, blocks=False) for i, size in enumerate(sizes)]

    def send(self, name: str, axis: str, peer: int, size: int, *, blocks: bool = False, waits: Sequence[str] = ()) -> str:
        self.actions.append(Action(name, "send", bytes=size, axis=axis, group_size=2, peer=peer, is_blocking=blocks, depends_on=tuple(waits)))
        return name

    def receive(self, name: str, axis: str, peer: int, size: int, *, blocks: bool = False) -> str:
        self.actions.append(Action(name, "recv", bytes=size, axis=axis, group_size=2, peer=peer, is_blocking=blocks))
        return name

    def wait(self, name: str, waits: Iterable[str]) -> None:
        if names := tuple(waits):
            self.actions.append(Action(name, "wait", depends_on=names))


def build_schedule(name: str, world: int, groups: GroupRanks, programs: Sequence[ProgramBuilder], program_of: Callable[[int], int]) -> Schedule:
    """A schedule from programs and each rank's program number. Axes with only one-rank groups are left out, and no action may use them."""
    used_groups = {axis: tuple(lists) for axis, lists in groups.items() if any(len(group) > 1 for group in lists)}
    program_of_rank = {str(rank): program_of(rank) for rank in range(world)} if len(programs) > 1 else {}
    return Schedule(tuple(tuple(p.actions) for p in programs), program_of_rank, used_groups, world, name)


def require_multiple(name: str, world: int, unit: int, why: str) -> None:
    """Raise RequestError if `world` is not a multiple of `unit`."""
    if world < 1 or world % unit:
        nearest = max(world // unit, 1) * unit
        raise RequestError(f"{name}: {world} ranks are not a multiple of {why} = {unit}: use {nearest} ranks, or change one of these")


@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks over replicas, shards (or experts) and stages. The originals put the stages of a pipeline on neighbouring ranks; order
    "tensor" puts the shards there, which communicate most."""

    replicas: int
    shards: int
    stages: int
    rank_order: Literal["pipeline", "tensor"] = "pipeline"

    def rank(self, replica: int, shard: int, stage: int) -> int:
        if self.rank_order == "pipeline":
            return (replica * self.shards + shard) * self.stages + stage
        return (replica * self.stages + stage) * self.shards + shard

    def stage(self, rank: int) -> int:
        return rank % self.stages if self.rank_order == "pipeline" else rank // self.shards % self.stages

    def groups(self) -> GroupRanks:
        """dp: replicas of one shard; tp: the shards of a stage; pp, pp_back: the stages, for each direction; replica: all ranks of a stage."""
        replicas, shards, stages = range(self.replicas), range(self.shards), range(self.stages)
        pipelines = tuple(tuple(self.rank(r, t, s) for s in stages) for r in replicas for t in shards)
        return {
            "dp": tuple(tuple(self.rank(r, t, s) for r in replicas) for t in shards for s in stages),
            "tp": tuple(tuple(self.rank(r, t, s) for t in shards) for r in replicas for s in stages),
            "pp": pipelines,
            "pp_back": pipelines,
            "replica": tuple(tuple(self.rank(r, t, s) for r in replicas for t in shards) for s in stages),
        }


def world_group(world: int) -> GroupRanks:
    return {"world": (tuple(range(world)),)}
