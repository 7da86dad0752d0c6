"""How each operation propagates the logical dims of its operands: one small rule for each family of operations that reach a kernel.

A rule gets the dims of the inputs, states which logical dims are contracted or must be unsharded, and returns the dims of each output. An operation
without a rule requires everything unsharded: nothing is assumed to propagate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.core.dataflow import SlidingWindow
from meshwright.describe.dim_unification import Dim, DimMismatchError, LogicalDim, dim_size, new_dim, reshape_dims, split_evenly, unify
from meshwright.describe.sliding_windows import avg_pool_window, conv_window, pool_window, upsample_window

TensorDims = list[list[LogicalDim]]


class RuleContext:
    """One operation under a rule: the dims of its operands, and what the rule states about them."""

    def __init__(self, dims_of: Callable[[torch.Tensor], TensorDims], arguments: dict[str, Any]) -> None:
        self.dims, self.arguments = dims_of, arguments  # arguments by their names in torch's schema
        self.contracted_dims: list[LogicalDim] = []
        self.unsharded_dims: list[LogicalDim] = []
        self.window: SlidingWindow | None = None

    def require_unsharded(self, dims: Sequence[Dim]) -> None:
        self.unsharded_dims += [s for dim in dims for s in dim]

    def broadcast(self, operands: Sequence[tuple[TensorDims, Sequence[int]]]) -> TensorDims:
        """Broadcasting: dims are aligned from the right; those longer than one are unified."""
        rank = max(len(shape) for _, shape in operands)
        out: TensorDims = [[] for _ in range(rank)]
        for dims, _ in operands:
            for back in range(1, len(dims) + 1):
                if dim_size(dims[-back]) == 1:
                    continue
                if dim_size(out[-back]) > 1:
                    unify(out[-back], dims[-back])
                else:
                    out[-back] = list(dims[-back])
        return out


Rule = Callable[[RuleContext, Any, Any, Sequence[torch.Tensor]], list[TensorDims]]
RULES: dict[str, Rule] = {}


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return register


def find_rule(func: Any) -> Rule:
    """The rule for an operation: by name, or because torch tags it as pointwise."""
    found = RULES.get(func._overloadpacket.__name__)
    if found is not None:
        return found
    return elementwise if torch.Tag.pointwise in func.tags else unknown_rule


def unknown_rule(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    for tensor in _tensors((args, kwargs)):
        context.require_unsharded(context.dims(tensor))
    return [[new_dim(n) for n in out.shape] for out in outs]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if torch.is_tensor(t)]


def _normalize_dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


# -- element-wise --


@register_rule(
    "clone",
    "_to_copy",
    "detach",
    "alias",
    "lift_fresh",
    "lift_fresh_copy",
    "contiguous",
    "copy_",
    "copy",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "bernoulli",
    "bernoulli_",
    "native_dropout",
    "where",
    "masked_fill",
    "masked_fill_",
    "fill_",
    "zero_",
    "fill",
    "dropout",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "uniform_",
    "normal_",
    "exponential_",
    # activations that torch (2.11 more of them than 2.13) does not tag as pointwise
    "leaky_relu",
    "leaky_relu_",
    "gelu_",
    "elu_",
    "celu_",
    "selu_",
    "mish_",
    "hardtanh_",
    "hardswish",
    "hardswish_",
    "hardsigmoid_",
    "threshold_",
    "_prelu_kernel",
)
def elementwise(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    given = [t for t in _tensors((args, kwargs)) if t.dim() <= max((o.dim() for o in outs), default=0)]
    joined = context.broadcast([(context.dims(t), t.shape) for t in given]) if given else []
    return [_same_or_new_dims(joined, out) for out in outs]


def _same_or_new_dims(dims: TensorDims, out: torch.Tensor) -> TensorDims:
    if len(dims) == out.dim() and all(dim_size(d) == n for d, n in zip(dims, out.shape, strict=True)):
        return dims
    return [new_dim(n) for n in out.shape]


# -- matmuls --


def _matmul_dims(context: RuleContext, a: torch.Tensor, b: torch.Tensor) -> TensorDims:
    """(…, m, k) × (…, k, n): k is contracted, leading dims are shared."""
    left, right = context.dims(a), context.dims(b)
    if b.dim() == 1:
        right = [right[0], []]
    unify(left[-1], right[-2])
    context.contracted_dims += left[-1]
    lead = context.broadcast([(left[:-2], a.shape[:-2]), (right[:-2], b.shape[:-2])]) if a.dim() > 2 else []
    out = [*lead, left[-2], right[-1]]
    return out[:-1] if b.dim() == 1 else out


@register_rule("mm", "bmm", "mv")
def _mm(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    return [_matmul_dims(context, args[0], args[1])]


@register_rule("addmm", "baddbmm", "addmv")
def _addmm(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    out = _matmul_dims(context, args[1], args[2])
    return [context.broadcast([(out, outs[0].shape), (context.dims(args[0]), args[0].shape)])]


@register_rule("linear")
def _linear(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    x, weight = context.dims(args[0]), context.dims(args[1])
    unify(x[-1], weight[1])
    context.contracted_dims += x[-1]
    out = [*x[:-1], weight[0]]
    bias = args[2] if len(args) > 2 else None
    return [context.broadcast([(out, outs[0].shape), (context.dims(bias), bias.shape)])] if bias is not None else [out]


@register_rule("convolution")
def _convolution(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    x, weight, bias, transposed, groups = args[0], args[1], args[2], args[6], args[8]
    given, kernel = context.dims(x), context.dims(weight)
    context.require_unsharded(given[2:])
    context.require_unsharded(kernel[2:])
    into, out = (kernel[0], kernel[1]) if transposed else (kernel[1], kernel[0])
    if groups == 1:
        unify(given[1], into)
        context.contracted_dims += given[1]
    elif groups == x.shape[1] == outs[0].shape[1]:
        unify(given[1], kernel[0])  # depthwise
        out = kernel[0]
    else:
        context.require_unsharded([given[1], into, out])
        out = new_dim(outs[0].shape[1])
    if bias is not None:
        unify(out, context.dims(bias)[0])
    context.window = conv_window(tuple(weight.shape[2:]), args)
    return [[given[0], out, *(new_dim(n) for n in outs[0].shape[2:])]]


def attention_rule(
    context: RuleContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor
) -> list[TensorDims]:
    """Batch and heads propagate; positions and head width must be unsharded. Keys may have fewer heads, each for a group of query heads."""
    query, key, value = (context.dims(t) for t in (q, k, v))
    for lead in range(q.dim() - 2):
        few, many = dim_size(key[lead]), dim_size(query[lead])
        if few == many:
            unify(query[lead], key[lead])
        elif few > 1:
            unify(reshape_dims([query[lead]], (few, many // few))[0], key[lead])
        unify(key[lead], value[lead])
    unify(query[-1], key[-1])
    context.require_unsharded([query[-1], query[-2], key[-2], value[-1], value[-2]])
    if mask is not None:
        dims = context.dims(mask)
        context.require_unsharded(dims[-2:])
        context.broadcast([(dims[:-2], mask.shape[:-2]), (query[:-2], q.shape[:-2])])
    return [[*query[:-1], value[-1]]]


# -- operations that need a dim unsharded --


def _reduce_over(context: RuleContext, x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> TensorDims:
    given = context.dims(x)
    gone = {_normalize_dim(d, x.dim()) for d in dims}
    context.require_unsharded([given[d] for d in gone])
    return [([] if d in gone else given[d]) for d in range(x.dim()) if keepdim or d not in gone]


def _dims_argument(context: RuleContext, key: str, rank: int, default: list[int]) -> list[int]:
    """The dims that an argument names; `default` where it names none."""
    found = context.arguments.get(key)
    if found is None or found == []:
        return default
    return [_normalize_dim(d, rank) for d in ([found] if isinstance(found, int) else found)]


@register_rule("sum", "mean", "amax", "amin", "logsumexp", "any", "all", "prod", "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean",
      "argmax", "argmin", "max", "min")  # fmt: skip
def _reduction(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    x = args[0]
    if len(_tensors((args, kwargs))) > 1:
        return unknown_rule(context, args, kwargs, outs)
    dims = _dims_argument(context, "dim", x.dim(), list(range(x.dim())))
    return [_reduce_over(context, x, dims, bool(context.arguments.get("keepdim", False)))] * len(outs)


def _mix_dims(context: RuleContext, x: torch.Tensor, mixed_dims: Sequence[int], outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    """`mixed_dims` must be unsharded and may change their length; the others propagate."""
    given = context.dims(x)
    context.require_unsharded([given[d] for d in mixed_dims])
    return [[(new_dim(out.shape[d]) if d in mixed_dims else given[d]) for d in range(x.dim())] for out in outs]


@register_rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod", "sort", "topk")
def _softmax_like(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    """Operations along one dim, the last by default."""
    return _mix_dims(context, args[0], _dims_argument(context, "dim", args[0].dim(), [args[0].dim() - 1]), outs)


@register_rule("flip", "roll")
def _flip_or_roll(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    return _mix_dims(context, args[0], _dims_argument(context, "dims", args[0].dim(), list(range(args[0].dim()))), outs)


@register_rule("triu", "tril")
def _triu_tril(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    return _mix_dims(context, args[0], [args[0].dim() - 2, args[0].dim() - 1], outs)


@register_rule("constant_pad_nd")
def _pad(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    """Two numbers per dim, the last dim's first; a shift that keeps the length moves elements too."""
    rank, pad = args[0].dim(), args[1]
    return _mix_dims(context, args[0], [rank - 1 - i // 2 for i, n in enumerate(pad) if n], outs)


@register_rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    x, last = args[0], len(args[1])
    given = context.dims(x)
    context.require_unsharded(given[-last:])
    for affine in (a for a in args[2:4] if torch.is_tensor(a)):
        for mine, its in zip(given[-last:], context.dims(affine), strict=True):
            unify(mine, its)
    rest = [*given[:-last], *([] for _ in range(last))]
    return [given, *([rest] * (len(outs) - 1))]


@register_rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "batch_norm",
      "_native_batch_norm_legit_functional", "_batch_norm_no_update", "_batch_norm_with_update")  # fmt: skip
def _batch_norm(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    given = context.dims(args[0])
    context.require_unsharded([given[0], *given[2:]])
    for kept in (t for t in args[1:5] if torch.is_tensor(t) and t.dim() == 1):
        unify(given[1], context.dims(kept)[0])
    return [given, *([given[1]] if out.dim() == 1 and out.shape[0] == args[0].shape[1] else [new_dim(n) for n in out.shape] for out in outs[1:])]


@register_rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d")
def _max_pool(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    context.window = pool_window(context.arguments, "max", args[0].dim() - 2)
    return _pool(context, args, kwargs, outs)


@register_rule("avg_pool2d", "avg_pool3d")
def _avg_pool(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    context.window = avg_pool_window(context.arguments, args[0].dim() - 2)
    return _pool(context, args, kwargs, outs)


@register_rule("upsample_nearest2d", "upsample_nearest3d")
def _upsample_nearest(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    context.window = upsample_window(context.arguments, args[0].dim() - 2)
    return _pool(context, args, kwargs, outs)


@register_rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_bilinear2d", "upsample_bicubic2d", "adaptive_max_pool2d")
def _pool(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    given = context.dims(args[0])
    context.require_unsharded(given[2:])
    return [[*given[:2], *(new_dim(n) for n in out.shape[2:])] for out in outs]


# -- losses --


@register_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    """Class scores and targets: (N, C, …) and (N, …). If reduced, both must be unsharded."""
    scores, targets = context.dims(args[0]), context.dims(args[1])
    places = [d for d in range(len(scores)) if d != (1 if len(scores) > 1 else 0)]
    for place, target in zip(places, targets, strict=True):
        unify(scores[place], target)
    context.require_unsharded(scores if context.arguments.get("reduction") else [scores[1 if len(scores) > 1 else 0]])
    return [targets if out.dim() else [] for out in outs]


@register_rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss")
def _elementwise_loss(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    """Element-wise; if reduced, everything must be unsharded."""
    joined = context.broadcast([(context.dims(t), t.shape) for t in _tensors((args, kwargs))])
    if outs[0].dim():
        return [joined]
    context.require_unsharded(joined)
    return [[]]


# -- views --


@register_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "squeeze", "unsqueeze", "squeeze_", "unsqueeze_")
def _view(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    return [reshape_dims(context.dims(args[0]), outs[0].shape)]


@register_rule("permute", "t", "transpose", "movedim")
def _permute(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    given = context.dims(args[0])
    if len(args) == 1:
        return [given[::-1]]
    if isinstance(args[1], (list, tuple)):
        return [[given[d] for d in args[1]]]
    one, other = (_normalize_dim(d, len(given)) for d in args[1:3])
    order = list(range(len(given)))
    order[one], order[other] = order[other], order[one]
    return [[given[d] for d in order]]


@register_rule("expand", "expand_copy")
def _expand(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    given = context.dims(args[0])
    full: TensorDims = [[] for _ in range(outs[0].dim() - len(given))] + given
    return [[(dim if dim_size(dim) == n else new_dim(n)) for dim, n in zip(full, outs[0].shape, strict=True)]]


@register_rule("repeat")
def _repeat(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    given = context.dims(args[0])
    full: TensorDims = [[] for _ in range(outs[0].dim() - len(given))] + given
    return [[[*new_dim(times), *dim] for dim, times in zip(full, args[1], strict=True)]]


def _slice_dims(context: RuleContext, x: torch.Tensor, dim: int, start: int, size: int) -> TensorDims:
    """A slice that is one of several equal pieces factors the dim into (piece, position in it); any other slice needs the dim unsharded."""
    given = context.dims(x)
    dim = _normalize_dim(dim, x.dim())
    if size == x.shape[dim]:
        return given
    try:
        if start % max(size, 1):
            raise DimMismatchError
        which, place = split_evenly(given[dim], x.shape[dim], size)
        context.require_unsharded([which])
    except DimMismatchError:
        context.require_unsharded([given[dim]])
        place = new_dim(size)
    return [*given[:dim], place, *given[dim + 1 :]]


@register_rule("slice")
def _slice(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    dim = args[1] if len(args) > 1 else 0
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    step = args[4] if len(args) > 4 else 1
    size = outs[0].shape[_normalize_dim(dim, args[0].dim())]
    if step != 1:
        return _resize_dim(context, args[0], dim, size)
    return [_slice_dims(context, args[0], dim, start % max(args[0].shape[dim], 1), size)]


def _resize_dim(context: RuleContext, x: torch.Tensor, dim: int, size: int) -> list[TensorDims]:
    given = context.dims(x)
    dim = _normalize_dim(dim, x.dim())
    context.require_unsharded([given[dim]])
    return [[*given[:dim], new_dim(size), *given[dim + 1 :]]]


@register_rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "split_copy")
def _split(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    x, dim = args[0], _normalize_dim(args[2] if len(args) > 2 else kwargs.get("dim", 0), args[0].dim())
    found, start = [], 0
    for out in outs:
        found.append(_slice_dims(context, x, dim, start, out.shape[dim]))
        start += out.shape[dim]
    return found


@register_rule("select", "unbind")
def _select(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    dim = _normalize_dim(args[1] if len(args) > 1 else 0, args[0].dim())
    return [_reduce_over(context, args[0], [dim], keepdim=False)] * len(outs)


@register_rule("cat", "stack")
def _cat(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    out, parts = outs[0], [t for t in args[0] if t.numel()]
    dim = _normalize_dim(args[1] if len(args) > 1 else 0, out.dim())
    stacked = bool(parts) and parts[0].dim() < out.dim()
    full = [([*d[:dim], [], *d[dim:]] if stacked else d) for d in map(context.dims, parts)]
    context.require_unsharded([dims[dim] for dims in full])
    joined = context.broadcast([([*dims[:dim], [], *dims[dim + 1 :]], out.shape) for dims in full])
    return [[*joined[:dim], new_dim(out.shape[dim]), *joined[dim + 1 :]]]


# -- indexing --


@register_rule("embedding")
def _embedding(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    table = context.dims(args[0])
    context.require_unsharded([table[0]])
    return [[*context.dims(args[1]), table[1]]]


@register_rule("index_select")
def _index_select(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    given, dim = context.dims(args[0]), _normalize_dim(args[1], args[0].dim())
    context.require_unsharded([given[dim]])
    return [[*given[:dim], *context.dims(args[2]), *given[dim + 1 :]]]


@register_rule("gather")
def _gather_along_dim(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    """Each index selects independently, so the index's dims propagate; the table's indexed dim must be unsharded."""
    table, index, dim = context.dims(args[0]), context.dims(args[2]), _normalize_dim(args[1], args[0].dim())
    context.require_unsharded([table[dim]])
    for d in range(len(index)):
        if d != dim and args[0].shape[d] == args[2].shape[d]:
            unify(table[d], index[d])
        elif d != dim:
            context.require_unsharded([table[d], index[d]])
    return [index]


@register_rule("scatter", "scatter_add", "scatter_", "scatter_add_", "index_add", "index_add_", "index_copy", "index_fill")
def _scatter_along_dim(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    """The indexed dim must be unsharded; operands of the output's length share the other dims with it."""
    out, dim = outs[0], _normalize_dim(args[1], args[0].dim())
    operands = [t for t in _tensors((args, kwargs)) if t.dim() == out.dim()]
    context.require_unsharded([context.dims(t)[dim] for t in operands])
    rest: TensorDims = [new_dim(n) for n in out.shape]
    for d in range(out.dim()):
        for tensor in operands:
            if d != dim and tensor.shape[d] == out.shape[d]:
                unify(rest[d], context.dims(tensor)[d])
    return [rest]


@register_rule("index")
def _index(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[TensorDims]:
    given, picks = context.dims(args[0]), list(args[1])
    places = [i for i, p in enumerate(picks) if p is not None]
    if not places or places != list(range(places[0], places[-1] + 1)) or any(picks[i].dtype in (torch.bool, torch.uint8) for i in places):
        return unknown_rule(context, args, kwargs, outs)
    context.require_unsharded([given[i] for i in places])
    chosen = context.broadcast([(context.dims(picks[i]), picks[i].shape) for i in places])
    return [[*given[: places[0]], *chosen, *given[places[-1] + 1 :]]]
