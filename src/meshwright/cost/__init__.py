"""Level 2, no torch: predicts the seconds and bytes of a schedule on a cluster, from measured constants."""

from meshwright.cost.step_cost import estimate

__all__ = ["estimate"]
