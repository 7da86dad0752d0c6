"""Parameters that several layers share, and which pipeline stages hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan, Stage


def check_tied_parameters(plan: Plan, tied_names: Iterable[Sequence[str]]) -> None:
    """Reject tied layers on one pipeline rank under ZeRO-3, which unshards layer by layer. Each entry of `tied_names` is the names of one
    parameter."""
    if plan.mesh.pp == 1 or plan.memory.zero != 3:
        return
    ranks = {layer: plan.stage_rank(i) for i, stage in enumerate(plan.stages) for layer in stage.layers}
    for names in tied_names:
        owners = {max((n for n in ranks if name.startswith(f"{n}.")), key=len, default="") for name in names} - {""}
        for rank in range(plan.mesh.pp):
            here = sorted(n for n in owners if ranks[n] == rank)
            if len(here) > 1:
                raise RequestError(f"zero=3 with pp: {' and '.join(here)} share a parameter on one pipeline rank: use zero=1")


def stages_holding(stages: Sequence[Stage]) -> Callable[[str], tuple[int, ...]]:
    """A function from a parameter's name to the stages that hold it: the stage of its layer, and those that use it as a tied parameter."""
    owners: dict[str, list[int]] = {}
    users: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in stage.layers:
            owners.setdefault(name, []).append(index)
        for borrowed in stage.tied_parameters:
            users.setdefault(borrowed.parameter, []).append(index)

    def find(parameter: str) -> tuple[int, ...]:
        owner = parameter
        while owner and owner not in owners:
            owner = owner.rpartition(".")[0]
        return tuple(sorted({*owners.get(owner, ()), *users.get(parameter, ())}))

    return find
