"""Level 3, no torch: which plans are legal, what each would cost, which is best, and why."""

from meshwright.plan.explain import explain
from meshwright.plan.memory import check_keeping, check_precision
from meshwright.plan.owners import choose_owners
from meshwright.plan.pipeline import cut_stages
from meshwright.plan.positions import share_positions
from meshwright.plan.precision import best_precision
from meshwright.plan.remedy import Retrace, too_big
from meshwright.plan.search import Ranking, Scored, rank_plans
from meshwright.plan.space import Wishes, refuse_unused
from meshwright.plan.tensor import choose_grid, refuse_if_nothing

__all__ = [
    "Ranking",
    "Retrace",
    "Scored",
    "Wishes",
    "best_precision",
    "check_keeping",
    "check_precision",
    "choose_grid",
    "choose_owners",
    "cut_stages",
    "explain",
    "rank_plans",
    "refuse_if_nothing",
    "refuse_unused",
    "share_positions",
    "too_big",
]
