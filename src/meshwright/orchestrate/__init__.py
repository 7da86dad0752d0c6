"""Level 4, the Orchestrator: describe, plan, launch, watch, report. It owns the loop and holds no tensors."""

from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.orchestrator import Orchestrator, PreparedRun

__all__ = ["Orchestrator", "PreparedRun", "RunConfig"]
