"""splitmix64 on tensors of int64: bits that depend on a key and an index alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_TWO_POW_63 = 1 << 63


def to_int64(value: int) -> int:
    """The int64 with the same 64 bits: torch has no unsigned 64-bit arithmetic."""
    return (value + _TWO_POW_63) % (2 * _TWO_POW_63) - _TWO_POW_63


# The constants of splitmix64: an odd step whose multiples spread evenly, and the two multipliers of its finaliser.
GOLDEN_GAMMA = to_int64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER_1 = to_int64(0xBF58476D1CE4E5B9)
_MIX_MULTIPLIER_2 = to_int64(0x94D049BB133111EB)


def logical_shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical right shift. `>>` on int64 copies the sign bit, so the copies are masked away."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def splitmix64(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64: each input bit flips each output bit with probability near one half."""
    bits = (bits ^ logical_shift_right(bits, 30)) * _MIX_MULTIPLIER_1
    bits = (bits ^ logical_shift_right(bits, 27)) * _MIX_MULTIPLIER_2
    return bits ^ logical_shift_right(bits, 31)
