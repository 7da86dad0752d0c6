"""How a loss reduces over positions: decides whether the losses of ranks, each with a shard of the positions, add up to the loss. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.dataflow import Operation
from meshwright.core.errors import RequestError
from meshwright.plan.dataflow_graph import DataflowGraph

NLL_OPS = ("nll_loss_forward", "nll_loss2d_forward")
LOSS_OPS = (*NLL_OPS, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_PRESERVING_OPS = frozenset(("_to_copy", "detach", "alias", "clone", "view", "reshape", "squeeze", "unsqueeze", "neg", "sum", "mean", "lift_fresh"))
_SCALING_OPS = frozenset(("mul", "mul_", "div", "div_"))
_ADDITIVE_OPS = frozenset(("add", "add_", "sub", "sub_"))
_ADVICE = "return a mean over positions, or the pair (sum, count)"


class LossReductions:
    """Records for each value computed from a reduction over positions whether it is their mean, their sum, or neither, with the reason."""

    def __init__(self, graph: DataflowGraph, logical_dim: int) -> None:
        self.graph, self.logical_dim = graph, logical_dim
        self.kinds: dict[int, str] = {}

    def reduction_of(self, op: Operation) -> str | None:
        """Whether an operation takes the mean or the sum over positions; None if neither."""
        kind = op.name if op.name in ("mean", "sum") else None
        if op.name in LOSS_OPS and op.int_args:
            kind = {1: "mean", 2: "sum"}.get(op.int_args[0])
        return kind if self.logical_dim in op.indivisible_dims else None

    def record_reduction(self, op: Operation) -> bool:
        """Record the outputs of an operation if it is a reduction over positions; return whether it is."""
        kind = self.reduction_of(op)
        if kind is not None:
            self.kinds.update(dict.fromkeys(op.outputs, kind))
        return kind is not None

    def propagate(self, op: Operation) -> None:
        """Record the kind of an operation's outputs if an input has one."""
        kinds = [self.kinds[v] for v in op.inputs if v in self.kinds]
        if kinds:
            self.kinds.update(dict.fromkeys(op.outputs, self._kind_after(op, kinds)))

    def _kind_after(self, op: Operation, input_kinds: Sequence[str]) -> str:
        kind, same_kind, all_reduced = input_kinds[0], len(set(input_kinds)) == 1, len(input_kinds) == len(op.inputs)
        if op.function == "cross_entropy":  # label smoothing adds sums of its own, which the mean divides by the same number
            return "mean" if "mean" in input_kinds or (op.name == "div" and len(input_kinds) == 2) else "sum"
        preserves = same_kind and op.name in _PRESERVING_OPS
        adds = same_kind and op.name in _ADDITIVE_OPS and (kind == "mean" or (all_reduced and len(op.inputs) > 1))
        scales = op.name in _SCALING_OPS and len(input_kinds) == 1 and op.inputs[0] in self.kinds and (kind == "mean" or not all_reduced)
        return kind if preserves or adds or scales else self.late_use_reason(op)

    def late_use_reason(self, op: Operation) -> str:
        """The reason why an operation must not follow a reduction over positions."""
        where = self.graph.describe_location(self.graph.dataflow.operations.index(op))
        return f"{where} computes on a sum or mean over positions ({op.name})"

    def check_loss(self, cp_degree: int) -> None:
        """Raise unless the loss is a mean over positions or a pair (sum, count)."""
        no_kind, number = "the loss does not depend on positions", "the loss returns its count as a number instead of a tensor"
        kinds = [self.kinds.get(v, no_kind) if v >= 0 else number for v in self.graph.dataflow.loss]
        wrong = next((k for k in kinds if k != ("mean" if len(kinds) == 1 else "sum")), None)
        if wrong is not None:
            reason = {"sum": "the loss is a sum over positions", "mean": "the loss returns a mean with a count"}.get(wrong, wrong)
            raise RequestError(f"cp={cp_degree}: {reason}: {_ADVICE}")
