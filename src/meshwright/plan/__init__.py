"""Level 3, no torch: which plans are legal, what each would cost, which is best, and why."""

from meshwright.plan.cp_planner import choose_cp_policies
from meshwright.plan.expert_planner import choose_expert_parallel
from meshwright.plan.explain import explain
from meshwright.plan.inference_explain import describe_plan, explain_inference
from meshwright.plan.inference_planner import (
    InferenceConstraints,
    InferenceRanking,
    ScoredInferencePlan,
    check_inference_mesh,
    rank_inference_plans,
    split_model,
    unsplit_plan,
)
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
    "InferenceConstraints",
    "InferenceRanking",
    "Ranking",
    "RetraceOptions",
    "ScoredInferencePlan",
    "ScoredPlan",
    "best_precision",
    "check_inference_mesh",
    "check_precision",
    "check_selective_recompute",
    "choose_cp_policies",
    "choose_expert_parallel",
    "choose_tensor_grid",
    "cut_stages",
    "describe_plan",
    "explain",
    "explain_inference",
    "explain_oom",
    "find_sample_coupling",
    "plan_penalty",
    "rank_inference_plans",
    "rank_plans",
    "refuse_unused",
    "reject_if_unsharded",
    "split_model",
    "unsplit_plan",
]
