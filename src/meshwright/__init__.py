"""Meshwright: plan, run and explain the training of any PyTorch model on whatever machines there are."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api import Run, connect, deferred_init, gather, is_first, load_state_dict, mean, parallelize, plan_for, prepare, print, state_dict
    from meshwright.core.errors import MeshwrightError, RequestError
    from meshwright.core.mesh import Mesh
    from meshwright.core.plan import MemoryPolicy, Plan
    from meshwright.core.plan_strategy import strategy
    from meshwright.core.task import Field, Task

__version__ = "0.1.0"
__all__ = [
    "Field", "MemoryPolicy", "Mesh", "MeshwrightError", "Plan", "RequestError", "Run", "Task", "connect", "deferred_init", "gather", "is_first",
    "load_state_dict", "mean", "parallelize", "plan_for", "prepare", "print", "state_dict", "strategy",
]  # fmt: skip

# Imported on first use, so that `import meshwright` and `meshwright --help` do not wait for torch.
_EXPORT_MODULES = {
    "Field": "core.task", "MemoryPolicy": "core.plan", "Mesh": "core.mesh", "MeshwrightError": "core.errors", "Plan": "core.plan",
    "RequestError": "core.errors", "Task": "core.task", "strategy": "core.plan_strategy",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"meshwright.{_EXPORT_MODULES.get(name, 'api')}"), name)
