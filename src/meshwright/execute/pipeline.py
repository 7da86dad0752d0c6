"""Pipeline parallelism, acting half: each rank keeps its stages of the model and runs micro-batches through them.

[Note: a stage of any model]
The model's forward is left as it is, and every stage runs it, with the loss around it. Modules whose work an earlier stage has done
give stand-ins of the right shapes at once; where the stage begins, what was received takes the stand-ins' place; where the next stage
begins, the run is left, with the values that go on. What does not depend on parameters (masks, position tables) each stage so makes
for itself from the samples, and only what was learned travels. The schedules and the exchange are torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.utils import _pytree as pytree

from meshwright.comm import Ledger, NullComm
from meshwright.comm.null import Done
from meshwright.core.backends import backend_traits
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import schedule_traits
from meshwright.core.plan import Carry, Plan
from meshwright.core.task import Batch, Loss
from meshwright.core.ties import stages_holding
from meshwright.describe.fakes import on_fakes, quiet, unpacked
from meshwright.execute.context import ContextRun
from meshwright.execute.doors import changed
from meshwright.execute.groups import Groups, joined, process_group
from meshwright.execute.recompute import Recall
from meshwright.execute.split import downstream

_SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}
# What torch says when the two halves of a backward would need the same nodes (T5's position bias, under recomputation or tensor parallelism)
# and, in 2.11, when not all that a stage gives is learned, or not all that it is given is used.
_UNSPLIT = ("backward through the graph a second time", "different number of tensors was saved", "does not require grad and does not have a grad_fn",
            "appears to not have been used in the graph")  # fmt: skip
_KEPT = 16  # sizes of samples whose schedules, with the buffers that they receive into, are kept


class _LeaveError(BaseException):
    """The run of a stage ends here. Not an Exception, so that no handler in a model's code keeps it."""


class _Unheard(NullComm):
    """A group of ranks for a run on fake tensors, in which nobody says anything."""

    def __init__(self, of: Comm) -> None:
        self.rank, self.size = of.rank, of.size

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str, sizes: Sequence[int] | None = None) -> Done:
        return Done()


class PipelineCuts:
    """This rank's stages. Made when a plan is applied; `run` needs a loss and samples, and looks at the first of each size to learn shapes."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        self.plan, self.model, self.groups = plan, model, groups
        self.mine = [s for s in range(len(plan.stages)) if plan.stage_rank(s) == groups.pp.rank]
        self.every = [(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
        holders = stages_holding(plan.stages)
        self.owners = {name: holders(name) for name, _, _ in self.every}
        self._template = _without_memory(model)
        self._shared = ContextRun(self._template, plan.context, _Unheard(groups.cp), Recall()) if groups.cp.size > 1 else None
        self._drop(optimizer)
        sendable = backend_traits(dist.get_backend(process_group(groups.pp))).devices
        self._between = plan.device if plan.device in sendable else "cpu"  # gloo sends host memory only
        self._current = -1  # the stage that is running
        self._held: dict[str, torch.Tensor] = {}  # values that cross stages, by name
        self._known: dict[Hashable, _Learned] = {}  # by what samples look like: buffers are of one size, and nothing else may meet them
        self._now = _Learned()
        self.meetings = [(name, joined(plan.mesh, "pp", ranks, groups.ledger)) for name, ranks in self.shared()]

    # -- set-up --

    def _drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters of other ranks' stages are let go."""
        known = {id(p): name for name, p in self.model.named_parameters()}
        keep = {name for name, stages in self.owners.items() if set(stages) & set(self.mine)}
        for module in self.model.modules():
            for key, param in list(module._parameters.items()):
                if param is not None and known[id(param)] not in keep:
                    del module._parameters[key]
                    vars(module)[key] = torch.empty(0, dtype=param.dtype, device=param.device)  # code may ask what type it is
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if known.get(id(p)) in keep or id(p) not in known]

    def shared(self) -> list[tuple[str, tuple[int, ...]]]:
        """Parameters that stages on several ranks use, with those ranks: their gradients must meet."""
        found = []
        for name, stages in self.owners.items():
            ranks = tuple(sorted({self.plan.stage_rank(s) for s in stages}))
            if len(ranks) > 1:
                found.append((name, ranks))
        return found

    def counted(self, name: str) -> bool:
        """Of the ranks that hold a parameter, one counts it in sums over all."""
        return self.plan.stage_rank(self.owners[name][0]) == self.groups.pp.rank

    def attach(self) -> None:
        """Put the doors in. After everything else that hooks into modules, since a stand-in must come before all of it."""
        modules = dict(self.model.named_modules())
        for name in {n for s in self.mine for n in self.plan.stages[s].skips}:
            self._stand_in(modules[name], name)
        for index, stage in enumerate(self.plan.stages):
            if index in self.mine:
                for carry in stage.receives:
                    for sink in carry.sinks:
                        hook = self._injection(index, carry, sink.position)
                        modules[sink.module].register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            if index and index - 1 in self.mine:
                door = lambda _m, args, kwargs, at=index - 1: self._leave(at, (args, kwargs))  # noqa: E731
                modules[stage.entry].register_forward_pre_hook(door, with_kwargs=True, prepend=True)
                for carry in (c for c in stage.receives if not c.at_door):
                    modules[carry.source].register_forward_hook(lambda _m, _a, out, c=carry: self._catch(c, out))

    def _stand_in(self, module: Any, name: str) -> None:
        """A call of the module goes through here first: past its hooks too, if its work is done already."""
        plain = module._compiled_call_impl or module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._current < 0 or name not in self.plan.stages[self._current].skips:
                return plain(*args, **kwargs)
            leaves, spec = self._now.made[name]
            return pytree.tree_unflatten([leaf() if callable(leaf) else leaf for leaf in leaves], spec)

        module._compiled_call_impl = call

    def _leave(self, stage: int, given: Any) -> None:
        if self._current == stage:
            for carry in (c for c in self.plan.stages[stage + 1].receives if c.at_door):
                self._held[carry.name] = _tensors(given)[carry.position]
            raise _LeaveError

    def _catch(self, carry: Carry, output: Any) -> None:
        if self._current >= 0 and carry.source not in self.plan.stages[self._current].skips:
            self._held[carry.name] = _tensors(output)[carry.position]

    def _injection(self, stage: int, carry: Carry, position: int) -> Any:
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._current != stage:
                return None
            return changed((args, kwargs), position, lambda _: self._held[carry.name])

        return before

    # -- the first samples of a size --

    @property
    def counts_samples(self) -> bool:
        """Whether the loss is a (sum, count)."""
        return self._now.counts_samples

    def _look_at(self, piece: Batch, loss_fn: Loss, autocast: Any, *, training: bool) -> _Learned:
        """What is known about samples of this size: learned when they first come. Every rank of the pipeline sees the same ones."""
        key = (training, tuple((tuple(t.shape), t.dtype) for t in _tensors(piece)))
        found = self._known.pop(key, None)
        if found is None:
            found = self._learn(loss_fn, piece, autocast)
            if training:
                found.schedule = self._build(found)
        self._known[key] = found
        if len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        return found

    def _learn(self, loss_fn: Loss, piece: Batch, autocast: Any) -> _Learned:
        """Shapes and types of what crosses, and of what skipped modules give: one forward on fake tensors."""
        found = _Learned()
        wanted = {n for s in self.mine for n in self.plan.stages[s].skips}
        carries = {c.name: c for stage in self.plan.stages for c in stage.receives}
        modules = dict(self._template.named_modules())
        device = self.plan.device

        def note(name: str, output: Any) -> None:
            leaves, spec = pytree.tree_flatten(output)
            found.made[name] = ([_like(leaf, device) if torch.is_tensor(leaf) else leaf for leaf in leaves], spec)

        handles = [modules[n].register_forward_hook(lambda _m, _a, out, n=n: note(n, out)) for n in wanted]

        def take(carry: Carry, tree: Any) -> None:
            found.crossing[carry.name] = self._held_of(carry, _shape(_tensors(tree)[carry.position]))

        for carry in carries.values():
            source = modules[carry.source]
            if carry.at_door:
                handles.append(source.register_forward_pre_hook(lambda _m, a, k, c=carry: take(c, (a, k)), with_kwargs=True))
            else:
                handles.append(source.register_forward_hook(lambda _m, _a, out, c=carry: take(c, out)))
        for copied, module in zip(self._template.modules(), self.model.modules(), strict=True):
            copied.training = module.training
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, on_fakes(self._template, self.plan.memory.precision, device), quiet(), unpacked(), autocast():
            fakes = pytree.tree_map(lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device) if torch.is_tensor(t) else t, piece)
            value = (self._shared.around(loss_fn) if self._shared is not None else loss_fn)(self._template, fakes)
            found.counts_samples = isinstance(value, tuple)
            found.loss = _shape(value[0] if isinstance(value, tuple) else value)
        for handle in handles:
            handle.remove()
        return found

    def _held_of(self, carry: Carry, whole: _Shape) -> _Shape:
        """What this rank has of a value that the model's code would make whole."""
        if not carry.strand:
            return whole
        held, every = self.plan.pieces[self.plan.mesh.coordinate(self.groups.rank, "tp")][carry.strand]
        return replace(whole, shape=tuple(n // every * held if d == carry.dim else n for d, n in enumerate(whole.shape)))

    def _build(self, known: _Learned) -> _PipelineSchedule:
        stages = []
        device = torch.device("cuda", torch.cuda.current_device()) if self._between == "cuda" else torch.device("cpu")
        for index in self.mine:
            takes = tuple(_meta(known.crossing[c.name]) for c in self.plan.stages[index].receives)
            last = index == len(self.plan.stages) - 1
            gives = (_meta(known.loss),) if last else tuple(_meta(known.crossing[c.name]) for c in self.plan.stages[index + 1].receives)
            part = _StageModule(self, index)
            stages.append(_CountedStage(part, index, len(self.plan.stages), device, takes, gives, process_group(self.groups.pp), self.groups.ledger))
        kind = _SCHEDULES[self.plan.schedule]
        several = schedule_traits(self.plan.schedule).stages_per_rank > 1
        made: _PipelineSchedule = kind(stages if several else stages[0], self.plan.micro_batches, loss_fn=lambda out, _: out, scale_grads=False)
        return made

    # -- running --

    def run(self, pieces: list[Batch], run_stage: Any, loss_fn: Loss, autocast: Any) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches; the losses, on the rank of the last stage. `run_stage(piece, index)` computes a loss."""
        self._now = self._look_at(pieces[0], loss_fn, autocast, training=True)
        self._run_stage = run_stage
        schedule: Any = self._now.schedule
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        losses: list[torch.Tensor] = []
        count = len(pieces)
        kwargs = [{"index": torch.tensor(i)} for i in range(count)]  # torch 2.11 takes everything that it hands on for a tensor
        try:
            schedule._step_microbatches([()] * count, kwargs, [None] * count, losses, False)
        except RuntimeError as error:
            if self.plan.splits_backward and any(words in str(error) for words in _UNSPLIT):
                reason = f"schedule={self.plan.schedule} cuts backward in two, which torch cannot do with this model: use interleaved"
                raise RequestError(reason) from error
            raise
        return losses

    def evaluate(self, batch: Batch, run_stage: Any, loss_fn: Loss, autocast: Any) -> Any:
        """One batch forward through all stages, one after the other; the loss on the rank of the last."""
        self._now = self._look_at(batch, loss_fn, autocast, training=False)
        self._run_stage = run_stage
        out: Any = None
        passed: tuple[torch.Tensor, ...] = ()
        for index, stage in enumerate(self.plan.stages):
            if index not in self.mine:
                continue
            if index and self.plan.stage_rank(index - 1) != self.groups.pp.rank:
                shapes = [self._now.crossing[c.name] for c in stage.receives]
                passed = tuple(torch.empty(s.shape, dtype=s.dtype, device=self._between) for s in shapes)
                for tensor in passed:
                    dist.recv(tensor, group=process_group(self.groups.pp), group_src=self.plan.stage_rank(index - 1))
            out = self.forward(index, passed, 0)
            if index + 1 < len(self.plan.stages):
                passed = out
                if self.plan.stage_rank(index + 1) != self.groups.pp.rank:
                    for tensor in out:
                        dist.send(tensor.contiguous(), group=process_group(self.groups.pp), group_dst=self.plan.stage_rank(index + 1))
        return out if len(self.plan.stages) - 1 in self.mine else None

    def forward(self, stage: int, received: tuple[torch.Tensor, ...], index: int) -> Any:
        """One micro-batch through one stage: the loss from the last, what crosses from the others."""
        self._held = {c.name: t.to(self.plan.device) for c, t in zip(self.plan.stages[stage].receives, received, strict=True)}
        self._current = stage
        if self.plan.splits_backward and stage and torch.is_grad_enabled() and not any(t.requires_grad for t in received):
            raise RequestError(f"schedule={self.plan.schedule} cuts backward in two, and stage {stage} passes no gradient on: use interleaved")
        try:
            return self._run_stage(index)
        except _LeaveError:
            out = tuple(self._sent(self._held[c.name]) for c in self.plan.stages[stage + 1].receives)
            return downstream(out, received) if self.plan.splits_backward else out
        finally:
            self._current = -1
            self._held = {}

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where backward is cut in two, torch detaches what a stage gives in place, which a view does not allow."""
        inner = self.plan.splits_backward and tensor._is_view()
        whole = tensor.clone(memory_format=torch.contiguous_format) if inner else tensor.contiguous()
        return whole.to(self._between)

    def stage_parameters(self, stage: int) -> Iterator[nn.Parameter]:
        return (p for name, p in self.model.named_parameters() if stage in self.owners[name])


class _StageModule(nn.Module):
    """What torch's schedules call: the model's forward, from where this stage begins to where it ends."""

    def __init__(self, owner: PipelineCuts, index: int) -> None:
        super().__init__()
        self._owner, self._index = [owner], index  # in a list: the model is not a part of this module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._owner[0].stage_parameters(self._index)

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        return self._owner[0].forward(self._index, received, int(index))


class _CountedStage(pipelining.PipelineStage):
    """torch's stage, with static shapes, whose sends are named and counted."""

    def __init__(
        self, part: nn.Module, index: int, count: int, device: torch.device, takes: tuple[torch.Tensor, ...], gives: tuple[torch.Tensor, ...],
        group: Any, ledger: Ledger,
    ) -> None:  # fmt: skip
        super().__init__(part, index, count, device, input_args=takes, output_args=gives, group=group)
        self._ledger, self._takes = ledger, takes
        self._learned = [t.requires_grad for t in takes], [t.requires_grad for t in gives]

    def _get_init_p2p_neighbors_ops(self) -> Any:
        """torch 2.11 greets a neighbour on its own rank too, which gloo has no connection for."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self._count(ops, f"activations/{self.stage_index}")
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        if bwd_chunk_id in self.bwd_cache and not hasattr(self, "_get_grad_send_meta"):  # torch 2.11 refuses to send what nothing was made of
            pairs = zip(self.bwd_cache[bwd_chunk_id], self._takes, strict=False)  # gradients of keywords come after
            self.bwd_cache[bwd_chunk_id] = tuple(torch.zeros(t.shape, dtype=t.dtype, device=self.device) if g is None else g for g, t in pairs)
        ops = _of_learned(super().get_bwd_send_ops(bwd_chunk_id), self._learned[0])
        self._count(ops, f"gradients/{self.stage_index}")
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        return _of_learned(super().get_bwd_recv_ops(bwd_chunk_id), self._learned[1])

    def _count(self, ops: Any, name: str) -> None:
        for op in ops:
            self._ledger.add(name, "send", 2, op.tensor.numel() * op.tensor.element_size())


def _of_learned(ops: Any, learned: list[bool]) -> Any:
    """torch 2.11 sends a gradient back for everything that was received, for the stage before to throw away; later ones for what is learned."""
    return [op for op, wanted in zip(ops, learned, strict=True) if wanted] if len(ops) == len(learned) else ops


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if torch.is_tensor(t)]


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass
class _Learned:
    """What samples of one size make of the stages."""

    made: dict[str, Any] = field(default_factory=dict)  # module → what its stand-in gives, as (leaves, structure)
    crossing: dict[str, _Shape] = field(default_factory=dict)
    loss: _Shape = _Shape((), torch.float32, True)
    counts_samples: bool = False
    schedule: _PipelineSchedule | None = None  # for training


def _shape(tensor: torch.Tensor) -> _Shape:
    return _Shape(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _meta(known: _Shape) -> torch.Tensor:
    return torch.empty(known.shape, dtype=known.dtype, device="meta").requires_grad_(known.needs_grad)


def _like(tensor: torch.Tensor, device: str) -> Any:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    return lambda: torch.zeros(shape, dtype=dtype, device=device)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of the model's structure whose parameters and buffers have shapes only."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(model, memo)
