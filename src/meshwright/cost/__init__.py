"""Level 2, no torch: what a schedule costs on a cluster, in seconds and bytes, from measured constants."""

from meshwright.cost.step_cost import estimate

__all__ = ["estimate"]
