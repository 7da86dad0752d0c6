"""How each operation propagates the logical dims of its operands: one small rule for each family of operations that reach a kernel.

A rule gets the dims of the inputs, states which logical dims are contracted or must be unsharded, and returns the dims of each output. An operation
without a rule requires everything unsharded: nothing is assumed to propagate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from meshwright.core.dataflow import SlidingWindow
from meshwright.describe.dim_unification import Dim, DimMismatchError, LogicalDim, dim_size, new_dim, reshape_dims, split_evenly, unify
from meshwright.describe.sliding_windows import avg_pool_window, conv_window, pool_window, upsample_window

TensorDims = list[list[LogicalDim]]


class RuleContext:
    """One operation under a rule: the dims of its operands, and what the rule states about them."""

    def __init__(self, dims_of: Callable[[Tensor], TensorDims], arguments: dict[str, Any]) -> None:
        self.dims, self.arguments = dims_of, arguments  # arguments by their names in torch's schema
        self.contracted_dims: list[LogicalDim] = []
        self.unsharded_dims: list[LogicalDim] = []
        self.window: SlidingWindow | None = None

    def require_unsharded(self, dims: Sequence[Dim]) -> None:
        self.unsharded_dims += [s for dim in dims for s in dim]

    def broadcast(self, *operands: TensorDims) -> TensorDims:
        """Broadcasting: dims are aligned from the right; those longer than one are unified."""
        out: TensorDims = [[] for _ in range(max(map(len, operands)))]
        for dims in operands:
            for i in range(-1, -len(dims) - 1, -1):
                if dim_size(dims[i]) == 1:
                    continue
                if dim_size(out[i]) > 1:
                    unify(out[i], dims[i])
                else:
                    out[i] = list(dims[i])
        return out


Rule = Callable[[RuleContext, Any, Any, Sequence[Tensor]], list[TensorDims]]
RULES: dict[str, Rule] = {}


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def find_rule(func: Any) -> Rule:
    """The rule for an operation: by name, or because torch tags it as pointwise."""
    return RULES.get(func._overloadpacket.__name__) or (elementwise if torch.Tag.pointwise in func.tags else unknown_rule)


def unknown_rule(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    for tensor in tensor_leaves((args, kwargs)):
        context.require_unsharded(context.dims(tensor))
    return [[new_dim(n) for n in out.shape] for out in outs]


def tensor_leaves(tree: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if torch.is_tensor(t)]


def _normalize_dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


# -- element-wise --


@register_rule(
    "clone", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "copy_", "copy", "zeros_like", "ones_like", "empty_like",
    "full_like", "rand_like", "randn_like", "bernoulli", "bernoulli_", "native_dropout", "where", "masked_fill", "masked_fill_", "fill_", "zero_",
    "fill", "dropout", "new_zeros", "new_ones", "new_empty", "new_full", "uniform_", "normal_", "exponential_",
    # activations that torch (2.11 more of them than 2.13) does not tag as pointwise
    "leaky_relu", "leaky_relu_", "gelu_", "elu_", "celu_", "selu_", "mish_", "hardtanh_", "hardswish", "hardswish_", "hardsigmoid_", "threshold_",
    "_prelu_kernel", "complex", "polar", "_conj", "_neg_view",
)  # fmt: skip
def elementwise(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    operands = [t for t in tensor_leaves((args, kwargs)) if t.dim() <= max((o.dim() for o in outs), default=0)]
    dims = context.broadcast(*map(context.dims, operands)) if operands else []
    return [dims if tuple(map(dim_size, dims)) == tuple(out.shape) else [new_dim(n) for n in out.shape] for out in outs]


@register_rule("view_as_complex")
def _view_as_complex(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dims = context.dims(args[0])
    context.require_unsharded([dims[-1]])  # real and imaginary part
    return [dims[:-1]]


@register_rule("view_as_real")
def _view_as_real(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    return [[*context.dims(args[0]), new_dim(2)]]


# -- matmuls --


def _matmul_dims(context: RuleContext, a: Tensor, b: Tensor) -> TensorDims:
    """(…, m, k) × (…, k, n): k is contracted, leading dims are shared."""
    left, right = context.dims(a), context.dims(b)
    if b.dim() == 1:
        right = [right[0], []]
    unify(left[-1], right[-2])
    context.contracted_dims += left[-1]
    lead = context.broadcast(left[:-2], right[:-2]) if a.dim() > 2 else []
    out = [*lead, left[-2], right[-1]]
    return out[:-1] if b.dim() == 1 else out


@register_rule("mm", "bmm", "mv")
def _mm(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    return [_matmul_dims(context, args[0], args[1])]


@register_rule("addmm", "baddbmm", "addmv")
def _addmm(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    return [context.broadcast(_matmul_dims(context, args[1], args[2]), context.dims(args[0]))]


@register_rule("linear")
def _linear(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    x, weight = context.dims(args[0]), context.dims(args[1])
    unify(x[-1], weight[1])
    context.contracted_dims += x[-1]
    out = [*x[:-1], weight[0]]
    bias = args[2] if len(args) > 2 else None
    return [context.broadcast(out, context.dims(bias)) if bias is not None else out]


@register_rule("convolution")
def _convolution(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    x, weight, bias, transposed, groups = args[0], args[1], args[2], args[6], args[8]
    dims, kernel = context.dims(x), context.dims(weight)
    context.require_unsharded([*dims[2:], *kernel[2:]])
    if groups == 1:
        channels_in, channels_out = (kernel[0], kernel[1]) if transposed else (kernel[1], kernel[0])
        unify(dims[1], channels_in)
        context.contracted_dims += dims[1]
    else:  # each group of channels by itself: ranks can hold some groups, and all channels of a group
        group, in_group, out_group = new_dim(groups), new_dim(x.shape[1] // groups), new_dim(outs[0].shape[1] // groups)
        channels_out = [*group, *out_group]
        unify(dims[1], [*group, *in_group])
        unify(kernel[0], [*group, *(in_group if transposed else out_group)])
        unify(kernel[1], out_group if transposed else in_group)
        context.require_unsharded([in_group, out_group])
    if bias is not None:
        unify(channels_out, context.dims(bias)[0])
    context.window = conv_window(tuple(weight.shape[2:]), args)
    return [[dims[0], channels_out, *(new_dim(n) for n in outs[0].shape[2:])]]


def attention_rule(context: RuleContext, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[TensorDims]:
    """Batch and heads propagate; positions and head width must be unsharded. Keys may have fewer heads, each for a group of query heads."""
    query, key, value = (context.dims(t) for t in (q, k, v))
    for i in range(q.dim() - 2):
        key_heads, query_heads = dim_size(key[i]), dim_size(query[i])
        if key_heads == query_heads:
            unify(query[i], key[i])
        elif key_heads > 1:
            unify(reshape_dims([query[i]], (key_heads, query_heads // key_heads))[0], key[i])
        unify(key[i], value[i])
    unify(query[-1], key[-1])
    context.require_unsharded([query[-1], query[-2], key[-2], value[-1], value[-2]])
    if mask is not None:
        dims = context.dims(mask)
        context.require_unsharded(dims[-2:])
        context.broadcast(dims[:-2], query[:-2])
    return [[*query[:-1], value[-1]]]


# -- operations that need a dim unsharded --


def _reduce_over(context: RuleContext, x: Tensor, dims: Sequence[int], keepdim: bool) -> TensorDims:
    input_dims = context.dims(x)
    reduced = {_normalize_dim(d, x.dim()) for d in dims}
    context.require_unsharded([input_dims[d] for d in reduced])
    return [([] if d in reduced else input_dims[d]) for d in range(x.dim()) if keepdim or d not in reduced]


def _dims_argument(context: RuleContext, key: str, rank: int, default: list[int]) -> list[int]:
    """The dims that an argument names; `default` where it names none."""
    dims = context.arguments.get(key)
    if dims is None or dims == []:
        return default
    return [_normalize_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)]


@register_rule("sum", "mean", "amax", "amin", "logsumexp", "any", "all", "prod", "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean",
      "argmax", "argmin", "max", "min")  # fmt: skip
def _reduction(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    x = args[0]
    if len(tensor_leaves((args, kwargs))) > 1:
        return unknown_rule(context, args, kwargs, outs)
    dims = _dims_argument(context, "dim", x.dim(), list(range(x.dim())))
    return [_reduce_over(context, x, dims, bool(context.arguments.get("keepdim", False)))] * len(outs)


def _mix_dims(context: RuleContext, x: Tensor, mixed_dims: Sequence[int], outs: Sequence[Tensor]) -> list[TensorDims]:
    """`mixed_dims` must be unsharded and may change their length; the others propagate."""
    dims = context.dims(x)
    context.require_unsharded([dims[d] for d in mixed_dims])
    return [[(new_dim(out.shape[d]) if d in mixed_dims else dims[d]) for d in range(x.dim())] for out in outs]


@register_rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod", "sort", "topk")
def _softmax_like(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    """Operations along one dim, the last by default."""
    return _mix_dims(context, args[0], _dims_argument(context, "dim", args[0].dim(), [args[0].dim() - 1]), outs)


@register_rule("flip", "roll")
def _flip_or_roll(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    return _mix_dims(context, args[0], _dims_argument(context, "dims", args[0].dim(), list(range(args[0].dim()))), outs)


@register_rule("triu", "tril")
def _triu_tril(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    return _mix_dims(context, args[0], [args[0].dim() - 2, args[0].dim() - 1], outs)


@register_rule("constant_pad_nd")
def _pad(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    """Two numbers per dim, the last dim's first; a shift that keeps the length moves elements too."""
    rank, pad = args[0].dim(), args[1]
    return _mix_dims(context, args[0], [rank - 1 - i // 2 for i, n in enumerate(pad) if n], outs)


@register_rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dims, n = context.dims(args[0]), len(args[1])
    context.require_unsharded(dims[-n:])
    for affine in (a for a in args[2:4] if torch.is_tensor(a)):
        for dim, affine_dim in zip(dims[-n:], context.dims(affine), strict=True):
            unify(dim, affine_dim)
    statistics = [*dims[:-n], *([] for _ in range(n))]
    return [dims, *([statistics] * (len(outs) - 1))]


@register_rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "batch_norm",
      "_native_batch_norm_legit_functional", "_batch_norm_no_update", "_batch_norm_with_update")  # fmt: skip
def _batch_norm(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dims = context.dims(args[0])
    context.require_unsharded([dims[0], *dims[2:]])
    for per_channel in (t for t in args[1:5] if torch.is_tensor(t) and t.dim() == 1):
        unify(dims[1], context.dims(per_channel)[0])
    return [dims, *([dims[1]] if out.dim() == 1 and out.shape[0] == args[0].shape[1] else [new_dim(n) for n in out.shape] for out in outs[1:])]


@register_rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d")
def _max_pool(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    context.window = pool_window(context.arguments, "max", args[0].dim() - 2)
    return _pool(context, args, kwargs, outs)


@register_rule("avg_pool2d", "avg_pool3d")
def _avg_pool(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    context.window = avg_pool_window(context.arguments, args[0].dim() - 2)
    return _pool(context, args, kwargs, outs)


@register_rule("upsample_nearest2d", "upsample_nearest3d")
def _upsample_nearest(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    context.window = upsample_window(context.arguments, args[0].dim() - 2)
    return _pool(context, args, kwargs, outs)


@register_rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_bilinear2d", "upsample_bicubic2d", "adaptive_max_pool2d")
def _pool(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    return _mix_dims(context, args[0], range(2, args[0].dim()), outs)


# -- losses --


@register_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    """Class scores and targets: (N, C, …) and (N, …). If reduced, both must be unsharded."""
    scores, targets = context.dims(args[0]), context.dims(args[1])
    classes = min(1, len(scores) - 1)
    for score, target in zip(scores[:classes] + scores[classes + 1 :], targets, strict=True):
        unify(score, target)
    context.require_unsharded(scores if context.arguments.get("reduction") else [scores[classes]])
    return [targets if out.dim() else [] for out in outs]


@register_rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss")
def _elementwise_loss(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    """Element-wise; if reduced, everything must be unsharded."""
    dims = context.broadcast(*map(context.dims, tensor_leaves((args, kwargs))))
    if outs[0].dim():
        return [dims]
    context.require_unsharded(dims)
    return [[]]


# -- views --


@register_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "squeeze", "unsqueeze", "squeeze_", "unsqueeze_")
def _view(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    return [reshape_dims(context.dims(args[0]), outs[0].shape)]


@register_rule("permute", "t", "transpose", "movedim")
def _permute(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dims = list(context.dims(args[0]))
    if len(args) == 1:
        return [dims[::-1]]
    if isinstance(args[1], (list, tuple)):
        return [[dims[d] for d in args[1]]]
    dims[args[1]], dims[args[2]] = dims[args[2]], dims[args[1]]
    return [dims]


@register_rule("expand", "expand_copy")
def _expand(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dims = context.dims(args[0])
    full: TensorDims = [[] for _ in range(outs[0].dim() - len(dims))] + dims
    return [[(dim if dim_size(dim) == n else new_dim(n)) for dim, n in zip(full, outs[0].shape, strict=True)]]


@register_rule("repeat")
def _repeat(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dims = context.dims(args[0])
    full: TensorDims = [[] for _ in range(outs[0].dim() - len(dims))] + dims
    return [[[*new_dim(times), *dim] for dim, times in zip(full, args[1], strict=True)]]


def _slice_dims(context: RuleContext, x: Tensor, dim: int, start: int, size: int) -> TensorDims:
    """A slice that is one of several equal pieces factors the dim into (piece, position in it); any other slice needs the dim unsharded."""
    dims = context.dims(x)
    dim = _normalize_dim(dim, x.dim())
    if size == x.shape[dim]:
        return dims
    try:
        if start % max(size, 1):
            raise DimMismatchError
        piece, position = split_evenly(dims[dim], x.shape[dim], size)
        context.require_unsharded([piece])
    except DimMismatchError:
        context.require_unsharded([dims[dim]])
        position = new_dim(size)
    return [*dims[:dim], position, *dims[dim + 1 :]]


@register_rule("slice")
def _slice(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dim = _normalize_dim(args[1] if len(args) > 1 else 0, args[0].dim())
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    if len(args) > 4 and args[4] != 1:  # the step
        return _mix_dims(context, args[0], [dim], outs)
    return [_slice_dims(context, args[0], dim, start % max(args[0].shape[dim], 1), outs[0].shape[dim])]


@register_rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "split_copy")
def _split(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    x, dim = args[0], _normalize_dim(args[2] if len(args) > 2 else kwargs.get("dim", 0), args[0].dim())
    starts = accumulate((out.shape[dim] for out in outs), initial=0)
    return [_slice_dims(context, x, dim, start, out.shape[dim]) for start, out in zip(starts, outs, strict=False)]


@register_rule("select", "unbind")
def _select(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dim = _normalize_dim(args[1] if len(args) > 1 else 0, args[0].dim())
    return [_reduce_over(context, args[0], [dim], keepdim=False)] * len(outs)


@register_rule("cat", "stack")
def _cat(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    out, tensors = outs[0], [t for t in args[0] if t.numel()]
    dim = _normalize_dim(args[1] if len(args) > 1 else 0, out.dim())
    stacked = bool(tensors) and tensors[0].dim() < out.dim()
    full = [([*d[:dim], [], *d[dim:]] if stacked else d) for d in map(context.dims, tensors)]
    context.require_unsharded([dims[dim] for dims in full])
    shared = context.broadcast(*([*dims[:dim], [], *dims[dim + 1 :]] for dims in full))
    return [[*shared[:dim], new_dim(out.shape[dim]), *shared[dim + 1 :]]]


# -- indexing --


@register_rule("embedding")
def _embedding(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    table = context.dims(args[0])
    context.require_unsharded([table[0]])
    return [[*context.dims(args[1]), table[1]]]


@register_rule("index_select")
def _index_select(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dims, dim = context.dims(args[0]), _normalize_dim(args[1], args[0].dim())
    context.require_unsharded([dims[dim]])
    return [[*dims[:dim], *context.dims(args[2]), *dims[dim + 1 :]]]


@register_rule("gather")
def _gather_along_dim(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
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
def _scatter_along_dim(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    """The indexed dim must be unsharded; operands of the output's length share the other dims with it."""
    out, dim = outs[0], _normalize_dim(args[1], args[0].dim())
    operands = [t for t in tensor_leaves((args, kwargs)) if t.dim() == out.dim()]
    context.require_unsharded([context.dims(t)[dim] for t in operands])
    out_dims: TensorDims = [new_dim(n) for n in out.shape]
    for d in range(out.dim()):
        for tensor in operands:
            if d != dim and tensor.shape[d] == out.shape[d]:
                unify(out_dims[d], context.dims(tensor)[d])
    return [out_dims]


@register_rule("index")
def _index(context: RuleContext, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[TensorDims]:
    dims, indices = context.dims(args[0]), list(args[1])
    indexed = [d for d, index in enumerate(indices) if index is not None]
    if not indexed or indexed != list(range(indexed[0], indexed[-1] + 1)) or any(indices[d].dtype in (torch.bool, torch.uint8) for d in indexed):
        return unknown_rule(context, args, kwargs, outs)
    context.require_unsharded([dims[d] for d in indexed])
    index_dims = context.broadcast(*(context.dims(indices[d]) for d in indexed))
    return [[*dims[: indexed[0]], *index_dims, *dims[indexed[-1] + 1 :]]]
