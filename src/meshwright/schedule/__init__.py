"""Level 1, no torch: from a plan and a profile to the ordered actions of one step."""

from meshwright.schedule.planned_ledger import LedgerLine, ledger_differences, plan_ledger, plan_ledgers
from meshwright.schedule.rank_profile import local_profile
from meshwright.schedule.step_actions import MeshCoordinate, build_program, build_schedule

__all__ = ["LedgerLine", "MeshCoordinate", "build_program", "build_schedule", "ledger_differences", "local_profile", "plan_ledger", "plan_ledgers"]
