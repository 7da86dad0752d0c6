"""A strategy of your own: a function from plan to plan. The planner finds its best plan, you change it, it is checked, priced and run.

    meshwright plan gpt-tiny --nproc 2 --set strategy=examples/07_own_strategy.py:even-buckets
    meshwright train gpt-tiny --nproc 2 --steps 5 --set strategy=examples/07_own_strategy.py:even-buckets

In a script: `mw.prepare(model, optimizer, loader, strategy=even_buckets)`. A plan is frozen data: `dataclasses.replace` makes another.
"""

from dataclasses import replace

import meshwright as mw


@mw.strategy("even-buckets")
def even_buckets(plan, profile, cluster):
    """Gradients travel in about eight pieces of one size, whatever the size of the model."""
    size = max(sum(tensor.bytes for tensor in profile.tensors) // 8, 64 * 1024)
    return replace(plan, sync=replace(plan.sync, bucket_bytes=size, first_bucket_bytes=size))


@mw.strategy("spare-memory")
def spare_memory(plan, profile, cluster):
    """On devices with less than 16 GB: half the activations at a time, and only what blocks begin with is kept of them."""
    if min(device.memory_bytes for device in cluster.devices) >= 16e9:
        return plan
    return replace(plan, micro_batches=2 * plan.micro_batches, memory=replace(plan.memory, recompute="full"))
