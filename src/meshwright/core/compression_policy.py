"""Compression of gradients that are reduced over data ranks: what it does to a bucket, and which plans it cannot be used in.

[Note: compression]
  bf16      a bucket is rounded to bf16, reduced in bf16, and converted back: half the bytes, and an error of about 2^-8 of the largest term.
  powersgd  every matrix M of a bucket (n × m) is sent as two factors of rank r, P = M·Q and, once P is orthogonal, Q = Mᵀ·P; what P·Qᵀ
            omits is kept and added to the next step's gradient (error feedback). Vectors and small matrices are sent uncompressed.
Compressed training is not exact: it changes the optimizer, and the planner uses it only where the user allows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh

Compression = Literal["none", "bf16", "powersgd"]


def low_rank_shape(shape: Sequence[int], rank: int) -> tuple[int, int, int] | None:
    """(rows, columns, rank) of a tensor that is sent as two factors; None for one that is sent uncompressed, since factors would not be smaller."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rank, rows, columns)
    return (rows, columns, rank) if (rows + columns) * rank < rows * columns else None


def check_compression(compression: str, rank: int, mesh: Mesh, zero: int, precision: str) -> None:
    if compression == "none":
        return
    if mesh.group_size("data") == 1:
        raise RequestError(f"plan: compression={compression} is for gradients of several data ranks, and mesh {mesh} has one: leave it out")
    if precision == "fp64":
        raise RequestError(f"plan: precision=fp64 is for exact gradients, and compression={compression} rounds them: leave one of them out")
    if zero == 3:
        raise RequestError(f"plan: compression={compression} works on buckets, and zero=3 reduces unit by unit: use zero=0, 1 or 2")
    if compression == "powersgd":
        sharding = [f"zero={zero}"] * (zero > 0) + [axis for axis in ("pp", "cp", "ep", "tp") if mesh.degree(axis) > 1]
        if sharding:
            raise RequestError(f"plan: compression=powersgd needs all gradients on every rank, and {sharding[0]} shards them: use bf16, or only dp")
        if rank < 1:
            raise RequestError(f"plan: compression_rank={rank} must be at least 1")
