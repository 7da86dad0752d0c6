"""Level 4, the Orchestrator: describes the machine, plans, launches ranks, monitors and reports. It drives the run and holds no tensors."""

from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.orchestrator import Orchestrator
from meshwright.orchestrate.run_inputs import PreparedRun

__all__ = ["Orchestrator", "PreparedRun", "RunConfig"]
