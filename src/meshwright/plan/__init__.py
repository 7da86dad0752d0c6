"""Level 3, no torch: which plans are legal, what each would cost, which is best, and why."""

from meshwright.plan.cp_planner import choose_cp_policies
from meshwright.plan.expert_planner import choose_expert_parallel
from meshwright.plan.explain import explain
from meshwright.plan.memory_planner import check_precision, check_selective_recompute
from meshwright.plan.oom_advice import RetraceOptions, explain_oom
from meshwright.plan.pipeline_planner import cut_stages
from meshwright.plan.precision_planner import best_precision
from meshwright.plan.sample_analysis import find_sample_coupling
from meshwright.plan.search import Ranking, ScoredPlan, plan_penalty, rank_plans
from meshwright.plan.search_space import Constraints, refuse_unused
from meshwright.plan.tensor_planner import choose_tensor_grid, reject_if_unsharded

__all__ = [
    "Constraints",
    "Ranking",
    "RetraceOptions",
    "ScoredPlan",
    "best_precision",
    "check_precision",
    "check_selective_recompute",
    "choose_cp_policies",
    "choose_expert_parallel",
    "choose_tensor_grid",
    "cut_stages",
    "explain",
    "explain_oom",
    "find_sample_coupling",
    "plan_penalty",
    "rank_plans",
    "refuse_unused",
    "reject_if_unsharded",
]
