"""The mesh: named axes and their degrees. It holds no live process group; `execute` creates those from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

from meshwright.core.errors import RequestError, unknown_name_error

MAX_RANKS = 2**20  # of a mesh or a cluster: beyond any machine; a larger number is a mistake, which would fill memory


@dataclass(frozen=True)
class Mesh:
    """Degrees by axis, outermost first; consecutive ranks are neighbours along the last axis. `tp` may have one to three dimensions.

    `order` permutes the axes that it names, outermost first, among the positions that they have by default; all other axes stay.
    ('dp', 'pp') makes the stages of a pipeline consecutive ranks, and moves replicas further away from each other.
    """

    pp: int = 1
    dp: int = 1
    shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: tuple[int, ...] = (1,)
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.tp) <= 3:
            raise RequestError(f"mesh axis tp has {len(self.tp)} dimensions: write one to three, like tp=2x2x1")
        for axis in AXES if min(self.pp, self.dp, self.shard, self.cp, self.ep, *self.tp) < 1 else ():
            if self.degree(axis) < 1 or (axis == "tp" and min(self.tp) < 1):
                raise RequestError(f"mesh axis {axis}: a degree is at least 1")
        if self.pp * self.dp * self.shard * self.cp * self.ep * math.prod(self.tp) > MAX_RANKS:
            raise RequestError(f"a mesh has at most {MAX_RANKS:,} ranks: use smaller degrees")
        for axis in self.order:
            if axis not in AXES:
                raise unknown_name_error("mesh axis", axis, AXES, "order")
            if self.order.count(axis) > 1:
                raise RequestError(f"order={','.join(self.order)}: the axis {axis} is given twice: leave one out")

    def degree(self, axis: str) -> int:
        """The degree of an axis, or of one dimension of the tensor-parallel grid."""
        return self._degrees[axis]

    @cached_property
    def _degrees(self) -> dict[str, int]:
        """Degrees by axis; cached, since searches read them very often."""
        grid = dict(zip(TP_GRID_AXES, (*self.tp, 1, 1), strict=False))
        return {"pp": self.pp, "dp": self.dp, "shard": self.shard, "cp": self.cp, "ep": self.ep, "tp": math.prod(self.tp), **grid}

    @property
    def tp_axes(self) -> tuple[str, ...]:
        """The axes over which tensor parallelism shards: one, or the two of a grid."""
        return ("tp",) if len(self.tp) == 1 else TP_GRID_AXES[:2]

    def canonical(self) -> Mesh:
        """The mesh with no dimension of length 1 in the tensor-parallel grid, and the grid's depth moved to the shard axis: ranks along the
        depth take their own samples and gather weights before use, which is what the shard axis does under zero=3."""
        depth = self.tp[2] if len(self.tp) > 2 else 1
        return replace(self, shard=self.shard * depth, tp=tuple(n for n in self.tp[:2] if n > 1) or (1,))

    @cached_property
    def size(self) -> int:
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def data_parallel_size(self) -> int:
        """How many parts a global batch is split into: replicas, ZeRO shards and expert-parallel ranks all take their own samples."""
        return self.dp * self.shard * self.ep

    def group_size(self, name: str) -> int:
        """The number of ranks in one group: of an axis, of an entry of `GROUP_AXES`, or the `world`."""
        if name not in self._group_sizes:
            self._group_sizes[name] = self.size if name == "world" else math.prod(self.degree(a) for a in GROUP_AXES.get(name, (name,)))
        return self._group_sizes[name]

    @cached_property
    def _group_sizes(self) -> dict[str, int]:
        return {}

    @cached_property
    def ordered_axes(self) -> tuple[str, ...]:
        """All axes from the outermost to the innermost, with those of the tensor-parallel grid for `tp`."""
        permuted = iter(self.order)
        axes = [next(permuted) if axis in self.order else axis for axis in AXES]
        return tuple(dim for axis in axes for dim in (TP_GRID_AXES if axis == "tp" else (axis,)))

    def stride(self, axis: str) -> int:
        """The difference in rank between two neighbours along an axis."""
        last = TP_GRID_AXES[-1] if axis == "tp" else axis
        return math.prod(self.degree(a) for a in self.ordered_axes[self.ordered_axes.index(last) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.stride(axis) % self.degree(axis)

    def grid_coordinate(self, tp_rank: int, axis: str) -> int:
        """The coordinate along one dimension of the tensor-parallel grid (or along all of `tp`) of the rank at coordinate `tp_rank` of `tp`."""
        inner = math.prod(self.degree(a) for a in TP_GRID_AXES[TP_GRID_AXES.index(axis) + 1 :]) if axis in TP_GRID_AXES else 1
        return tp_rank // inner % self.degree(axis)

    def data_rank(self, rank: int) -> int:
        """Which of the `data_parallel_size` slices of a batch this rank takes; ranks of one cp group take the same."""
        dp, shard, ep = (self.coordinate(rank, axis) for axis in ("dp", "shard", "ep"))
        return (dp * self.shard + shard) * self.ep + ep

    def groups(self, *axes: str) -> list[list[int]]:
        """The rank lists that differ only along `axes`; each collective on those axes runs in one of them."""
        first_ranks, offsets = [0], [0]  # the first rank of each group, and its members' offsets from it
        stride = self.size
        for axis in self.ordered_axes:
            stride //= self.degree(axis)
            steps = [i * stride for i in range(self.degree(axis))]
            if axis in axes or (axis in TP_GRID_AXES and "tp" in axes):
                offsets = [offset + step for offset in offsets for step in steps]
            else:
                first_ranks = [first + step for first in first_ranks for step in steps]
        return [[first + offset for offset in offsets] for first in first_ranks]

    @staticmethod
    def parse(text: str) -> Mesh:
        """'dp=2,shard=2,tp=2x2x1' → Mesh; an axis left out is 1."""
        degrees: dict[str, int | tuple[int, ...]] = {}
        if len(text) > 200:
            raise RequestError(f"--mesh {text[:40]}… is too long: write it like dp=2 or shard=2")
        for part in filter(None, text.replace(" ", "").split(",")):
            axis, _, value = part.partition("=")
            if axis not in AXES:
                raise unknown_name_error("mesh axis", axis, AXES, f"--mesh {text}")
            try:
                sizes = tuple(int(v) for v in value.split("x"))
            except ValueError:
                raise RequestError(f"--mesh {text}: '{part}' needs a whole number, like {axis}=2") from None
            if len(sizes) > 1 and axis != "tp":
                raise RequestError(f"--mesh {text}: only tp has several dimensions; write {axis}={math.prod(sizes)}")
            if axis in degrees:
                raise RequestError(f"--mesh {text}: the axis {axis} is given twice: leave one out")
            degrees[axis] = sizes if axis == "tp" else sizes[0]
        if not degrees:
            raise RequestError(f"--mesh '{text}' names no axis: write it like dp=2 or shard=2")
        return Mesh(**degrees)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [f"{a}={'x'.join(map(str, self.tp)) if a == 'tp' else self.degree(a)}" for a in AXES if self.degree(a) > 1]
        return (",".join(parts) or "dp=1") + (f" in the order {self.nondefault_order}" if self.nondefault_order else "")

    @property
    def nondefault_order(self) -> str:
        """Its axes, outermost first; empty where they are in the default order."""
        axes = [a for a in dict.fromkeys("tp" if a in TP_GRID_AXES else a for a in self.ordered_axes) if self.degree(a) > 1]
        return ",".join(axes) if axes != [a for a in AXES if self.degree(a) > 1] else ""


AXES: tuple[str, ...] = tuple(f.name for f in fields(Mesh) if f.name != "order")  # tp is the last, so its ranks are consecutive
TP_GRID_AXES = ("tpx", "tpy", "tpz")
INTRA_LAYER_AXES = ("tp", "tpx", "tpy", "cp", "ep")  # axes with collectives inside layers, which the layer's next operation waits for
GROUP_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("pp", "dp", "shard", "cp", "ep"),  # ranks that work on one global batch
    "data": ("dp", "shard", "cp", "ep"),  # ranks whose gradients are reduced together
    "replica": ("dp", "cp", "ep"),  # of these, ranks that hold the same parameters
    "expert_replica": ("dp", "cp"),  # of these, ranks that hold the same experts and embedding tables
    **{axis: (axis,) for axis in (*AXES, *TP_GRID_AXES[:2])},
}


def grid_coordinates(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The coordinates of a rank or node on a grid; consecutive ones are neighbours along the last dim."""
    return tuple(index // math.prod(shape[dim + 1 :]) % size for dim, size in enumerate(shape))


def check_runnable(mesh: Mesh) -> None:
    if mesh != mesh.canonical():
        raise RequestError(f"mesh {mesh}: write the depth of tensor parallelism as the shard axis, and no dimension of 1: {mesh.canonical()}")
