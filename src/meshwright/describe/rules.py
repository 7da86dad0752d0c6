"""What each operation does to the strands of its operands: one small rule for each family of operations that reach a kernel.

A rule sees the dims of the inputs, says which strands are summed away or needed whole, and returns the dims of each output. An
operation without a rule needs everything whole: nothing is ever assumed to pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.describe.strands import Dim, Strand, UntiedError, cut_evenly, fresh, length, regroup, tie

Dims = list[list[Strand]]


class Scene:
    """One operation under a rule: the dims of its operands, and what the rule says about them."""

    def __init__(self, dims_of: Callable[[torch.Tensor], Dims], named: dict[str, Any]) -> None:
        self.dims, self.named = dims_of, named  # the arguments by the names that torch gives them
        self.sums: list[Strand] = []
        self.binds: list[Strand] = []

    def bind(self, dims: Sequence[Dim]) -> None:
        self.binds += [s for dim in dims for s in dim]

    def join(self, shapes: Sequence[tuple[Dims, Sequence[int]]]) -> Dims:
        """Broadcasting: dims are aligned from the right; those longer than one are the same dim."""
        rank = max(len(shape) for _, shape in shapes)
        out: Dims = [[] for _ in range(rank)]
        for dims, _ in shapes:
            for back in range(1, len(dims) + 1):
                if length(dims[-back]) == 1:
                    continue
                if length(out[-back]) > 1:
                    tie(out[-back], dims[-back])
                else:
                    out[-back] = list(dims[-back])
        return out


Rule = Callable[[Scene, Any, Any, Sequence[torch.Tensor]], list[Dims]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def add(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return add


def find_rule(func: Any) -> Rule:
    """The rule for an operation: by name, or because torch itself says that it works element by element."""
    found = RULES.get(func._overloadpacket.__name__)
    if found is not None:
        return found
    return elementwise if torch.Tag.pointwise in func.tags else unknown


def unknown(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    for tensor in _tensors((args, kwargs)):
        scene.bind(scene.dims(tensor))
    return [[fresh(n) for n in out.shape] for out in outs]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if torch.is_tensor(t)]


def _at(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


# -- element by element --


@rule("clone", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "copy_", "copy", "zeros_like", "ones_like", "empty_like",
      "full_like", "rand_like", "randn_like", "bernoulli", "bernoulli_", "native_dropout", "where", "masked_fill", "masked_fill_", "fill_", "zero_",
      "fill", "dropout", "leaky_relu", "leaky_relu_", "hardswish", "hardswish_", "_prelu_kernel",
      "new_zeros", "new_ones", "new_empty", "new_full", "uniform_", "normal_", "exponential_")  # fmt: skip
def elementwise(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    given = [t for t in _tensors((args, kwargs)) if t.dim() <= max((o.dim() for o in outs), default=0)]
    joined = scene.join([(scene.dims(t), t.shape) for t in given]) if given else []
    return [_like(joined, out) for out in outs]


def _like(dims: Dims, out: torch.Tensor) -> Dims:
    if len(dims) == out.dim() and all(length(d) == n for d, n in zip(dims, out.shape, strict=True)):
        return dims
    return [fresh(n) for n in out.shape]


# -- products --


def _product(scene: Scene, a: torch.Tensor, b: torch.Tensor) -> Dims:
    """(…, m, k) × (…, k, n): k is summed, what leads is shared."""
    left, right = scene.dims(a), scene.dims(b)
    if b.dim() == 1:
        right = [right[0], []]
    tie(left[-1], right[-2])
    scene.sums += left[-1]
    lead = scene.join([(left[:-2], a.shape[:-2]), (right[:-2], b.shape[:-2])]) if a.dim() > 2 else []
    out = [*lead, left[-2], right[-1]]
    return out[:-1] if b.dim() == 1 else out


@rule("mm", "bmm", "mv")
def _mm(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    return [_product(scene, args[0], args[1])]


@rule("addmm", "baddbmm", "addmv")
def _addmm(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    out = _product(scene, args[1], args[2])
    return [scene.join([(out, outs[0].shape), (scene.dims(args[0]), args[0].shape)])]


@rule("linear")
def _linear(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    x, weight = scene.dims(args[0]), scene.dims(args[1])
    tie(x[-1], weight[1])
    scene.sums += x[-1]
    out = [*x[:-1], weight[0]]
    bias = args[2] if len(args) > 2 else None
    return [scene.join([(out, outs[0].shape), (scene.dims(bias), bias.shape)])] if bias is not None else [out]


@rule("convolution")
def _convolution(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    x, weight, bias, transposed, groups = args[0], args[1], args[2], args[6], args[8]
    given, kernel = scene.dims(x), scene.dims(weight)
    scene.bind(given[2:])
    scene.bind(kernel[2:])
    into, out = (kernel[0], kernel[1]) if transposed else (kernel[1], kernel[0])
    if groups == 1:
        tie(given[1], into)
        scene.sums += given[1]
    elif groups == x.shape[1] == outs[0].shape[1]:
        tie(given[1], kernel[0])  # every channel for itself
        out = kernel[0]
    else:
        scene.bind([given[1], into, out])
        out = fresh(outs[0].shape[1])
    if bias is not None:
        tie(out, scene.dims(bias)[0])
    return [[given[0], out, *(fresh(n) for n in outs[0].shape[2:])]]


def attention(scene: Scene, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor) -> list[Dims]:
    """Batch and heads pass; positions and the width of a head are needed whole. Keys may have fewer heads, each for a run of queries'."""
    query, key, value = (scene.dims(t) for t in (q, k, v))
    for lead in range(q.dim() - 2):
        few, many = length(key[lead]), length(query[lead])
        if few == many:
            tie(query[lead], key[lead])
        elif few > 1:
            tie(regroup([query[lead]], (few, many // few))[0], key[lead])
        tie(key[lead], value[lead])
    tie(query[-1], key[-1])
    scene.bind([query[-1], query[-2], key[-2], value[-1], value[-2]])
    if mask is not None:
        dims = scene.dims(mask)
        scene.bind(dims[-2:])
        scene.join([(dims[:-2], mask.shape[:-2]), (query[:-2], q.shape[:-2])])
    return [[*query[:-1], value[-1]]]


# -- what needs a dim whole --


def _over(scene: Scene, x: torch.Tensor, dims: Sequence[int], keep: bool) -> Dims:
    given = scene.dims(x)
    gone = {_at(d, x.dim()) for d in dims}
    scene.bind([given[d] for d in gone])
    return [([] if d in gone else given[d]) for d in range(x.dim()) if keep or d not in gone]


def _dims_named(scene: Scene, key: str, rank: int, default: list[int]) -> list[int]:
    """The dims that an argument names; `default` where it names none."""
    found = scene.named.get(key)
    if found is None or found == []:
        return default
    return [_at(d, rank) for d in ([found] if isinstance(found, int) else found)]


@rule("sum", "mean", "amax", "amin", "logsumexp", "any", "all", "prod", "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean",
      "argmax", "argmin", "max", "min")  # fmt: skip
def _reduction(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    x = args[0]
    if len(_tensors((args, kwargs))) > 1:
        return unknown(scene, args, kwargs, outs)
    dims = _dims_named(scene, "dim", x.dim(), list(range(x.dim())))
    return [_over(scene, x, dims, bool(scene.named.get("keepdim", False)))] * len(outs)


def _mixing(scene: Scene, x: torch.Tensor, mixed: Sequence[int], outs: Sequence[torch.Tensor]) -> list[Dims]:
    """Some dims are needed whole, and may change their length; the others pass."""
    given = scene.dims(x)
    scene.bind([given[d] for d in mixed])
    return [[(fresh(out.shape[d]) if d in mixed else given[d]) for d in range(x.dim())] for out in outs]


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod", "sort", "topk")
def _along(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    """What runs along one dim, the last unless it says otherwise."""
    return _mixing(scene, args[0], _dims_named(scene, "dim", args[0].dim(), [args[0].dim() - 1]), outs)


@rule("flip", "roll")
def _moved(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    return _mixing(scene, args[0], _dims_named(scene, "dims", args[0].dim(), list(range(args[0].dim()))), outs)


@rule("triu", "tril")
def _triangle(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    return _mixing(scene, args[0], [args[0].dim() - 2, args[0].dim() - 1], outs)


@rule("constant_pad_nd")
def _pad(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    """Two numbers a dim, the last dim's first; a shift that keeps the length moves elements too."""
    rank, pad = args[0].dim(), args[1]
    return _mixing(scene, args[0], [rank - 1 - i // 2 for i, n in enumerate(pad) if n], outs)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    x, last = args[0], len(args[1])
    given = scene.dims(x)
    scene.bind(given[-last:])
    for affine in (a for a in args[2:4] if torch.is_tensor(a)):
        for mine, its in zip(given[-last:], scene.dims(affine), strict=True):
            tie(mine, its)
    rest = [*given[:-last], *([] for _ in range(last))]
    return [given, *([rest] * (len(outs) - 1))]


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "batch_norm",
      "_native_batch_norm_legit_functional", "_batch_norm_no_update", "_batch_norm_with_update")  # fmt: skip
def _batch_norm(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    given = scene.dims(args[0])
    scene.bind([given[0], *given[2:]])
    for kept in (t for t in args[1:5] if torch.is_tensor(t) and t.dim() == 1):
        tie(given[1], scene.dims(kept)[0])
    return [given, *([given[1]] if out.dim() == 1 and out.shape[0] == args[0].shape[1] else [fresh(n) for n in out.shape] for out in outs[1:])]


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool2d",
      "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "adaptive_max_pool2d", "upsample_nearest3d")  # fmt: skip
def _pool(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    given = scene.dims(args[0])
    scene.bind(given[2:])
    return [[*given[:2], *(fresh(n) for n in out.shape[2:])] for out in outs]


# -- views --


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "squeeze", "unsqueeze", "squeeze_", "unsqueeze_")
def _view(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    return [regroup(scene.dims(args[0]), outs[0].shape)]


@rule("permute", "t", "transpose", "movedim")
def _permute(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    given = scene.dims(args[0])
    if len(args) == 1:
        return [given[::-1]]
    if isinstance(args[1], (list, tuple)):
        return [[given[d] for d in args[1]]]
    one, other = (_at(d, len(given)) for d in args[1:3])
    order = list(range(len(given)))
    order[one], order[other] = order[other], order[one]
    return [[given[d] for d in order]]


@rule("expand", "expand_copy")
def _expand(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    given = scene.dims(args[0])
    full: Dims = [[] for _ in range(outs[0].dim() - len(given))] + given
    return [[(dim if length(dim) == n else fresh(n)) for dim, n in zip(full, outs[0].shape, strict=True)]]


@rule("repeat")
def _repeat(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    given = scene.dims(args[0])
    full: Dims = [[] for _ in range(outs[0].dim() - len(given))] + given
    return [[[*fresh(times), *dim] for dim, times in zip(full, args[1], strict=True)]]


def _sliced(scene: Scene, x: torch.Tensor, dim: int, start: int, size: int) -> Dims:
    """A slice that is one of several equal pieces says that the dim is (piece, place in it); any other slice needs the dim whole."""
    given = scene.dims(x)
    dim = _at(dim, x.dim())
    if size == x.shape[dim]:
        return given
    try:
        if start % max(size, 1):
            raise UntiedError
        which, place = cut_evenly(given[dim], x.shape[dim], size)
        scene.bind([which])
    except UntiedError:
        scene.bind([given[dim]])
        place = fresh(size)
    return [*given[:dim], place, *given[dim + 1 :]]


@rule("slice")
def _slice(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    dim = args[1] if len(args) > 1 else 0
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    step = args[4] if len(args) > 4 else 1
    size = outs[0].shape[_at(dim, args[0].dim())]
    if step != 1:
        return _over_fresh(scene, args[0], dim, size)
    return [_sliced(scene, args[0], dim, start % max(args[0].shape[dim], 1), size)]


def _over_fresh(scene: Scene, x: torch.Tensor, dim: int, size: int) -> list[Dims]:
    given = scene.dims(x)
    dim = _at(dim, x.dim())
    scene.bind([given[dim]])
    return [[*given[:dim], fresh(size), *given[dim + 1 :]]]


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "split_copy")
def _split(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    x, dim = args[0], _at(args[2] if len(args) > 2 else kwargs.get("dim", 0), args[0].dim())
    found, start = [], 0
    for out in outs:
        found.append(_sliced(scene, x, dim, start, out.shape[dim]))
        start += out.shape[dim]
    return found


@rule("select", "unbind")
def _select(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    dim = _at(args[1] if len(args) > 1 else 0, args[0].dim())
    return [_over(scene, args[0], [dim], keep=False)] * len(outs)


@rule("cat", "stack")
def _cat(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    out, parts = outs[0], [t for t in args[0] if t.numel()]
    dim = _at(args[1] if len(args) > 1 else 0, out.dim())
    stacked = bool(parts) and parts[0].dim() < out.dim()
    full = [([*d[:dim], [], *d[dim:]] if stacked else d) for d in map(scene.dims, parts)]
    scene.bind([dims[dim] for dims in full])
    joined = scene.join([([*dims[:dim], [], *dims[dim + 1 :]], out.shape) for dims in full])
    return [[*joined[:dim], fresh(out.shape[dim]), *joined[dim + 1 :]]]


# -- picking --


@rule("embedding")
def _embedding(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    table = scene.dims(args[0])
    scene.bind([table[0]])
    return [[*scene.dims(args[1]), table[1]]]


@rule("index_select")
def _index_select(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    given, dim = scene.dims(args[0]), _at(args[1], args[0].dim())
    scene.bind([given[dim]])
    return [[*given[:dim], *scene.dims(args[2]), *given[dim + 1 :]]]


@rule("gather", "scatter", "scatter_add", "scatter_", "scatter_add_", "index_add", "index_add_", "index_copy", "index_fill")
def _gather(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    """The named dim is needed whole; operands of the output's length share the other dims with it."""
    out, dim = outs[0], _at(args[1], args[0].dim())
    operands = [t for t in _tensors((args, kwargs)) if t.dim() == out.dim()]
    scene.bind([scene.dims(t)[dim] for t in operands])
    rest: Dims = [fresh(n) for n in out.shape]
    for d in range(out.dim()):
        for tensor in operands:
            if d != dim and tensor.shape[d] == out.shape[d]:
                tie(rest[d], scene.dims(tensor)[d])
    return [rest]


@rule("index")
def _index(scene: Scene, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[Dims]:
    given, picks = scene.dims(args[0]), list(args[1])
    places = [i for i, p in enumerate(picks) if p is not None]
    if not places or places != list(range(places[0], places[-1] + 1)) or any(picks[i].dtype in (torch.bool, torch.uint8) for i in places):
        return unknown(scene, args, kwargs, outs)
    scene.bind([given[i] for i in places])
    chosen = scene.join([(scene.dims(picks[i]), picks[i].shape) for i in places])
    return [[*given[: places[0]], *chosen, *given[places[-1] + 1 :]]]
