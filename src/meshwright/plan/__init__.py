"""Level 3, no torch: which plans are legal, what each would cost, which is best, and why."""

from meshwright.plan.explain import explain
from meshwright.plan.search import Ranking, Scored, rank_plans
from meshwright.plan.space import Wishes

__all__ = ["Ranking", "Scored", "Wishes", "explain", "rank_plans"]
