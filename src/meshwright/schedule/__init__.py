"""Level 1, no torch: from a plan and a profile to the ordered actions of one step."""

from meshwright.schedule.buckets import Bucket, assign_buckets
from meshwright.schedule.expand import Place, expand, program
from meshwright.schedule.ledger import LedgerLine, differences, plan_ledger, plan_ledgers
from meshwright.schedule.local import local_profile

__all__ = ["Bucket", "LedgerLine", "Place", "assign_buckets", "differences", "expand", "local_profile", "plan_ledger", "plan_ledgers", "program"]
