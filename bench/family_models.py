"""Models that nobody chose for Meshwright: every model type of `transformers`, one of each family of `timm` and `torchvision`, the models of
`diffusers` and torch's own modules, each built small, with a batch and a loss.

A model type's configuration is its default one, shrunken by the names of its fields (`family_shrink.py`). Where the class computes a loss from
labels, that loss is used, else the distance of its first output from a wave. What cannot be built or run on one device this way is reported as such
and is not a model of the sweep.
"""

from __future__ import annotations

import importlib.util
import warnings

import torch

from family import MAX_PARAMETERS, Built, Family


def all_families() -> list[Family]:
    """The models of every library that is installed."""
    from family_torch import torch_families
    from family_vision import define_missing_operators, timm_families, torchvision_families

    if importlib.util.find_spec("torchvision") is not None:
        define_missing_operators()  # before transformers asks for torchvision
    from family_diffusers import diffusers_families
    from family_transformers import transformers_families

    found = [*torch_families(), *transformers_families()]
    for package, families in (("timm", timm_families), ("torchvision", torchvision_families), ("diffusers", diffusers_families)):
        if importlib.util.find_spec(package) is not None:
            found += families()
    return found


def build(family: Family) -> Built:
    """The model in training mode without dropout, its batch and its loss; the same in every process."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch, loss = family.build()
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "attn_dropout_p", "dropout_p", "dropout_prob", "layerdrop", "attention_dropout"):
            if type(getattr(module, name, None)) is float:
                setattr(module, name, 0.0)
    with torch.no_grad():  # a bias of zero and a gain of one hide what a plan does with them
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters after shrinking")
    model.zero_grad()
    return model.train(), batch, loss
