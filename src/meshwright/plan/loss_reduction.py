"""How a loss reduces over positions: decides whether the losses of ranks with a shard of the positions each add up to the whole loss. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.dataflow import Operation
from meshwright.core.errors import RequestError
from meshwright.plan.dataflow_graph import DataflowGraph

NLL_OPS = ("nll_loss_forward", "nll_loss2d_forward")
_LOSS_OPS = (*NLL_OPS, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_PRESERVING_OPS = frozenset(("_to_copy", "detach", "alias", "clone", "view", "reshape", "squeeze", "unsqueeze", "neg", "sum", "mean", "lift_fresh"))
_SCALING_OPS = frozenset(("mul", "mul_", "div", "div_"))
_ADDITIVE_OPS = frozenset(("add", "add_", "sub", "sub_"))
_ADVICE = "return a mean over positions, or the pair (sum, count) of what is counted"


class LossReductions:
    """Records for each value computed from a reduction over positions whether it is their mean, their sum, or neither, with the reason."""

    def __init__(self, graph: DataflowGraph, logical_dim: int) -> None:
        self.graph, self.logical_dim = graph, logical_dim
        self.kinds: dict[int, str] = {}

    def reduction_of(self, op: Operation) -> str | None:
        """Whether an operation takes the mean or the sum over positions; None if neither."""
        found = op.name if op.name in ("mean", "sum") else None
        if op.name in _LOSS_OPS and op.int_args:
            found = {1: "mean", 2: "sum"}.get(op.int_args[0])
        return found if self.logical_dim in op.indivisible_dims else None

    def record_reduction(self, op: Operation) -> bool:
        """Record the outputs of an operation if it is a reduction over positions; return whether it is."""
        found = self.reduction_of(op)
        if found is not None:
            self.kinds.update(dict.fromkeys(op.outputs, found))
        return found is not None

    def propagate(self, op: Operation) -> None:
        """Record the kind of an operation's outputs if an input has one."""
        met = [self.kinds[v] for v in op.inputs if v in self.kinds]
        if met:
            self.kinds.update(dict.fromkeys(op.outputs, self._kind_after(op, met)))

    def _kind_after(self, op: Operation, input_kinds: Sequence[str]) -> str:
        kinds, alone = set(input_kinds), len(input_kinds) == len(op.inputs)
        if op.function == "cross_entropy":  # label smoothing adds sums of its own, which the mean divides by the same number
            return "mean" if "mean" in kinds or (op.name == "div" and len(input_kinds) == 2) else "sum"
        if len(kinds) == 1 and op.name in _PRESERVING_OPS:
            return input_kinds[0]
        if len(kinds) == 1 and op.name in _ADDITIVE_OPS and (input_kinds[0] == "mean" or (alone and len(op.inputs) > 1)):
            return input_kinds[0]
        if op.name in _SCALING_OPS and len(input_kinds) == 1 and op.inputs[0] in self.kinds and (input_kinds[0] == "mean" or not alone):
            return input_kinds[0]
        return self.late_use_reason(op)

    def late_use_reason(self, op: Operation) -> str:
        """The reason why an operation must not follow a reduction over positions."""
        where = self.graph.describe_location(self.graph.dataflow.operations.index(op))
        return f"{where} adds positions up and then computes on ({op.name})"

    def check_loss(self, cp_degree: int) -> None:
        """Raise unless the loss is a mean over positions or a pair (sum, count)."""
        kinds = [self.kinds.get(v, "does not depend on positions") if v >= 0 else "counts with a number" for v in self.graph.dataflow.loss]
        wanted = "mean" if len(kinds) == 1 else "sum"
        wrong = next((k for k in kinds if k != wanted), None)
        if wrong is None:
            return
        said = {"sum": "the loss is a sum over positions", "mean": "the loss is a mean beside a count", "counts with a number": f"the loss {wrong}"}
        text = said.get(wrong, wrong if " and then " in wrong else f"the loss {wrong}")
        raise RequestError(f"cp={cp_degree}: {text}: {_ADVICE}")
