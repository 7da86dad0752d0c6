"""A user's own strategy: a pure function from the planner's plan to another plan, and the checks of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.mesh import check_runnable
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data

PlanTransform = Callable[[Plan, ModelProfile, Cluster], Plan]
_FIXED_FIELDS = {
    "world": "keep the mesh's size, or start another number with --nproc",
    "model": "keep it",
    "global_batch": "keep it, or set another one with --global-batch",
}


@dataclass(frozen=True)
class Strategy:
    """A named function from plan to plan. Calling it calls the function, so a decorated function can be tested directly."""

    name: str
    function: PlanTransform

    def __call__(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
        return self.function(plan, profile, cluster)

    def apply(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
        """The changed plan, checked: any error is one line that names the strategy."""
        try:
            changed = self.function(plan, profile, cluster)
        except RequestError as error:  # plans validate themselves on construction
            raise RequestError(f"strategy {self.name}: {error}") from error
        except Exception as error:  # it is the user's code, which may raise anything
            raise RequestError(f"strategy {self.name} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        if not isinstance(changed, Plan):
            raise RequestError(f"strategy {self.name} returned {type(changed).__name__}: it must return a Plan, like dataclasses.replace(plan, …)")
        for field, advice in _FIXED_FIELDS.items():
            before, after = getattr(plan, field), getattr(changed, field)
            if before != after:
                raise RequestError(f"strategy {self.name} changed {field}={before} to {field}={after}: {advice}")
        check_runnable(changed.mesh)
        return changed


def strategy(name: str) -> Callable[[PlanTransform], Strategy]:
    """Decorate a function `(plan, profile, cluster) -> Plan`; users select it by the name, and `why` shows it."""
    return lambda function: Strategy(name, function)


def as_strategy(candidate: Any, where: str) -> Strategy:
    """`candidate` if it is a Strategy; any other function as a Strategy under its own name."""
    if isinstance(candidate, Strategy):
        return candidate
    if not callable(candidate):
        raise RequestError(f"{where} is a {type(candidate).__name__}, not a function (plan, profile, cluster) -> Plan")
    return Strategy(getattr(candidate, "__name__", where), candidate)


def differences(before: Plan, after: Plan) -> list[str]:
    """'memory.recompute none → full' for each field that differs; long values are omitted."""
    return list(_field_differences(to_data(before), to_data(after), ""))


def _field_differences(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        for key in a:
            yield from _field_differences(a[key], b[key], f"{where}.{key}" if where else key)
    elif a != b:
        values = f" {_show(a)} → {_show(b)}"
        yield where + (values if len(values) <= 60 else "")


def _show(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) and value and all(isinstance(v, int) for v in value) else str(value)
