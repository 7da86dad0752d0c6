"""Tensor parallelism, acting half: cut a model's parameters along dealt strands, in place, and make its ranks meet where they must.

The model's code stays as it is. A layer whose product sums over a cut strand completes its output over the ranks; a module that is
given a whole activation for a cut part sums that input's gradient in backward; sizes that the code spells out are rewritten on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.core.calls import sized_call
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.tensor import Cut, Dealt, Rewrite, TensorPolicy
from meshwright.execute.defer import enter_beside, enter_without, product_with_ticket, use_ticket
from meshwright.execute.doors import Change, at_door
from meshwright.execute.groups import Groups
from meshwright.execute.meet import Enter, Gather, Sum, gather_pieces
from meshwright.execute.norms import Meeting, norm_over_pieces
from meshwright.execute.recompute import Recall
from meshwright.execute.sequence import EnterAll, Region, Share, SumMine

_Apart = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class _Laid:
    """One cut of one parameter: the strand, where it lies in the dim, and the ranks that share it."""

    strand: Dealt
    cut: Cut
    comm: Comm

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy: where the cut is along the first dim, the piece would lie in the whole tensor and keep all of its memory."""
        first, count = self.strand.piece(self.comm.rank, self.comm.size)
        dim, inner = self.cut.dim, self.cut.inner
        runs = whole.unflatten(dim, (self.cut.outer, self.strand.size * inner))
        return runs.narrow(dim + 1, first * inner, count * inner).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)

    def whole(self, piece: torch.Tensor) -> torch.Tensor:
        comm, dim = self.comm, self.cut.dim
        pieces = gather_pieces(piece, comm, dim, [self.strand.piece(r, comm.size)[1] * self.cut.outer * self.cut.inner for r in range(comm.size)])
        # Each rank's piece holds `outer` runs; the whole tensor has the runs of all ranks side by side.
        runs = [p.unflatten(dim, (self.cut.outer, -1)) for p in pieces]
        return torch.cat(runs, dim + 1).flatten(dim, dim + 1)


@dataclass
class TensorCuts:
    """What was cut, by parameter name: along one dim, or along two of them on a grid of ranks."""

    cuts: dict[str, list[_Laid]] = field(default_factory=dict)

    def local(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole tensor."""
        for laid in self.cuts.get(name, ()):
            whole = laid.piece(whole)
        return whole

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The whole tensor again. Collective over the tensor-parallel ranks."""
        for laid in reversed(self.cuts.get(name, [])):
            piece = laid.whole(piece)
        return piece


def cut_model(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, groups: Groups, recall: Recall) -> TensorCuts:
    """Cut `model` in place; `optimizer` steps the pieces from now on. Collective: every rank calls it with the same plan.

    Units that recompute selectively keep what the ranks made of their meetings in `recall`."""
    if optimizer.state:
        raise RequestError("tensor parallelism cuts the optimizer's state: apply the plan before the optimizer's first step")
    found = TensorCuts()
    for axis, policy in plan.tensors:
        for strand in policy.strands:
            for cut in strand.cuts:
                found.cuts.setdefault(cut.parameter, []).append(_Laid(strand, cut, groups.of(axis)))
    share_randomness(groups.tp, plan.device)
    replace_tensors(model, optimizer, found.cuts, found.local)
    fed = _fed(model, plan)
    for axis, policy in plan.tensors:
        _arrange(model, policy, groups.of(axis), fed, recall, plan.compile != "none")
    completed = {meet.module for _, policy in plan.tensors for meet in policy.sums}
    for name in fed:
        if name not in completed:
            use_ticket(model.get_submodule(name))
    return found


def _fed(model: nn.Module, plan: Plan) -> list[str]:
    """Layers whose weights' gradients are computed while their input's travels. Not in a pipeline, which has an order of its own for
    the two, not in compiled blocks, which keep them in one graph, and not in fp8, whose products are others."""
    if "inputs" not in plan.sync.overlap or plan.mesh.pp > 1 or plan.compile != "none" or plan.memory.precision == "fp8":
        return []
    pairs = [(meet.module, name) for _, policy in plan.tensors for meet in policy.enters for name in meet.feeds]
    if plan.memory.zero == 3:  # a weight is there while its unit runs, so the input must enter there too
        pairs = [(door, name) for door, name in pairs if _unit_of(door, plan) == _unit_of(name, plan)]
    names = dict.fromkeys(name for _, name in pairs)
    return [name for name in names if model.get_submodule(name).weight.requires_grad]


def _unit_of(module: str, plan: Plan) -> str:
    return max((u for u in plan.memory.units if f"{module}.".startswith(f"{u}.")), key=len, default="")


def _arrange(model: nn.Module, policy: TensorPolicy, comm: Comm, fed: Sequence[str], recall: Recall, compiled: bool) -> None:
    """Make the ranks of one axis meet. If blocks will be `compiled`, meetings are kept out of the graphs: a compiler would make a graph
    for every layer's own name."""
    apart: _Apart = torch.compiler.disable if compiled else lambda function: function
    modules = dict(model.named_modules())
    region = Region(policy, comm)
    region.arrange(modules, policy, apart, recall)
    for meet in policy.enters:
        name, layers = f"enter/{meet.module}", [modules[name] for name in fed if name in meet.feeds]
        share = region.share(meet.along, name) if meet.along else None
        at_door(modules[meet.module], meet.position, _entering(comm, name, layers, share, recall), apart)
    for meet in policy.sums:
        name = f"sum/{meet.module}"
        _complete(modules[meet.module], _summing(comm, name, region.share(meet.along, name) if meet.along else None, recall), apart)
    strands = {s.name: s for s in policy.strands}
    for meet in policy.lookups:
        _look_up(modules[meet.module], strands[meet.strand], comm, f"lookup/{meet.module}", apart, recall)
    for meet in policy.gathers:
        _gather_output(modules[meet.module], strands[meet.strand], comm, f"gather/{meet.module}", apart, recall)
    for name in policy.partial:
        _enter_parameter(modules[name.rpartition(".")[0]], name.rpartition(".")[2], comm, f"enter/{name}")
    rewrite_sizes(modules, policy.rewrites, strands, comm)
    for name, strand in {meet.module: meet.strand for meet in policy.norms}.items():
        norm_over_pieces(modules[name], strands[strand], Meeting(comm, f"norm/{name}", recall), apart)


def share_randomness(comm: Comm, kind: str) -> None:
    """The ranks of one group go on from the first one's random state: dropout on what they all hold must be the same for all."""
    device = torch.device(kind)
    state = torch.get_rng_state().to(device)
    comm.broadcast(state, "start/random").wait()
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        comm.broadcast(state, "start/random").wait()
        torch.cuda.set_rng_state(state.cpu(), device)


# -- parameters --


def replace_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Container[str], local: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Every parameter and buffer among `names` becomes this rank's piece of it, wherever it is registered."""
    known = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in list(held.items()):
                if tensor is None or known.get(id(tensor), "") not in names:
                    continue
                if id(tensor) not in made:
                    piece = local(known[id(tensor)], tensor.detach())
                    made[id(tensor)] = nn.Parameter(piece, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else piece
                held[key] = made[id(tensor)]  # type: ignore[assignment]
    for group in optimizer.param_groups:
        group["params"] = [made.get(id(p), p) for p in group["params"]]


# -- meetings --


def _entering(comm: Comm, name: str, fed: list[nn.Module], share: Share | None, recall: Recall) -> Change:
    """What happens to an activation where it enters a cut part; `fed` are the layers in it that multiply it."""

    def enter(x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            enter_without(fed)
            return x if share is None else share.gathered(x)
        if fed:
            return enter_beside(x, (comm, name) if share is None else share, fed, recall)
        return Enter.apply(x, comm, name) if share is None else EnterAll.apply(x, share, recall)  # type: ignore[no-any-return]

    return enter


def _summing(comm: Comm, name: str, share: Share | None, recall: Recall) -> Change:
    """How partial sums are completed: for every rank, or each position for the rank that has it."""
    if share is None:
        return lambda x: Sum.apply(x, comm, name, recall)  # type: ignore[no-any-return]
    return lambda x: SumMine.apply(x, share, recall)  # type: ignore[no-any-return]


def _complete(layer: nn.Module, completed: Change, apart: _Apart) -> None:
    """A layer that sums over a cut strand: its product is completed over the ranks, and its bias is added once, afterwards."""
    product = _product_of(layer)
    if product is None:
        layer.register_forward_hook(apart(lambda _m, _a, out: completed(out)))
        return

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = completed(product(x))
        bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
        if bias is None:
            return out
        if isinstance(layer, nn.modules.conv._ConvNd):
            bias = bias.view(-1, *[1] * len(layer.kernel_size))
        return out + bias.to(out.dtype)

    layer.forward = apart(forward)


def _product_of(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The layer without its bias; None for a module that only passes partial sums on. One whose product is changed (fp8) carries it."""
    if "product" in vars(layer):
        return layer.product  # type: ignore[return-value]
    if isinstance(layer, nn.Linear):
        return product_with_ticket(layer, lambda x: F.linear(x, layer.weight))
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        plain = layer.forward

        def transposed(x: torch.Tensor) -> torch.Tensor:
            kept, layer._parameters["bias"] = layer._parameters["bias"], None
            try:
                return plain(x)
            finally:
                layer._parameters["bias"] = kept

        return transposed
    if isinstance(layer, nn.modules.conv._ConvNd):
        return lambda x: layer._conv_forward(x, layer.weight, None)  # type: ignore[operator,no-any-return]
    if hasattr(layer, "nf"):  # transformers' Conv1D: a linear layer with its matrix the other way round
        return product_with_ticket(layer, lambda x: x @ layer.weight)  # type: ignore[operator]
    return None


def _look_up(layer: nn.Module, strand: Dealt, comm: Comm, name: str, apart: _Apart, recall: Recall) -> None:
    """A table whose rows are dealt out: each rank looks up the rows it holds and adds nothing for the others."""
    first, count = strand.piece(comm.rank, comm.size)
    padding = getattr(layer, "padding_idx", None)
    padding = padding - first if padding is not None and first <= padding < first + count else None

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        mine = (tokens >= first) & (tokens < first + count)
        rows = F.embedding(torch.where(mine, tokens - first, 0), layer.weight, padding)  # type: ignore[arg-type]
        return Sum.apply(rows * mine.unsqueeze(-1).to(rows.dtype), comm, name, recall)  # type: ignore[no-any-return]

    layer.forward = apart(forward)


def _gather_output(layer: nn.Module, strand: Dealt, comm: Comm, name: str, apart: _Apart, recall: Recall) -> None:
    sizes = [strand.piece(r, comm.size)[1] for r in range(comm.size)]
    layer.register_forward_hook(apart(lambda _m, _a, out: Gather.apply(out, comm, sizes, name, recall)))


def _enter_parameter(module: nn.Module, key: str, comm: Comm, name: str) -> None:
    """A whole parameter inside a cut part: what a module sees of it during its forward sums its gradient over the ranks."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        vars(module)[key] = Enter.apply(module._parameters[key], comm, name)
        try:
            return inner(*args, **kwargs)
        finally:
            del vars(module)[key]

    module.forward = forward


# -- sizes in the model's code --


class _Sizes(TorchFunctionMode):
    """While a module runs, sizes that count a dealt strand count this rank's piece of it. A slice is rewritten on tensors of the length
    that its dim has on this rank alone: code that takes its numbers from a tensor's shape has the right ones already. Modules inside have
    code of their own, which the same numbers may mean something else in: only the innermost of `running` rewrites."""

    def __init__(self, table: Mapping[tuple[str, int, int, int, int], int], running: list[_Sizes | None]) -> None:
        super().__init__()
        self.table, self.running = table, running
        self.functions = {key[0] for key in table}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        call = sized_call(name, args, kwargs) if name in self.functions and self.running[-1] is self else None
        if call is not None:
            lengths = [args[0].shape[d] for d in call.dims] or [0] * len(call.sizes)
            now = [self.table.get((name, len(call.sizes), i, n, lengths[i]), n) for i, n in enumerate(call.sizes)]
            args, kwargs = call.put(now)
        return func(*args, **kwargs)


def rewrite_sizes(modules: Mapping[str, nn.Module], rewrites: Sequence[Rewrite], strands: Mapping[str, Dealt], comm: Comm) -> None:
    """While a module runs, the sizes in its code that count a dealt strand are this rank's."""
    tables: dict[str, dict[tuple[str, int, int, int, int], int]] = {}
    for r in rewrites:
        size, mine = strands[r.strand].size, strands[r.strand].piece(comm.rank, comm.size)[1]
        tables.setdefault(r.module, {})[r.function, r.rank, r.position, r.number, r.length // size * mine] = r.number // size * mine
    running: list[_Sizes | None] = []
    for name, table in tables.items():
        _run_under(modules[name], _Sizes(table, running), running)
    for module in {id(inner): inner for name in tables for inner in _with_code(modules[name])}.values():
        if all(module is not modules[name] for name in tables):
            _run_under(module, None, running)


def _with_code(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside one, but for torch's own layers, whose code spells no sizes out."""
    for inner in module.modules():
        if inner is not module and (next(inner.children(), None) is not None or not type(inner).__module__.startswith("torch.nn.")):
            yield inner


def _run_under(module: nn.Module, mode: _Sizes | None, running: list[_Sizes | None]) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        running.append(mode)
        try:
            with mode if mode is not None else nullcontext():
                return inner(*args, **kwargs)
        finally:
            running.pop()

    module.forward = forward
