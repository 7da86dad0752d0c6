"""The plan: everything a rank needs to know for its part of the training. Frozen data that validates itself; `execute` applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from meshwright.core.cluster import DeviceKind
from meshwright.core.compression_policy import Compression
from meshwright.core.context_policy import ContextPolicy
from meshwright.core.expert_policy import ExpertPolicy
from meshwright.core.mesh import Mesh
from meshwright.core.model import LOSS_LAYER
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.plan_checks import VERSION, check_plan
from meshwright.core.rank_devices import device_kind, show_rank_devices
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.routes import Route
from meshwright.core.sample_coupling import BatchNormMode, SampleCoupling
from meshwright.core.serialization import from_data, read_json, write_json
from meshwright.core.serve_policy import ServePolicy
from meshwright.core.spatial_policy import SpatialPolicy, show_grid
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.core.workload import Precision

CompileMode = Literal["none", "blocks", "model"]
Offload = Literal["none", "optimizer"]

Overlap = Literal["gradients", "inputs", "gathers", "scatters"]
# Communication that may overlap computation: gradient buckets with the rest of backward; under tensor parallelism, the all-reduce of a
# layer's input gradient with the matmul of its weight gradient; under zero=3, the all-gather of the next unit's weights with this unit's
# forward, and the reduce-scatter of a unit's gradients with the next unit's backward.
OVERLAPS: tuple[Overlap, ...] = ("gradients", "inputs", "gathers", "scatters")


@dataclass(frozen=True)
class ModuleInput:
    """One input of a module, by its position among the module's input tensors."""

    module: str
    position: int


@dataclass(frozen=True)
class BoundaryActivation:
    """A value that one pipeline stage sends to the next: the output of module `source` at `position` (or, `at_module_input`, its input there), its
    consumers, its bytes per sample (or, `is_batch_independent`, for any batch: T5's position bias); on a tensor-parallel grid, the logical dim
    along `dim` that is sharded. A value that crosses several boundaries has the same source at all of them."""

    source: str
    position: int
    consumers: tuple[ModuleInput, ...]
    bytes: float
    at_module_input: bool = False
    logical_dim: str = ""
    dim: int = 0
    is_batch_independent: bool = False
    needs_grad: bool = True  # whether its gradient is sent back: not for a mask that a module created

    def bytes_for(self, samples: int) -> float:
        return self.bytes if self.is_batch_independent else self.bytes * samples

    @property
    def name(self) -> str:
        return f"{self.source}{'<' if self.at_module_input else '>'}{self.position}"


@dataclass(frozen=True)
class TiedParameter:
    """A parameter of another stage's layer that this stage uses too (a tied embedding), and the layer that uses it."""

    parameter: str
    layer: str


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers in execution order, its boundary activations, and the module at which its code begins."""

    layers: tuple[str, ...]
    entry: str = ""  # the stage's first module, before which the previous stage ends
    boundary_activations: tuple[BoundaryActivation, ...] = ()
    skipped_modules: tuple[str, ...] = ()  # modules that earlier stages have computed
    tied_parameters: tuple[TiedParameter, ...] = ()


@dataclass(frozen=True)
class MemoryPolicy:
    """How memory is saved: `zero` is the ZeRO stage over the shard axis, `units` are the modules that are unsharded as one."""

    zero: Literal[0, 1, 2, 3] = 0
    units: tuple[str, ...] = ()  # modules that ZeRO-3 gathers and that recompute and compile wrap
    recompute: RecomputeMode = "none"
    precision: Precision = "fp32"  # of the arithmetic; parameters are stored in fp32 unless this is fp64
    layers: Mapping[str, RecomputeMode] = field(default_factory=dict)  # units with a mode other than `recompute`, by name
    offload: Offload = "none"  # states that are kept in host memory

    def recompute_mode(self, name: str) -> RecomputeMode:
        """The recompute mode of the unit of this name; "none" for a module that is not a unit."""
        chosen = self.layers.get(name, self.recompute)
        return chosen if chosen == "none" or name in self._unit_names else "none"

    @cached_property
    def _unit_names(self) -> frozenset[str]:
        return frozenset(self.units)

    @cached_property
    def recompute_modes(self) -> Mapping[str, RecomputeMode]:
        """The units that recompute, with their modes."""
        return {name: mode for name in self.units if (mode := self.layers.get(name, self.recompute)) != "none"}


@dataclass(frozen=True)
class SyncPolicy:
    """How ranks communicate: bucket sizes, overlap with computation, timeout, routes over other backends, gradient compression."""

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    overlap: tuple[Overlap, ...] = OVERLAPS
    timeout_s: float = 120.0
    routes: tuple[Route, ...] = ()  # empty: all calls use the collectives of the plan's backend
    ranks_per_node: tuple[int, ...] = ()  # the number of ranks on each node, where routes depend on nodes
    compression: Compression = "none"  # of gradients that are reduced over data ranks
    compression_rank: int = 4  # of powersgd's matrices


@dataclass(frozen=True)
class BalancePolicy:
    """The shares of unequal ranks; empty means equal. Samples (compute) and states (memory) are shared independently."""

    shares: tuple[int, ...] = ()  # samples of the global batch, for each data rank
    state_fractions: tuple[float, ...] = ()  # of the states that ZeRO shards, for each rank along the shard axis; they sum to 1


@dataclass(frozen=True)
class Plan:
    """How one model is trained on one set of ranks."""

    model: str
    global_batch: int
    mesh: Mesh = Mesh()
    micro_batches: int = 1
    stages: tuple[Stage, ...] = ()
    schedule: PipelineSchedule = "1f1b"  # the order of a pipeline's forwards and backwards
    memory: MemoryPolicy = MemoryPolicy()
    sync: SyncPolicy = SyncPolicy()
    balance: BalancePolicy = BalancePolicy()
    placements: Mapping[str, str] = field(default_factory=dict)  # layers whose tensor parallelism the user chose, by name
    tensor: TensorPolicy = TensorPolicy()
    tensor_y: TensorPolicy = TensorPolicy()  # the second dimension of a tensor-parallel grid
    context: ContextPolicy = ContextPolicy()
    spatial: SpatialPolicy = SpatialPolicy()
    expert: ExpertPolicy = ExpertPolicy()
    samples: SampleCoupling = SampleCoupling()
    serve: ServePolicy = ServePolicy()  # for inference; empty in plans for training
    batch_norm: BatchNormMode = "local"  # whose samples BatchNorm normalises together: each data rank's own, or those of all (sync)
    compile: CompileMode = "none"
    device: DeviceKind = "cpu"
    rank_devices: tuple[str, ...] = ()  # each rank's device ('cuda:0', 'cpu'), where these differ in kind or ranks share a card
    device_order: tuple[int, ...] = ()  # the index in the cluster of each rank's device, where not in the cluster's order
    backend: str = "gloo"
    threads: int = 0  # CPU threads per rank; 0 leaves the environment's setting
    version: int = VERSION

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def partition_key(self) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """All that determines each rank's part of the model, as objects and as values: plans with the same key share cached results (see `Memo`)."""
        mesh = self.mesh
        same = (self.stages, self.tensor, self.tensor_y, self.context, self.spatial, self.expert)
        return same, (mesh.pp, mesh.cp, mesh.ep, mesh.tp, self.schedule)

    def stage_rank(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return schedule_traits(self.schedule).rank_of(stage, self.mesh.pp)

    def stages_of_rank(self, rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in order."""
        per_rank = max(len(self.stages) // self.mesh.pp, 1)
        return [stage for stage in schedule_traits(self.schedule).stages_of(rank, self.mesh.pp, per_rank) if stage < len(self.stages)]

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline computes the gradients of inputs and those of weights separately."""
        return self.mesh.pp > 1 and schedule_traits(self.schedule).splits_backward

    @property
    def world(self) -> int:
        return self.mesh.size

    def for_rank(self, rank: int) -> Plan:
        """The plan with `device` set to the kind of device of one rank."""
        return replace(self, device=device_kind(self.rank_devices[rank])) if self.rank_devices else self

    def device_of(self, rank: int, local_rank: int) -> str:
        """The device of a rank: a node's cards are assigned to its ranks in order, unless the plan says otherwise."""
        return self.rank_devices[rank] if self.rank_devices else self.device if self.device == "cpu" else f"{self.device}:{local_rank}"

    @property
    def backends(self) -> tuple[str, ...]:
        """The process-group backend, then those that some calls are routed over."""
        return tuple(dict.fromkeys([self.backend, *(r.backend for r in self.sync.routes)]))

    @property
    def tensor_policies(self) -> tuple[tuple[str, TensorPolicy], ...]:
        """The tensor-parallel policy of each axis that shards something."""
        return tuple((axis, policy) for axis, policy in zip(self.mesh.tp_axes, (self.tensor, self.tensor_y), strict=False) if policy.sharded_dims)

    @cached_property
    def logical_dim_shards(self) -> tuple[Mapping[str, tuple[int, int]], ...]:
        """By coordinate of `tp` and name of the sharded logical dim: (length of that rank's shard, length of the whole dim)."""
        mesh, dims = self.mesh, [(axis, dim) for axis, policy in self.tensor_policies for dim in policy.sharded_dims]
        return tuple(
            {dim.name: (dim.shard_range(mesh.grid_coordinate(tp_rank, axis), mesh.degree(axis))[1], dim.size) for axis, dim in dims}
            for tp_rank in range(mesh.degree("tp"))
        )

    def sample_range(self, data_rank: int) -> tuple[int, int]:
        """(first sample, number of samples) of the global batch for one data rank."""
        shares, equal = self.balance.shares, self.global_batch // self.mesh.data_parallel_size
        return (sum(shares[:data_rank]), shares[data_rank]) if shares else (data_rank * equal, equal)

    def state_fraction(self, shard_rank: int) -> float:
        """The fraction of the states sharded by ZeRO that a coordinate of the shard axis holds; 1 where nothing is sharded."""
        return self.balance.state_fractions[shard_rank] if self.balance.state_fractions else 1.0 / (self.mesh.shard if self.memory.zero else 1)

    def micro_batch_size(self, rank: int) -> int:
        """Samples in the largest micro-batch of one rank."""
        return -(-self.sample_range(self.mesh.data_rank(rank))[1] // self.micro_batches)

    @property
    def max_micro_batch_size(self) -> int:
        """Samples in the largest micro-batch of any rank, which must fit in memory."""
        return -(-self.max_share // self.micro_batches)

    @property
    def max_share(self) -> int:
        """Samples per global batch of the data rank with the most."""
        return max(self.balance.shares, default=self.global_batch // self.mesh.data_parallel_size)

    @property
    def strategy(self) -> str:
        """The usual name of this plan's parallelism, such as 'ZeRO-3' or 'tensor parallel 2 × data parallel'."""
        if self.mesh.size == 1:
            return "single device"
        parts = [f"pipeline {self.mesh.pp} ({self.schedule})"] * (self.mesh.pp > 1)
        parts += [f"tensor parallel {'x'.join(map(str, self.mesh.tp))}"] * (self.mesh.degree("tp") > 1)
        parts += [f"context parallel {self.mesh.cp}"] * (self.mesh.cp > 1 and not self.spatial.grid)
        parts += [f"spatial {show_grid(self.spatial.grid)}"] * bool(self.spatial.grid)
        if self.mesh.ep > 1:
            parts.append(f"{'operator' if self.expert.tables and not self.expert.moe_layers else 'expert'} parallel {self.mesh.ep}")
        if self.memory.zero:
            parts.append(f"ZeRO-{self.memory.zero}" + (" hybrid" if self.mesh.dp > 1 else ""))
        elif self.mesh.dp > 1:
            parts.append("data parallel")
        return " × ".join(parts)

    def summary(self) -> str:
        """One line for tables: the strategy and every choice that is not a default."""
        parts = [f"{self.strategy} on {show_rank_devices(self.rank_devices, self.world, self.device)}" if self.world > 1 else f"single {self.device}"]
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += [f"{self.threads} threads"] * (self.threads > 1)
        parts += ["sequence parallel"] * self.tensor.is_sequence_parallel
        parts += [f"order {self.mesh.nondefault_order}"] * bool(self.mesh.nondefault_order)
        parts += [self.memory.precision]
        parts += [_recompute_summary(self.memory)] * (self.memory.recompute != "none" or bool(self.memory.layers))
        parts += ["optimizer in host memory"] * (self.memory.offload == "optimizer")
        parts += [f"compile {self.compile}"] * (self.compile != "none")
        parts += ["BatchNorm in sync"] * (self.batch_norm == "sync")
        parts += [f"gradients in {self.sync.compression}"] * (self.sync.compression != "none")
        return ", ".join(parts)

    def save(self, path: Path) -> None:
        write_json(path, self)

    @staticmethod
    def load(path: Path) -> Plan:
        return replace(from_data(Plan, read_json(path), str(path)), version=VERSION)


def _recompute_summary(memory: MemoryPolicy) -> str:
    default = "recompute selective" if memory.recompute == "selective" else "recompute"
    layers = ", ".join(f"{name} {mode}" for name, mode in memory.layers.items())
    layers = layers if len(memory.layers) <= 3 else f"{len(memory.layers)} layers otherwise"
    return f"{default} ({layers})" if layers else default


def is_compiled(layer: str, mode: CompileMode, mesh: Mesh, is_unit: bool) -> bool:
    """Whether a layer is compiled: with "model" all are; with "blocks" the units, and the loss unless stages or positions are split."""
    is_loss = layer == LOSS_LAYER and mesh.pp == 1 and mesh.cp == 1
    return mode == "model" or (mode == "blocks" and (is_unit or is_loss))


def compiles_layer(plan: Plan, layer: str) -> bool:
    return is_compiled(layer, plan.compile, plan.mesh, layer in plan.memory.units)
