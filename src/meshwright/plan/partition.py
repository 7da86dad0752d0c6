"""Model partitioner, deciding half: which modules are units, whose parameters are gathered, recomputed and compiled together."""

from __future__ import annotations

from meshwright.core.model import LOSS_LAYER, LayerProfile, ModelProfile
from meshwright.core.plan import Stage

_MIN_UNIT_SHARE = 0.05  # a layer that holds less of the parameters than this is not worth a collective of its own


def choose_units(profile: ModelProfile) -> tuple[str, ...]:
    """The repeated blocks; in a model without repeated blocks, the layers with more than `_MIN_UNIT_SHARE` of the parameters. None in a model whose
    code reads values: a rank may skip a block that others run, and would never join its collectives. A layer that nobody calls (`layer.forward(x)`
    runs no hooks) is not one, nor is one whose parameters are read outside of its call: by another layer that shares them, or by the model's code
    (`blocks[0].norm(x)`)."""
    if profile.untraceable:
        return ()
    is_traced = any(layer.kernels for layer in profile.layers)
    layers = [layer for layer in profile.layers if (layer.kernels or not is_traced) and not layer.is_entered]
    layers = [layer for layer in layers if not _shares_parameters(layer, profile)]
    blocks = tuple(layer.name for layer in layers if layer.block)
    if blocks:
        return blocks
    large = [layer for layer in layers if layer.parameters > _MIN_UNIT_SHARE * profile.parameters]
    names = [layer.name for layer in large if layer.name not in ("", LOSS_LAYER)]
    return tuple(name for name in names if not any(other.startswith(f"{name}.") for other in names))  # units do not nest


def _shares_parameters(layer: LayerProfile, profile: ModelProfile) -> bool:
    return any(0 < sum(name.startswith(f"{layer.name}.") for name in names) < len(names) for names in profile.tied_parameters)


def single_stage(profile: ModelProfile) -> tuple[Stage, ...]:
    return (Stage(tuple(layer.name for layer in profile.layers)),)
