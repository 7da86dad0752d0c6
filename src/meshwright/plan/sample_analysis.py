"""Finds where the samples of a batch meet in a model's dataflow, and how the loss reduces them (see [Note: samples that meet]). Pure.

The batch is a logical dim like any other. An operation that pairs it with itself compares samples. A sum or mean over it is a value of the whole
batch: as long as only linear operations follow, the loss is a sum or mean of the samples' own losses; anything else computes on statistics of the
batch. What moves samples (a sort, a gather by index, an operation without a rule) is followed and taken to keep them apart.
"""

from __future__ import annotations

import math
from collections import Counter

from meshwright.core.dataflow import Dataflow, Operation
from meshwright.core.sample_coupling import LossReduction, MeetingKind, SampleCoupling, SampleMeeting
from meshwright.plan.dataflow_graph import DataflowGraph
from meshwright.plan.loss_reduction import LOSS_OPS, NLL_OPS

_VIEWS = frozenset(("view", "_unsafe_view", "reshape", "unflatten", "squeeze", "unsqueeze"))
_PRESERVING = frozenset(
    (*_VIEWS, "_to_copy", "detach", "alias", "clone", "neg", "lift_fresh", "sum", "mean", "stack", "cat", "permute", "t", "transpose", "select",
     "unbind", "slice", "expand", "native_dropout")
)  # fmt: skip
_CONSTANT_RESULT = ("_like", "new_zeros", "new_ones", "new_empty", "new_full")  # names of operations that take only a shape from their operand
_ORDER = frozenset(("flip", "roll", "slice", "select", "unbind", "split", "split_with_sizes", "chunk", "unsafe_split"))
_ALONG_SAMPLES = frozenset(("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod", "native_layer_norm"))
_STATISTICS = frozenset(("var", "std", "var_mean", "std_mean", "max", "min", "amax", "amin", "logsumexp", "prod", "norm", "linalg_vector_norm"))
_CROSS_ENTROPY = ("cross_entropy", "nll_loss")
_REDUCTIONS: dict[int, LossReduction] = {1: "mean", 2: "sum"}


def find_sample_coupling(dataflow: Dataflow) -> SampleCoupling:
    """Where samples meet, and how the loss reduces them."""
    return dataflow.memo.get_or_compute("samples", (), (), lambda: _SampleAnalysis(dataflow).coupling())


class _SampleAnalysis:
    """Follows samples through a forward pass and its loss, in order."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow, self.graph = dataflow, DataflowGraph.of(dataflow)
        fields = [dataflow.values[f.value] for f in dataflow.batch_tensors if f.value >= 0]
        self.samples = {dim for v in fields if v.shape[:1] == (dataflow.batch,) for dim in v.logical_dims[0]}
        self.reductions: dict[int, LossReduction] = {}  # values that are reduced over samples
        self.powers: dict[int, int] = {}  # of the batch size, in the numbers that values were multiplied by
        self.meetings: Counter[tuple[int, MeetingKind]] = Counter()  # by operation
        self.masked_ops: list[int] = []  # operations that begin a masked mean
        self.used_ops = self._find_used_ops()
        self._find_updates()
        for index, op in enumerate(dataflow.operations):
            self._visit(index, op)

    def coupling(self) -> SampleCoupling:
        found: dict[SampleMeeting, int] = {}
        for (index, kind), _ in sorted(self.meetings.items()):
            op = self.dataflow.operations[index]
            channels = self.dataflow.values[op.inputs[0]].shape[1] if kind == "batch_norm" else 0
            meeting = SampleMeeting(self.graph.enclosing_module(index), kind, op.name, channels)
            found[meeting] = found.get(meeting, 0) + 1
        meetings = tuple(SampleMeeting(m.module, m.kind, m.operation, m.num_channels, calls) for m, calls in found.items())
        loss = self._loss_reduction()
        if loss != "masked mean":
            return SampleCoupling(meetings, loss)
        return SampleCoupling(meetings, loss, self._targets_per_sample(), self._module_before(min(self.masked_ops)))

    # -- the loss --

    def _loss_reduction(self) -> LossReduction:
        loss = self.dataflow.loss
        if len(loss) == 2:
            return "counted"
        if len(loss) != 1 or loss[0] not in self.reductions:
            return "unknown"
        reduction, power = self.reductions[loss[0]], self.powers.get(loss[0], 0)
        if reduction not in ("mean", "sum"):
            return reduction
        return {0: "mean", 1: "sum"}.get(power + (reduction == "sum"), "other")  # type: ignore[return-value]

    def _targets_per_sample(self) -> float:
        op = self.dataflow.operations[self.masked_ops[0]]
        return math.prod(self.dataflow.values[op.inputs[1]].shape) / self.dataflow.batch if op.name in NLL_OPS and len(op.inputs) == 2 else 1.0

    def _module_before(self, index: int) -> str | None:
        """The outermost module that has returned when an operation runs; None if there is none."""
        return next((call.module for call in reversed(self.dataflow.modules) if call.end_op <= index), None)

    def _may_mask(self, op: Operation) -> bool:
        """Whether the targets of a cross entropy may be ignored or weighted. Those that are looked up in a table as well have no negative ones."""
        if len(op.inputs) > 2:
            return True
        sources = self._batch_sources(op.inputs[1])
        embedded = {s for o in self.dataflow.operations if o.name == "embedding" for s in self._batch_sources(o.inputs[1])}
        return bool(sources) and not (op.int_args[1] < 0 and sources <= embedded)

    def _batch_sources(self, value: int) -> frozenset[int]:
        """The tensors of the batch that a value is made from by views, slices and copies; a value made otherwise is a source itself."""
        batch_values = {f.value for f in self.dataflow.batch_tensors}
        seen: set[int] = set()
        while value not in batch_values:
            index = self.graph.producer.get(value)
            if index is None or value in seen:
                return frozenset()
            seen.add(value)
            op = self.dataflow.operations[index]
            if not op.inputs:
                return frozenset()
            if op.name not in _PRESERVING and op.name not in _ORDER and op.name != "constant_pad_nd":
                return frozenset((value,))
            value = op.inputs[0]
        return frozenset((value,))

    # -- values --

    def _sample_positions(self, value: int) -> int:
        """In how many of its dims a value has samples."""
        return sum(not self.samples.isdisjoint(dim) for dim in self.dataflow.values[value].logical_dims)

    def _find_used_ops(self) -> set[int]:
        """The operations that the loss depends on."""
        needed, used = {v for v in self.dataflow.loss if v >= 0}, set()
        for index in range(len(self.dataflow.operations) - 1, -1, -1):
            op = self.dataflow.operations[index]
            if not needed.isdisjoint(op.outputs):
                used.add(index)
                needed.update(op.inputs)
        return used

    def _find_updates(self) -> None:
        """Find the operations that write to a buffer whose new value reaches the loss, as the power iteration of a spectral norm does."""
        known = {f.value for f in self.dataflow.batch_tensors}
        for index, op in enumerate(self.dataflow.operations):
            if set(op.inputs).intersection(op.outputs) - known:
                self._meet(index, "updates")
            known.update(op.outputs)

    def _meet(self, index: int, kind: MeetingKind) -> None:
        if index in self.used_ops:
            self.meetings[index, kind] += 1

    # -- operations --

    def _visit(self, index: int, op: Operation) -> None:
        if op.name.endswith(_CONSTANT_RESULT):
            return
        power = next((self.powers[v] for v in op.inputs if v in self.powers), 0)
        power += op.int_args[0] if op.name.rstrip("_") in ("mul", "div") and op.int_args else 0
        self.powers.update(dict.fromkeys(op.outputs, power) if power else {})
        crossed = self.samples.intersection((*op.contracted_dims, *op.indivisible_dims))
        if "batch_norm" in op.name:
            if crossed and op.int_args[:1] == (1,):
                self._meet(index, "batch_norm")
        elif any(v in self.reductions for v in op.inputs):
            self._follow_reduced(index, op)
        elif self._compares(op):
            self._meet(index, "products")
            self._follow_new_dims(op)
        elif crossed:
            self._cross_samples(index, op)

    def _compares(self, op: Operation) -> bool:
        """Whether an operation pairs samples with samples."""
        if not op.inputs or op.name in _VIEWS:
            return False
        return max(map(self._sample_positions, op.outputs), default=0) > 1 >= max(map(self._sample_positions, op.inputs))

    def _cross_samples(self, index: int, op: Operation) -> None:
        """An operation that contracts samples, or needs all of them."""
        paired = max(map(self._sample_positions, op.inputs), default=0) > 1  # samples have met already
        if not any(map(self._sample_positions, op.outputs)):
            self._reduce(index, op)
        elif op.name in _ALONG_SAMPLES and not paired:
            self._meet(index, "statistics")
        elif op.name in _ORDER and not paired:
            self._meet(index, "order")
        self._follow_new_dims(op)

    def _reduce(self, index: int, op: Operation) -> None:
        kind: LossReduction | None = None
        if op.name in ("sum", "mean"):
            kind = op.name  # type: ignore[assignment]
        elif op.name in LOSS_OPS and op.int_args:
            kind = _REDUCTIONS.get(op.int_args[0])
            if kind == "mean" and op.name in NLL_OPS and self._may_mask(op):
                kind = "masked mean"
                self.masked_ops.append(index)
        elif not self.samples.isdisjoint(op.contracted_dims):
            kind = "sum"
        elif op.name in _STATISTICS:
            self._meet(index, "statistics")
            kind = "other"
        if kind is not None:
            self.reductions.update(dict.fromkeys(op.outputs[:1], kind))

    def _follow_new_dims(self, op: Operation) -> None:
        """Take a dim that an operation makes anew for samples, if its operand has samples in that place."""
        values, known = self.dataflow.values, {s for v in op.inputs for dim in self.dataflow.values[v].logical_dims for s in dim}
        places = {d for v in op.inputs for d, dim in enumerate(values[v].logical_dims) if not self.samples.isdisjoint(dim)}
        for value in (values[v] for v in op.outputs):
            for d, dim in enumerate(value.logical_dims):
                if d in places and known.isdisjoint(dim) and value.shape[d] % self.dataflow.batch == 0:
                    self.samples.update(dim)

    def _follow_reduced(self, index: int, op: Operation) -> None:
        """An operation on values of the whole batch."""
        if any(map(self._sample_positions, (*op.inputs, *op.outputs))):
            self._meet(index, "statistics")
            return
        kind = self._kind_after(op)
        if kind == "masked mean" and "masked mean" not in [self.reductions.get(v) for v in op.inputs]:
            self.masked_ops.append(min(self.graph.producer[v] for v in op.inputs))
        if kind == "other" and "other" not in [self.reductions.get(v) for v in op.inputs]:
            self._meet(index, "statistics")
        self.reductions.update(dict.fromkeys(op.outputs, kind))

    def _kind_after(self, op: Operation) -> LossReduction:
        """How the result of an operation on values of the whole batch reduces the samples; "other" if it is not linear."""
        name, kinds = op.name.rstrip("_"), [self.reductions[v] for v in op.inputs if v in self.reductions]
        first, all_reduced = kinds[0], len(kinds) == len(op.inputs)
        if "other" in kinds:
            return "other"
        if name in _PRESERVING:
            return first if len(set(kinds)) == 1 and (len(kinds) == 1 or first != "masked mean") else "terms" if "masked mean" in kinds else "other"
        if op.function in _CROSS_ENTROPY and name in ("add", "mul", "div"):  # label smoothing adds sums of its own, divided by the same number
            return "masked mean" if "masked mean" in kinds or (name == "div" and all_reduced and len(kinds) == 2) else first
        if name in ("add", "sub"):
            return self._kind_of_sum(op, kinds, all_reduced)
        if name in ("mul", "div") and len(kinds) == 1 and (name == "mul" or op.inputs[0] in self.reductions):
            return first
        if name == "div" and kinds == ["sum", "sum"] and not self.dataflow.values[op.inputs[1]].needs_grad:
            return "masked mean"
        if name.startswith("clamp") and first == "sum" and not self.dataflow.values[op.inputs[0]].needs_grad:
            return "sum"  # a count, kept from being zero
        return "other"

    def _kind_of_sum(self, op: Operation, kinds: list[LossReduction], all_reduced: bool) -> LossReduction:
        first = kinds[0]
        if len(op.inputs) == 1:  # a number is added
            return first if first == "mean" or op.int_args == (0,) else "terms" if first == "masked mean" else "other"
        if all_reduced and len(set(kinds)) == 1 and first != "masked mean":
            return first
        if "masked mean" in kinds or "terms" in kinds:
            return "terms"
        return "mean" if set(kinds) == {"mean"} else "other"
