"""One rank's profile of a model: its shards of the parameters, its part of the work."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.model import EXPENSIVE_KINDS, Kernel, KernelCache, LayerProfile, ModelProfile, TensorSpec
from meshwright.core.plan import Plan
from meshwright.core.tied_parameters import stages_holding
from meshwright.schedule.context_actions import context_profile
from meshwright.schedule.expert_actions import expert_profile
from meshwright.schedule.spatial_actions import spatial_profile


def local_profile(plan: Plan, profile: ModelProfile, tp_rank: int, pp_rank: int = 0, ep_rank: int = 0) -> ModelProfile:
    """The profile as one rank sees it. Parameters are exact; work and activations scale with the layer's sharded parameters."""
    same, equal = plan.partition_key
    ranks = (tp_rank, pp_rank, ep_rank)
    return profile.memo.get_or_compute("local", same, (*equal, *ranks), lambda: _build_local_profile(plan, profile, *ranks))


def _build_local_profile(plan: Plan, profile: ModelProfile, tp_rank: int, pp_rank: int, ep_rank: int) -> ModelProfile:
    if plan.mesh.pp > 1 and len(plan.stages) > 1:
        profile = _stage_profile(plan, profile, pp_rank)
    if plan.mesh.cp > 1 and plan.context.sequence_length:
        profile = context_profile(plan, profile)
    profile = spatial_profile(plan.spatial, profile)
    if plan.mesh.ep > 1:
        profile = expert_profile(plan, profile, ep_rank)
    if plan.mesh.degree("tp") == 1:
        return profile
    scaling = _TensorParallelScaling(plan, profile, tp_rank)
    input_bytes = [0.0, *(layer.output_bytes for layer in profile.layers[:-1])]
    layers = zip(profile.layers, profile.per_sample_layers, input_bytes, strict=True)
    return replace(profile, layers=tuple(scaling.local_layer(*layer) for layer in layers))


class _TensorParallelScaling:
    """Scales layers to one tensor-parallel rank's part of them."""

    def __init__(self, plan: Plan, profile: ModelProfile, tp_rank: int) -> None:
        mesh = plan.mesh
        self._batch, self._degree, self._sequence_parallel = profile.batch, mesh.degree("tp"), plan.tensor.is_sequence_parallel
        self._tied_tensors = _tied_tensors_by_layer(profile)
        self._cache: KernelCache = {}  # equal blocks share their kernels, but may be sharded differently
        self._policies = [policy for _, policy in plan.tensor_policies]
        self._lengths = [policy.shard_lengths(mesh.grid_coordinate(tp_rank, axis), mesh.degree(axis)) for axis, policy in plan.tensor_policies]

    def local_layer(self, layer: LayerProfile, slope: LayerProfile, input_bytes: float) -> LayerProfile:
        """The layer on this rank; `input_bytes` are the output bytes of the layer before it."""
        tensors = tuple(self._shard(t) for t in layer.tensors)
        used = {t.name: t for t in (*layer.tensors, *self._tied_tensors.get(layer.name, ()))}.values()
        share = sum(self._shard(t).numel for t in used) / max(sum(t.numel for t in used), 1) if used else 1.0
        saved = self._activation_fraction(layer, slope, share, min(input_bytes / layer.activation_bytes, 1.0) if layer.activation_bytes else 0.0)
        # Selective recompute saves the positions that are gathered into the layer's tensor-parallel regions, with the matmuls.
        gathered = sum(site.bytes_for(self._batch) for policy in self._policies for site in policy.sequence_gathers_in.get(layer.name, ()))
        return replace(
            layer,
            parameters=sum(t.numel for t in tensors),
            tensors=tensors,
            flops_forward=layer.flops_forward * share,
            flops_backward=layer.flops_backward * share,
            activation_bytes=layer.activation_bytes * saved,
            fusible_bytes=layer.fusible_bytes * saved,
            compiler_recomputed_bytes=layer.compiler_recomputed_bytes * saved,
            output_bytes=layer.output_bytes / (self._degree if self._sequence_parallel else 1),
            expensive_output_bytes=layer.expensive_output_bytes * saved + gathered,
            transient_bytes=layer.transient_bytes * share,
            matmul_workspace_bytes=layer.matmul_workspace_bytes * share,
            kernels=self._kernels(layer.kernels, slope.kernels, share),
        )

    def _activation_fraction(self, layer: LayerProfile, slope: LayerProfile, share: float, input_fraction: float) -> float:
        """The fraction of the layer's activations on this rank. A column-parallel layer has its full input and its shard of the rest; a
        row-parallel layer has its shard of the input and the full rest. A layer with both has the full inputs of its column-parallel parts and
        what unsharded parts save; under sequence parallelism most of that is sharded too."""
        if self._sequence_parallel:
            return (0.4 + 0.6 / self._degree + share) / 2
        sharded_dims = {dim for t in layer.tensors if len(t.shape) > 1 for lengths in self._lengths for dim in lengths.get(t.name, ())}
        is_reduced = bool(self._reduced_modules(layer.name))
        if sharded_dims == {0} and not is_reduced:
            return input_fraction + (1.0 - input_fraction) * share
        if sharded_dims == {1} and is_reduced:
            return input_fraction * share + 1.0 - input_fraction
        if not layer.saved_by or not layer.activation_bytes:
            return (1.0 + share) / 2
        unsharded = sum(part for name, part in layer.saved_by if f"{layer.name}.{name}" not in self._reduced_modules(f"{layer.name}.{name}"))
        by_samples = min(self._batch * slope.activation_bytes / layer.activation_bytes, 1.0)  # the rest comes from parameters, such as casts
        return share + by_samples * unsharded * (1.0 - share)

    def _reduced_modules(self, module: str) -> list[str]:
        """Modules inside `module`, itself included, whose outputs are reduced."""
        return [site.module for policy in self._policies for site in policy.reduce_sites_in.get(module, ())]

    def _shard(self, tensor: TensorSpec) -> TensorSpec:
        lengths = {dim: length for by_name in self._lengths for dim, length in by_name.get(tensor.name, {}).items()}
        return replace(tensor, shape=tuple(lengths.get(d, n) for d, n in enumerate(tensor.shape))) if lengths else tensor

    def _kernels(self, kernels: tuple[Kernel, ...], slopes: tuple[Kernel, ...], share: float) -> tuple[Kernel, ...]:
        key = (id(kernels), share)
        if key not in self._cache:
            self._cache[key] = tuple(
                replace(k, flops=k.flops * share, bytes=k.bytes * share)
                if k.kind in EXPENSIVE_KINDS
                else replace(k, bytes=self._moved_bytes(k, s, share))
                for k, s in zip(kernels, slopes, strict=True)
            )
        return self._cache[key]

    def _moved_bytes(self, kernel: Kernel, slope: Kernel, share: float) -> float:
        """Passes over parameters (casts, dense embedding gradients) do not depend on the batch and scale with the parameters; half of the passes
        over activations are outside of tensor-parallel regions."""
        fixed = max(kernel.bytes - self._batch * slope.bytes, 0.0)
        outside = 1 / self._degree if self._sequence_parallel else 1.0
        return fixed * share + (kernel.bytes - fixed) * (outside + share) / 2


def _tied_tensors_by_layer(profile: ModelProfile) -> dict[str, list[TensorSpec]]:
    """By layer: tied parameters that it computes with and another layer holds."""
    tensors, by_layer = {t.name: t for t in profile.tensors}, dict[str, list[TensorSpec]]()
    for first, *others in profile.tied_parameters:
        for layer in (layer.name for layer in profile.layers if first in tensors and any(name.startswith(f"{layer.name}.") for name in others)):
            by_layer.setdefault(layer, []).append(tensors[first])
    return by_layer


def _holding_ranks(plan: Plan, profile: ModelProfile) -> dict[str, list[int]]:
    """The pipeline ranks that hold each parameter."""
    holders = stages_holding(plan.stages)
    return {t.name: [plan.stage_rank(stage) for stage in holders(t.name)] for t in profile.tensors}


def _stage_profile(plan: Plan, profile: ModelProfile, pp_rank: int) -> ModelProfile:
    """The layers of one pipeline rank, and the parameters of other ranks' layers that it also uses."""
    stages = [stage for i, stage in enumerate(plan.stages) if plan.stage_rank(i) == pp_rank]
    names = {name for stage in stages for name in stage.layers}
    users = {tied.parameter: tied.layer for stage in stages for tied in stage.tied_parameters}
    holders = profile.memo.get_or_compute("holders", (plan.stages,), (plan.mesh.pp, plan.schedule), lambda: _holding_ranks(plan, profile))

    def local_tensors(layer: LayerProfile) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(t, in_grad_norm=holders[t.name][0] == pp_rank, pipeline_ranks=tuple(sorted(set(holders[t.name]))))
            for t in layer.tensors
            if pp_rank in holders[t.name]
        )

    indices = [i for i, layer in enumerate(profile.layers) if layer.name in names]
    layers = [replace(profile.layers[i], tensors=local_tensors(profile.layers[i])) for i in indices]
    for tensor in (t for layer in profile.layers if layer.name not in names for t in local_tensors(layer)):
        user = next((i for i, layer in enumerate(layers) if layer.name == users.get(tensor.name)), 0)
        layers[user] = replace(layers[user], tensors=(*layers[user].tensors, tensor))
    return replace(profile, layers=tuple(layers), per_sample_layers=tuple(profile.per_sample_layers[i] for i in indices))
