"""Parameters that several layers share, and which pipeline stages hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan, Stage


def check_tied_parameters(plan: Plan, tied_names: Iterable[Sequence[str]]) -> None:
    """Reject tied layers on one pipeline rank under ZeRO-3, which unshards layer by layer. An entry of `tied_names` names one parameter."""
    if plan.mesh.pp == 1 or plan.memory.zero != 3:
        return
    ranks = {layer: plan.stage_rank(i) for i, stage in enumerate(plan.stages) for layer in stage.layers}
    for names in tied_names:
        layers = {max((layer for layer in ranks if name.startswith(f"{layer}.")), key=len, default="") for name in names} - {""}
        for rank in range(plan.mesh.pp):
            local = sorted(layer for layer in layers if ranks[layer] == rank)
            if len(local) > 1:
                raise RequestError(f"plan: zero=3 with pp: {' and '.join(local)} share a parameter on one pipeline rank: use zero=1")


def stages_holding(stages: Sequence[Stage]) -> Callable[[str], tuple[int, ...]]:
    """A function from a parameter's name to the stages that hold it: the stage of its layer, and those that use it as a tied parameter."""
    by_layer: dict[str, list[int]] = {}
    by_tied_parameter: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in stage.layers:
            by_layer.setdefault(name, []).append(index)
        for tied in stage.tied_parameters:
            by_tied_parameter.setdefault(tied.parameter, []).append(index)

    def find(parameter: str) -> tuple[int, ...]:
        layer = parameter
        while layer and layer not in by_layer:
            layer = layer.rpartition(".")[0]
        return tuple(sorted({*by_layer.get(layer, ()), *by_tied_parameter.get(parameter, ())}))

    return find
