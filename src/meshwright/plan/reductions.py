"""How a loss adds positions up: whether ranks with some positions each can add their losses up to the loss of all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.errors import RequestError
from meshwright.core.strand import Operation
from meshwright.plan.reader import Reader

LIKELIHOODS = ("nll_loss_forward", "nll_loss2d_forward")
_LOSSES = (*LIKELIHOODS, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_KEEPS = frozenset(("_to_copy", "detach", "alias", "clone", "view", "reshape", "squeeze", "unsqueeze", "neg", "sum", "mean", "lift_fresh"))
_SCALES = frozenset(("mul", "mul_", "div", "div_"))
_ADDS = frozenset(("add", "add_", "sub", "sub_"))
_ADVICE = "return a mean over positions, or the pair (sum, count) of what is counted"


class Reductions:
    """For each value that is left when positions are added up: whether it is their mean, their sum, or neither, with the reason."""

    def __init__(self, reader: Reader, strand: int) -> None:
        self.reader, self.strand = reader, strand
        self.kind: dict[int, str] = {}

    def reduces(self, op: Operation) -> str | None:
        """Whether an operation takes the mean or the sum over positions."""
        found = op.name if op.name in ("mean", "sum") else None
        if op.name in _LOSSES and op.numbers:
            found = {1: "mean", 2: "sum"}.get(op.numbers[0])
        return found if self.strand in op.binds else None

    def starts(self, op: Operation) -> bool:
        """Is it a reduction over positions? If so, its results are known from here on."""
        found = self.reduces(op)
        if found is not None:
            self.kind.update(dict.fromkeys(op.outputs, found))
        return found is not None

    def passes(self, op: Operation) -> None:
        """What an operation makes of such values."""
        met = [self.kind[v] for v in op.inputs if v in self.kind]
        if met:
            self.kind.update(dict.fromkeys(op.outputs, self._after(op, met)))

    def _after(self, op: Operation, met: Sequence[str]) -> str:
        kinds, alone = set(met), len(met) == len(op.inputs)
        if op.function == "cross_entropy":  # smooths labels by sums of its own, which its mean divides by the same number
            return "mean" if "mean" in kinds or (op.name == "div" and len(met) == 2) else "sum"
        if len(kinds) == 1 and op.name in _KEEPS:
            return met[0]
        if len(kinds) == 1 and op.name in _ADDS and (met[0] == "mean" or (alone and len(op.inputs) > 1)):
            return met[0]
        if op.name in _SCALES and len(met) == 1 and op.inputs[0] in self.kind and (met[0] == "mean" or not alone):
            return met[0]
        return self.late(op)

    def late(self, op: Operation) -> str:
        """The reason why an operation must not come after positions were added up."""
        where = self.reader.place(self.reader.flow.operations.index(op))
        return f"{where} adds positions up and then computes on ({op.name})"

    def check(self, ways: int) -> None:
        """Refuse a loss that is not the sum or the mean of its parts."""
        kinds = [self.kind.get(v, "does not depend on positions") if v >= 0 else "counts with a number" for v in self.reader.flow.loss]
        wanted = "mean" if len(kinds) == 1 else "sum"
        wrong = next((k for k in kinds if k != wanted), None)
        if wrong is None:
            return
        said = {"sum": "the loss is a sum over positions", "mean": "the loss is a mean beside a count", "counts with a number": f"the loss {wrong}"}
        text = said.get(wrong, wrong if " and then " in wrong else f"the loss {wrong}")
        raise RequestError(f"cp={ways}: {text}: {_ADVICE}")
