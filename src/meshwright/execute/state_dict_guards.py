"""`state_dict()` of a model or an optimizer of which a rank holds only a part is refused: it would be taken for the whole."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan


def guard_state_dicts(plan: Plan, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse `state_dict` and `load_state_dict` where they would see the parts of one rank."""
    mesh, data = plan.mesh, plan.world // (plan.mesh.degree("tp") * plan.mesh.pp)
    cut = [f"{axis}={mesh.degree(axis)}" for axis in ("tp", "ep", "pp") if mesh.degree(axis) > 1]
    zero = [f"zero={plan.memory.zero}"] if plan.memory.zero and data > 1 else []
    if cut or zero == ["zero=3"]:
        text = f"the model's parameters are split over ranks ({', '.join(cut + zero)})"
        save = f"state_dict: {text}: run.state_dict() gives whole ones on the first rank, or mw.state_dict(applied) after mw.parallelize"
        load = f"load_state_dict: {text}: run.load_state_dict(state) distributes whole ones, or mw.load_state_dict(applied, state)"
        for module in model.modules():
            module.register_state_dict_pre_hook(_refusal(save))
            module.register_load_state_dict_pre_hook(_refusal(load))
    if cut or zero:
        text = f"the optimizer's state is split over ranks ({', '.join(cut + zero)}): run.save() and run.resume() save and load it, under any plan"
        optimizer.register_state_dict_pre_hook(_refusal(f"state_dict: {text}"))
        optimizer.register_load_state_dict_pre_hook(_refusal(f"load_state_dict: {text}"))


def _refusal(text: str) -> Any:
    def refuse(*_: Any) -> None:
        raise RequestError(text)

    return refuse
