"""The plan: everything a rank must know to do its part. Frozen data that validates itself; `execute` applies it."""

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
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.plan_checks import check_plan
from meshwright.core.rank_devices import device_kind, show_rank_devices
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.routes import Route
from meshwright.core.serialization import from_data, read_json, write_json
from meshwright.core.spatial_policy import SpatialPolicy, show_grid
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.core.workload import Precision

CompileMode = Literal["none", "blocks", "model"]
Offload = Literal["none", "optimizer"]

Overlap = Literal["gradients", "inputs", "gathers", "scatters"]
# What may travel beside computation: full buckets of gradients beside the rest of backward; under tensor parallelism the gradient of a
# layer's input beside the product that gives its weight's gradient; under zero=3 the next unit's weights beside this one's forward, and a
# unit's reduced gradients beside the next one's backward.
OVERLAPS: tuple[Overlap, ...] = ("gradients", "inputs", "gathers", "scatters")


@dataclass(frozen=True)
class ModuleInput:
    """Where a value is taken in: among the tensors that a module is given."""

    module: str
    position: int


@dataclass(frozen=True)
class BoundaryActivation:
    """A value that crosses from one stage to the next: which output of which module it is (or, `at_module_input`, which input of the stage's
    first module), where it is used, its bytes a sample (or, `is_batch_independent`, for any number of them: T5's position bias); on a grid of
    tensor-parallel ranks, the strand along `dim` that is dealt out."""

    source: str
    position: int
    consumers: tuple[ModuleInput, ...]
    bytes: float
    at_module_input: bool = False
    logical_dim: str = ""
    dim: int = 0
    is_batch_independent: bool = False
    needs_grad: bool = True  # whether its gradient comes back: not for a mask that a module has made

    def bytes_for(self, samples: int) -> float:
        return self.bytes if self.is_batch_independent else self.bytes * samples

    @property
    def name(self) -> str:
        return f"{self.source}{'<' if self.at_module_input else '>'}{self.position}"


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that a stage uses although another stage's layer holds it (a tied embedding), and the layer that uses it."""

    parameter: str
    layer: str


@dataclass(frozen=True)
class Stage:
    """The layers of one piece of the model, in execution order; what it needs from the piece before it, and how its code is entered."""

    layers: tuple[str, ...]
    entry: str = ""  # the module with which it begins; the piece before it ends there
    boundary_activations: tuple[BoundaryActivation, ...] = ()
    skipped_modules: tuple[str, ...] = ()  # modules whose work earlier pieces have done
    tied_parameters: tuple[TiedParameter, ...] = ()


@dataclass(frozen=True)
class MemoryPolicy:
    """What is kept where: `zero` says which states are cut over the shard axis, `units` what is gathered as one."""

    zero: Literal[0, 1, 2, 3] = 0
    units: tuple[str, ...] = ()  # modules that ZeRO-3 gathers and that recompute and compile wrap
    recompute: RecomputeMode = "none"
    precision: Precision = "fp32"  # of the arithmetic; parameters are stored in fp32 unless this is fp64
    layers: Mapping[str, RecomputeMode] = field(default_factory=dict)  # units that recompute otherwise than the rest, by name
    offload: Offload = "none"  # what is kept in host memory

    def recompute_mode(self, name: str) -> RecomputeMode:
        """How the unit of this name recomputes; what is no unit keeps everything."""
        chosen = self.layers.get(name, self.recompute)
        return chosen if chosen == "none" or name in self._unit_names else "none"

    @cached_property
    def _unit_names(self) -> frozenset[str]:
        return frozenset(self.units)

    @cached_property
    def recompute_modes(self) -> Mapping[str, RecomputeMode]:
        """The units that recompute, and how."""
        found = {name: self.layers.get(name, self.recompute) for name in self.units}
        return {name: mode for name, mode in found.items() if mode != "none"}


@dataclass(frozen=True)
class SyncPolicy:
    """How ranks meet: bucket sizes, what travels beside computation, how long a call may take, what goes over another backend."""

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    overlap: tuple[Overlap, ...] = OVERLAPS
    timeout_s: float = 120.0
    routes: tuple[Route, ...] = ()  # none: everything goes over the plan's backend, by its own collectives
    ranks_per_node: tuple[int, ...] = ()  # how many ranks each node has, where routes tell nodes apart
    compression: Compression = "none"  # of gradients on their way between data ranks
    compression_rank: int = 4  # of powersgd's matrices


@dataclass(frozen=True)
class BalancePolicy:
    """What unequal ranks have of a whole; empty means equal. What is computed and what is held are two decisions."""

    shares: tuple[int, ...] = ()  # samples of the global batch, for each data rank
    state_fractions: tuple[float, ...] = ()  # of what ZeRO cuts, the part of each rank along the shard axis; they sum to 1


@dataclass(frozen=True)
class Plan:
    """How one model is spread over one set of ranks."""

    model: str
    global_batch: int
    mesh: Mesh = Mesh()
    micro_batches: int = 1
    stages: tuple[Stage, ...] = ()
    schedule: PipelineSchedule = "1f1b"  # in which order a pipeline takes micro-batches forward and backward
    memory: MemoryPolicy = MemoryPolicy()
    sync: SyncPolicy = SyncPolicy()
    balance: BalancePolicy = BalancePolicy()
    placements: Mapping[str, str] = field(default_factory=dict)  # layers whose tensor parallelism a user has decided, by name
    tensor: TensorPolicy = TensorPolicy()
    tensor_y: TensorPolicy = TensorPolicy()  # the second dimension, when tensor parallelism has a grid
    context: ContextPolicy = ContextPolicy()
    spatial: SpatialPolicy = SpatialPolicy()
    expert: ExpertPolicy = ExpertPolicy()
    compile: CompileMode = "none"
    device: DeviceKind = "cpu"
    rank_devices: tuple[str, ...] = ()  # what each rank is on ('cuda:0', 'cpu'), where they are not all alike or share a card
    device_order: tuple[int, ...] = ()  # which of the cluster's devices each rank is on, where that is not in their order
    backend: str = "gloo"
    threads: int = 0  # CPU threads a rank; 0 leaves the environment's setting
    version: int = 1

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def partition_key(self) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """All that says what each rank has of the model, as objects and as values: plans that share it share much else (see `Memo`)."""
        mesh = self.mesh
        same = (self.stages, self.tensor, self.tensor_y, self.context, self.spatial, self.expert)
        return same, (mesh.pp, mesh.cp, mesh.ep, mesh.tp, self.schedule)

    def stage_rank(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return schedule_traits(self.schedule).rank_of(stage, self.mesh.pp)

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline takes the gradients of inputs and those of weights apart."""
        return self.mesh.pp > 1 and schedule_traits(self.schedule).splits_backward

    @property
    def world(self) -> int:
        return self.mesh.size

    def for_rank(self, rank: int) -> Plan:
        """The plan with the kind of device that one rank is on."""
        return replace(self, device=device_kind(self.rank_devices[rank])) if self.rank_devices else self

    def device_of(self, rank: int, local_rank: int) -> str:
        """Which device a rank is on: its node's cards go to its ranks in order, unless the plan says otherwise."""
        return self.rank_devices[rank] if self.rank_devices else self.device if self.device == "cpu" else f"{self.device}:{local_rank}"

    @property
    def backends(self) -> tuple[str, ...]:
        """The one that ranks meet by, and those that some calls go over."""
        return tuple(dict.fromkeys([self.backend, *(r.backend for r in self.sync.routes)]))

    @property
    def tensor_policies(self) -> tuple[tuple[str, TensorPolicy], ...]:
        """Tensor parallelism, axis by axis."""
        return tuple((axis, policy) for axis, policy in zip(self.mesh.tp_axes, (self.tensor, self.tensor_y), strict=False) if policy.sharded_dims)

    @cached_property
    def logical_dim_shards(self) -> tuple[Mapping[str, tuple[int, int]], ...]:
        """By coordinate of `tp` and strand that tensor parallelism deals out: how much of it that rank holds, and of how much."""
        return tuple(
            {
                s.name: (s.shard_range(self.mesh.grid_coordinate(place, axis), self.mesh.degree(axis))[1], s.size)
                for axis, p in self.tensor_policies
                for s in p.sharded_dims
            }
            for place in range(self.mesh.degree("tp"))
        )

    def sample_range(self, data_rank: int) -> tuple[int, int]:
        """(first sample, number of samples) of the global batch for one data rank."""
        each = self.global_batch // self.mesh.data_parallel_size
        shares = self.balance.shares
        return (sum(shares[:data_rank]), shares[data_rank]) if shares else (data_rank * each, each)

    def state_fraction(self, shard_rank: int) -> float:
        """Of what ZeRO cuts, the part of the rank at a coordinate of the shard axis; all of it where nothing is cut."""
        return self.balance.state_fractions[shard_rank] if self.balance.state_fractions else 1.0 / (self.mesh.shard if self.memory.zero else 1)

    def micro_batch_size(self, rank: int) -> int:
        """Samples in the largest micro-batch of one rank."""
        return -(-self.sample_range(self.mesh.data_rank(rank))[1] // self.micro_batches)

    @property
    def max_micro_batch_size(self) -> int:
        """Samples in the largest micro-batch of any rank: what memory must hold."""
        return -(-self.max_share // self.micro_batches)

    @property
    def max_share(self) -> int:
        """Samples of the data rank that has the most."""
        return max(self.balance.shares, default=self.global_batch // self.mesh.data_parallel_size)

    @property
    def strategy(self) -> str:
        """The name people know this plan by."""
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
        parts += [f"gradients in {self.sync.compression}"] * (self.sync.compression != "none")
        return ", ".join(parts)

    def save(self, path: Path) -> None:
        write_json(path, self)

    @staticmethod
    def load(path: Path) -> Plan:
        return from_data(Plan, read_json(path), str(path))


def _recompute_summary(memory: MemoryPolicy) -> str:
    default = {"none": "", "selective": "recompute selective", "full": "recompute"}[memory.recompute]
    own = ", ".join(f"{name} {mode}" for name, mode in memory.layers.items())
    own = own if len(memory.layers) <= 3 else f"{len(memory.layers)} layers otherwise"
    return f"{default or 'recompute'} ({own})" if own else default
