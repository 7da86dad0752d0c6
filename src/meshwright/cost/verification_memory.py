"""Peak memory of verifying a plan before step 1. Its copies are freed before training, so a run's peak is the larger of the two, not their sum."""

from __future__ import annotations

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.sample_coupling import batch_parts
from meshwright.core.workload import OPTIMIZER_STATES

_SAMPLES_PER_PART = 2  # as in execute/verify_trial.py


def verification_bytes(plan: Plan, profile: ModelProfile, optimizer: str) -> int:
    """Bytes on rank 0, which runs one device's part: the model, a copy of it with gradients and optimizer state, and the activations of the few
    samples that the plan can split. 0 where there is nothing to verify."""
    if plan.world == 1:
        return 0
    samples = min(plan.global_batch, _SAMPLES_PER_PART * batch_parts(plan))
    trained = sum(t.bytes for t in profile.tensors if t.trainable)
    return int(2 * profile.parameter_bytes + (1 + OPTIMIZER_STATES[optimizer]) * trained + profile.at_batch(samples).activation_bytes)
