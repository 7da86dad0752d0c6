"""Model partitioner, deciding half: which modules are units, whose parameters are gathered, recomputed and compiled together."""

from __future__ import annotations

from meshwright.core.model import LOSS_LAYER, ModelProfile
from meshwright.core.plan import Stage

_MIN_UNIT_SHARE = 0.05  # a layer that holds less of the parameters than this is not worth a collective of its own


def choose_units(profile: ModelProfile) -> tuple[str, ...]:
    """The repeated blocks; in a model without repeated blocks, the layers with more than `_MIN_UNIT_SHARE` of the parameters. None in a model whose
    code reads values: a rank may skip a block that others run, and would never join its collectives. A layer that nobody calls (`layer.forward(x)`
    runs no hooks) is not one, nor is one whose parameter another layer reads outside of its call."""
    if profile.untraceable:
        return ()
    is_traced = any(layer.kernels for layer in profile.layers)
    tied = {name for names in profile.tied_parameters for name in names}
    layers = [la for la in profile.layers if (la.kernels or not is_traced) and tied.isdisjoint(t.name for t in la.tensors)]
    blocks = tuple(layer.name for layer in layers if layer.block)
    if blocks:
        return blocks
    large = [layer.name for layer in layers if layer.parameters > _MIN_UNIT_SHARE * profile.parameters]
    names = [name for name in large if name not in ("", LOSS_LAYER)]
    return tuple(name for name in names if not any(other.startswith(f"{name}.") for other in names))  # units do not nest


def single_stage(profile: ModelProfile) -> tuple[Stage, ...]:
    return (Stage(tuple(layer.name for layer in profile.layers)),)
