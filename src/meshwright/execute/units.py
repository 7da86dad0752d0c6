"""Memory Manager, acting half: ZeRO-3. Parameters lie in flat buffers, one or a few a unit, of which a rank keeps its slice.

[Note: a unit's life]
Before a unit computes, its buffers are gathered and its parameters are views of them; afterwards the memory goes back. The same happens
around its backward, where gradients are copied into a flat buffer as they arrive. With the last of them the buffer is reduce-scattered,
and what arrives is the gradient of the rank's slice, which is what the optimizer steps. The next unit's buffers travel while this one
computes. Nothing is copied into what is sent or out of what arrives, and the optimizer sees a few flat tensors: what FSDP2's parameters,
which are cut one by one, cost. Between uses a parameter has its shape and no values: reading it gives NaN, and writing it is an error.

[Note: several buffers in a unit]
A buffer holds what is of one type, trained or not, and of one kind (`schedule.buckets.Kind`). A parameter that pipeline stages share has
one of its own, so that all of them cut it alike. Optimizer groups share a buffer: each gets its part of the slice, which may be empty.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm, Pending
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.workload import LOW
from meshwright.execute.groups import Groups
from meshwright.execute.memory import DTYPES, storage_bytes
from meshwright.execute.slices import Slices, slices_of
from meshwright.execute.sync import Piece, check_sliceable
from meshwright.schedule.buckets import Bucket, Kind, unit_buckets


@dataclass
class Flat:
    """One buffer of a unit."""

    layout: Bucket
    params: tuple[nn.Parameter, ...]
    slices: Slices
    own: torch.Tensor  # this rank's slice, in the type of storage
    values: torch.Tensor  # all ranks' slices, in the type of the arithmetic; without memory unless gathered
    views: tuple[torch.Tensor, ...]
    absent: tuple[torch.Tensor, ...]  # what parameters show while the values are away
    gaps: tuple[slice, ...]  # between parameters
    pieces: tuple[Piece, ...] = ()  # of `own`, by optimizer group: what is stepped; none of what is not trained
    grads: torch.Tensor | None = None
    waiting: set[int] = field(default_factory=set)  # slots whose gradient has not arrived in this backward
    sent: bool = False  # in this backward
    coming: Pending | None = None  # values on their way


@dataclass
class Unit:
    """A module whose parameters are gathered as one; the rest of the model is one too."""

    name: str
    flats: tuple[Flat, ...]
    owned: bool
    here: bool = False  # parameters show their values
    opened: bool = False  # its backward has begun
    done: int = -1  # torch's number of the last backward in which all its gradients have arrived
    before: Unit | None = None
    after: Unit | None = None

    @property
    def frozen(self) -> bool:
        """Whether backward may need values after the last gradient has arrived."""
        return any(not flat.pieces for flat in self.flats)


class UnitShards:
    """Attached to a model by hooks, like `GradientBuckets`, and used like it."""

    zero = 3

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, groups: Groups, kinds: Mapping[int, Kind], shared: Collection[str]
    ) -> None:  # fmt: skip
        check_sliceable(optimizer, self.zero)
        self.groups, self.overlap = groups, plan.sync.overlap
        self._states = plan.balance.states
        self.reduce = "mean"  # a user's own loop averages over ranks; Session weights the loss itself and sums
        self._low = DTYPES[LOW[plan.memory.precision]] if plan.memory.precision in LOW else None
        self._ahead = "gathers" in self.overlap and groups.pp.size == 1
        self._backward = -1  # torch's number of the backward that runs
        self._travelling: deque[tuple[Unit, Flat, torch.Tensor, torch.Tensor, Pending]] = deque()
        self._home: dict[int, tuple[Unit, Flat, int]] = {}
        self.units: list[Unit] = []
        self._build(model, optimizer, plan, kinds, shared)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.buckets = [flat for flat in self.flats if flat.pieces]
        model.register_state_dict_pre_hook(_refuse)
        optimizer.register_step_pre_hook(lambda *_: self.finish())
        optimizer.register_step_post_hook(lambda *_: self._forget())

    # -- set-up --

    def _build(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, kinds: Mapping[int, Kind], shared: Collection[str]) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        owned = _owned_units(model, plan) if self.groups.ep.size > 1 else []
        units = _stage_units(model, plan, self.groups) if self.groups.pp.size > 1 else [*plan.memory.units, ""]
        left = {id(p) for p in model.parameters() if p.numel()}
        for name in dict.fromkeys([*owned, *units]):
            module = model.get_submodule(name)
            params = [p for p in module.parameters() if id(p) in left]
            left -= {id(p) for p in params}
            if params:
                tie = {id(p): names[id(p)] for p in params if names[id(p)] in shared}
                unit = Unit(name or "root", self._flats(params, group_of, kinds, tie), name in owned)
                self._add(unit, module)
        chain = [unit for unit in self.units if not unit.owned and unit.name != "root"] if self._ahead else []
        for unit, following in itertools.pairwise(chain):
            unit.after, following.before = following, unit
        root = next((unit for unit in self.units if unit.name == "root"), None)
        if root is not None and chain:
            root.after, root.before = chain[0], chain[-1]
        for index, group in enumerate(optimizer.param_groups):
            mine = [piece for unit in self.units for flat in unit.flats for piece in flat.pieces]
            group["params"] = [piece.param for piece in mine if piece.group == index] + [p for p in group["params"] if id(p) not in self._home]

    def _flats(self, params: list[nn.Parameter], group_of: dict[int, int], kinds: Mapping[int, Kind], tie: dict[int, str]) -> tuple[Flat, ...]:
        params = sorted(params, key=lambda p: group_of.get(id(p), -1))
        layouts = unit_buckets(
            [p.numel() for p in params],
            [self._type(p).itemsize for p in params],
            [(str(p.dtype), p.requires_grad, tie.get(id(p), ""), kinds.get(id(p), Kind())) for p in params],
            self.groups.shard.size,
        )
        return tuple(self._flat(layout, tuple(params[s.index] for s in layout.slots), group_of) for layout in layouts)

    def _flat(self, layout: Bucket, params: tuple[nn.Parameter, ...], group_of: dict[int, int]) -> Flat:
        """Move parameters into a buffer, keep a slice of it, and let the rest go."""
        first = params[0]
        whole = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        for slot, param in zip(layout.slots, params, strict=True):
            whole[slot.offset : slot.offset + slot.numel].view_as(param).copy_(param.data)
        slices = slices_of(layout, self.groups.shard, self._states)
        own = slices.own(whole).clone()
        values = torch.empty(layout.numel, dtype=self._type(first), device=first.device)
        views = tuple(values[s.offset : s.offset + s.numel].view_as(p) for s, p in zip(layout.slots, params, strict=True))
        nothing = torch.full((), float("nan"), device=first.device).to(values.dtype)
        ends = [*(s.offset for s in layout.slots[1:]), layout.numel]
        gaps = tuple(slice(s.offset + s.numel, end) for s, end in zip(layout.slots, ends, strict=True) if s.offset + s.numel < end)
        flat = Flat(layout, params, slices, own, values, views, tuple(nothing.expand(p.shape) for p in params), gaps)
        if first.requires_grad:
            flat.pieces = tuple(_pieces(flat, [group_of.get(id(p), -1) for p in params]))
            flat.waiting = set(range(len(params)))
        _empty(flat)
        return flat

    def _type(self, param: torch.Tensor) -> torch.dtype:
        """Of the gathered parameter."""
        return self._low if self._low is not None and param.is_floating_point() else param.dtype

    def _add(self, unit: Unit, module: nn.Module) -> None:
        """Hooks run outside of compiled graphs."""
        self.units.append(unit)
        for flat in unit.flats:
            for at, param in enumerate(flat.params):
                self._home[id(param)] = (unit, flat, at)
                if flat.pieces:
                    param.register_post_accumulate_grad_hook(self._arrived)
        enter = torch.compiler.disable(lambda _, args, kwargs: self._enter(unit, args, kwargs))
        leave = torch.compiler.disable(lambda _m, _a, output: self._leave(unit, output))
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)

    # -- values come and go --

    def _fetch(self, unit: Unit) -> None:
        """Have the values sent; nothing if they are here, or on their way."""
        for flat in unit.flats if not unit.here else ():
            if flat.coming is None:
                flat.values.untyped_storage().resize_(flat.values.nbytes)
                own = flat.own.to(flat.values.dtype)
                flat.coming = self.groups.shard.all_gather(flat.values, own, f"params/{unit.name}", flat.slices.uneven)

    def _bring(self, unit: Unit) -> None:
        if unit.here:
            return
        self._fetch(unit)
        for flat in unit.flats:
            assert flat.coming is not None
            flat.coming.wait()
            flat.coming = None
            for param, view in zip(flat.params, flat.views, strict=True):
                param.data = view
        unit.here = True

    def _release(self, unit: Unit) -> None:
        for flat in unit.flats if unit.here else ():
            _empty(flat)
        unit.here = False

    def _forget(self) -> None:
        """After the optimizer's step: values that were fetched ahead and not used are old."""
        for unit in self.units:
            if any(flat.coming is not None for flat in unit.flats):
                self._bring(unit)
            self._release(unit)

    # -- around a unit --

    def _enter(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        self._bring(unit)
        if unit.after is not None and not _in_backward():
            self._fetch(unit.after)
        if self._low is not None:
            args, kwargs = pytree.tree_map(self._lowered, (args, kwargs))
        if unit.frozen and torch.is_grad_enabled():
            args, kwargs = self._through_door(unit, args, kwargs)
        return args, kwargs

    def _lowered(self, value: Any) -> Any:
        return value.to(self._low) if torch.is_tensor(value) and value.is_floating_point() else value

    def _leave(self, unit: Unit, output: Any) -> None:
        wanted = [t for t in pytree.tree_leaves(output) if torch.is_tensor(t) and t.requires_grad] if torch.is_grad_enabled() else []
        if _in_backward():  # computed again: its own backward is next
            self._open(unit)
            return
        for tensor in wanted:
            tensor.register_hook(lambda _: self._open(unit))
        self._release(unit)

    def _through_door(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """Backward has left the unit when it has all gradients of its inputs: by then parameters that are not trained are no longer needed."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
        if at:
            for i, passed in zip(at, _Door.apply(lambda: self._release(unit), *(leaves[i] for i in at)), strict=True):
                leaves[i] = passed
        return pytree.tree_unflatten(leaves, spec)

    def _open(self, unit: Unit) -> None:
        """Before a unit's backward."""
        self._begin()
        if unit.done == self._backward:
            return  # by the way of an output that was handed through
        unit.opened = True
        self._bring(unit)
        if unit.before is not None and not unit.before.opened and unit.before.done != self._backward:
            self._fetch(unit.before)

    def _begin(self) -> None:
        if self._backward != (now := torch._C._current_graph_task_id()):
            self._backward = now
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _arrived(self, param: torch.Tensor) -> None:
        unit, flat, at = self._home[id(param)]
        assert param.grad is not None
        self._begin()
        unit.opened = True
        self._gradient(flat, at).copy_(param.grad)
        param.grad = None
        flat.waiting.discard(at)
        if not flat.waiting:
            self._launch(unit, flat)
            if not unit.frozen and all(f.sent for f in unit.flats):
                self._close(unit)

    def _gradient(self, flat: Flat, at: int) -> torch.Tensor:
        if flat.grads is None:
            flat.grads = torch.empty(flat.layout.numel, dtype=flat.own.dtype, device=flat.own.device)
            for gap in flat.gaps:
                flat.grads[gap].zero_()
        slot = flat.layout.slots[at]
        return flat.grads[slot.offset : slot.offset + slot.numel].view_as(flat.params[at])

    def _close(self, unit: Unit) -> None:
        self._release(unit)
        unit.opened, unit.done = False, self._backward
        for flat in unit.flats:
            flat.sent, flat.waiting = False, set(range(len(flat.params)))

    # -- gradients --

    def _replicas(self, unit: Unit) -> Comm:
        return self.groups.owned if unit.owned else self.groups.replica

    def _launch(self, unit: Unit, flat: Flat) -> None:
        """Send a full buffer. At most one travels beside what follows: its memory is wanted."""
        grads, flat.grads = flat.grads, None
        assert grads is not None
        flat.sent = True
        mine = torch.empty_like(flat.own)
        work = self.groups.shard.reduce_scatter(mine, grads, f"grads/{unit.name}", self.reduce, flat.slices.uneven)
        self._travelling.append((unit, flat, mine, grads, work))
        self._settle(1 if "scatters" in self.overlap else 0)

    def _settle(self, still: int) -> None:
        """Take in what was sent, but for the last few."""
        while len(self._travelling) > still:
            unit, flat, mine, _, work = self._travelling.popleft()
            work.wait()
            if self._replicas(unit).size > 1:
                self._replicas(unit).at_once.all_reduce(mine, f"replicas/{unit.name}", self.reduce).wait()
            if unit.owned and self.reduce == "mean":
                mine.mul_(1.0 / self.groups.ep.size)  # an owner has the sum over what all ranks along `ep` sent it
            for piece in flat.pieces:
                new = mine[piece.start : piece.start + piece.param.numel()]
                piece.param.grad = new if piece.param.grad is None else piece.param.grad.add_(new)

    def _end(self) -> None:
        """The end of a backward: what it did not reach counts as zero."""
        for unit in self.units:
            for flat in unit.flats if unit.opened else ():
                if flat.pieces and not flat.sent:
                    for at in flat.waiting:
                        self._gradient(flat, at).zero_()
                    self._launch(unit, flat)
            self._close(unit)
        self._settle(0)

    def finish(self) -> None:
        """Gradients are final when a backward ends; nothing is left to do."""

    def accumulate(self) -> AbstractContextManager[None]:
        """There is no place to add whole gradients up in: every backward sends its own."""
        return nullcontext()

    def clear(self) -> None:
        for flat in self.buckets:
            for piece in flat.pieces:
                piece.param.grad = None

    # -- what it holds --

    def shared_gradient(self, param: nn.Parameter) -> torch.Tensor:
        """This rank's part of the gradient of a parameter that has a buffer of its own."""
        (piece,) = self._home[id(param)][1].pieces
        if piece.param.grad is None:
            piece.param.grad = torch.zeros_like(piece.param)
        return piece.param.grad

    def whole(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's values in the type of storage, on the CPU, in the model's order. Collective."""
        found: dict[int, torch.Tensor] = {}
        for name, param in model.named_parameters():
            if id(param) not in found:
                found |= self._gathered(param)
            yield name, found.pop(id(param))

    def _gathered(self, param: nn.Parameter) -> dict[int, torch.Tensor]:
        """What lies in one buffer with a parameter."""
        if id(param) not in self._home:
            return {id(param): param.detach().cpu()}
        unit, flat, _ = self._home[id(param)]
        whole = flat.own.new_empty(flat.layout.numel)
        self.groups.shard.at_once.all_gather(whole, flat.own, f"state/{unit.name}", flat.slices.uneven).wait()
        slots = zip(flat.layout.slots, flat.params, strict=True)
        return {id(p): whole[s.offset : s.offset + s.numel].view(p.shape).cpu() for s, p in slots}

    def parameter_bytes(self, model: nn.Module) -> int:
        return sum(flat.own.nbytes for flat in self.flats) + storage_bytes([p for p in model.parameters() if id(p) not in self._home])

    def gradient_bytes(self) -> int:
        return sum(piece.param.grad.nbytes for flat in self.buckets for piece in flat.pieces if piece.param.grad is not None)


class _Door(torch.autograd.Function):
    """Tensors go in as they are; when their gradients have come out, backward has left."""

    @staticmethod
    def forward(ctx: Any, left: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.left = left
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.left()
        return None, *grads


def _refuse(*_: Any) -> None:
    raise RequestError(
        "zero=3: between uses parameters have no values, and state_dict would hold none: "
        "on all ranks, dict(meshwright.execute.state.whole_state(applied)) has them whole"
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters have shapes and no values."""
    return any(p.untyped_storage().nbytes() < p.nbytes for p in model.parameters())


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() >= 0)


def _empty(flat: Flat) -> None:
    """Give the memory of the gathered values back."""
    for param, absent in zip(flat.params, flat.absent, strict=True):
        param.data = absent
    flat.values.untyped_storage().resize_(0)


def _pieces(flat: Flat, groups: list[int]) -> Iterator[Piece]:
    """This rank's slice, cut where the optimizer's group changes."""
    start, size = flat.slices.start, flat.slices.size
    firsts = [i for i, group in enumerate(groups) if not i or group != groups[i - 1]]
    for first, last in zip(firsts, [*firsts[1:], len(groups)], strict=True):
        begin = flat.layout.slots[first].offset if first else 0
        end = flat.layout.slots[last].offset if last < len(groups) else flat.layout.numel
        low, high = (min(max(x - start, 0), size) for x in (begin, end))
        yield Piece(nn.Parameter(flat.own[low:high]), low, groups[first], range(first, last))


def _owned_units(model: nn.Module, plan: Plan) -> list[str]:
    """Mixtures of which this rank holds experts: units of their own, since the ranks that hold the same are others than for the rest."""
    found = {m.module: [n for n, _ in model.get_submodule(m.module).named_parameters()] for m in plan.owners.mixtures}
    for module, names in found.items():
        for name in (n for n in names if f"{module}.{n}" not in plan.owners.parameters):
            raise RequestError(f"zero=3 with ep: {module} has experts and, in {name}, a parameter that every rank holds: use zero=1 or zero=2")
    return [module for module, names in found.items() if names]


def _stage_units(model: nn.Module, plan: Plan, groups: Groups) -> list[str]:
    """A pipeline's stage leaves the model's forward half way, so there the model itself is no unit, and every layer of the stage is one."""
    modules = dict(model.named_modules())
    mine = {n for i, stage in enumerate(plan.stages) if plan.stage_rank(i) == groups.pp.rank for n in stage.layers if n in modules}
    return sorted(mine, key=lambda n: (-n.count("."), n))  # inner ones first
