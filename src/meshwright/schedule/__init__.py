"""Level 1, no torch: from a plan and a profile to the ordered actions of one step."""

from meshwright.schedule.buckets import Bucket, assign_buckets
from meshwright.schedule.expand import expand

__all__ = ["Bucket", "assign_buckets", "expand"]
