"""The plan: everything a rank must know to do its part. Frozen data that validates itself; `execute` applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshwright.core.cluster import DeviceKind
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.serial import from_data, read_json, write_json
from meshwright.core.tensor import TensorPolicy
from meshwright.core.workload import Precision

Compile = Literal["none", "blocks", "model"]


@dataclass(frozen=True)
class Stage:
    """The layers on one pipeline rank, in execution order."""

    layers: tuple[str, ...]


@dataclass(frozen=True)
class MemoryPolicy:
    """What is kept where: `zero` says which states are cut over the shard axis, `units` what is gathered as one."""

    zero: Literal[0, 1, 2, 3] = 0
    units: tuple[str, ...] = ()  # modules that ZeRO-3 gathers and that recompute and compile wrap
    recompute: Literal["none", "full"] = "none"
    precision: Precision = "fp32"  # of the arithmetic; parameters are stored in fp32 unless this is fp64


@dataclass(frozen=True)
class SyncPolicy:
    """How gradients meet: bucket sizes, whether they travel while backward goes on, how long a call may take."""

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    overlap: bool = True
    timeout_s: float = 120.0


@dataclass(frozen=True)
class BalancePolicy:
    """Samples of the global batch for each data rank; empty means equal."""

    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How one model is spread over one set of ranks."""

    model: str
    global_batch: int
    mesh: Mesh = Mesh()
    micro_batches: int = 1
    stages: tuple[Stage, ...] = ()
    memory: MemoryPolicy = MemoryPolicy()
    sync: SyncPolicy = SyncPolicy()
    balance: BalancePolicy = BalancePolicy()
    placements: Mapping[str, str] = field(default_factory=dict)  # layers whose tensor parallelism a user has decided, by name
    tensor: TensorPolicy = TensorPolicy()
    compile: Compile = "none"
    device: DeviceKind = "cpu"
    backend: str = "gloo"
    threads: int = 0  # CPU threads a rank; 0 leaves the environment's setting
    version: int = 1

    def __post_init__(self) -> None:
        mesh, zero = self.mesh, self.memory.zero
        if self.version != 1:
            raise RequestError(f"plan version {self.version} is newer than this Meshwright, which reads version 1: upgrade it")
        if self.micro_batches < 1:
            raise RequestError(f"plan: micro_batches={self.micro_batches} must be at least 1")
        if zero and mesh.shard == 1 and mesh.size > 1:
            raise RequestError(f"plan: zero={zero} cuts over the shard axis, and mesh {mesh} has none: use --mesh shard={mesh.size}")
        if not zero and mesh.shard > 1:
            raise RequestError(f"plan: mesh {mesh} has a shard axis but zero=0: set zero=1, 2 or 3, or use --mesh dp={mesh.data_width}")
        self._check_policies()
        if self.balance.shares:
            self._check_shares()
        else:
            self._check_batch()

    def _check_policies(self) -> None:
        if self.memory.zero not in (0, 1, 2, 3):
            raise RequestError(f"plan: memory.zero={self.memory.zero} must be 0, 1, 2 or 3")
        if self.memory.recompute not in ("none", "full"):
            raise RequestError(f"plan: memory.recompute={self.memory.recompute} must be none or full")
        if self.threads < 0:
            raise RequestError(f"plan: threads={self.threads} must be 0 (as the environment says) or more")
        if min(self.sync.bucket_bytes, self.sync.first_bucket_bytes) < 1:
            raise RequestError(f"plan: sync.bucket_bytes={self.sync.bucket_bytes} must be positive")
        if not 0 < self.sync.timeout_s < float("inf"):
            raise RequestError(f"plan: sync.timeout_s={self.sync.timeout_s} must be a positive number of seconds")

    def _check_shares(self) -> None:
        shares, width = self.balance.shares, self.mesh.data_width
        if len(shares) != width:
            raise RequestError(f"plan: balance.shares has {len(shares)} entries for {width} data ranks: give {width}")
        if sum(shares) != self.global_batch:
            raise RequestError(f"plan: balance.shares sum to {sum(shares)}, not to global_batch={self.global_batch}: change one of them")
        if min(shares) < 1:
            raise RequestError(f"plan: a share of {min(shares)} samples is empty: give every data rank at least one")
        if min(shares) < self.micro_batches:
            most = max(min(shares), 1)
            raise RequestError(f"plan: a share of {min(shares)} samples cannot make {self.micro_batches} micro-batches: set micro_batches={most}")

    def _check_batch(self) -> None:
        batch, width = self.global_batch, self.mesh.data_width
        step = width * self.micro_batches
        if batch < 1 or batch % step:
            down, up = max(batch // step, 1) * step, (max(batch, 0) // step + 1) * step
            better = f"{down}" if down == up else f"{down} or {up}"
            cut = f"{width} data ranks × {self.micro_batches} micro-batches = {step}"
            raise RequestError(f"global batch {batch} does not divide into {cut}: change --global-batch to {better}")

    @property
    def world(self) -> int:
        return self.mesh.size

    def share(self, data_rank: int) -> tuple[int, int]:
        """(first sample, number of samples) of the global batch for one data rank."""
        shares = self.balance.shares or (self.global_batch // self.mesh.data_width,) * self.mesh.data_width
        return sum(shares[:data_rank]), shares[data_rank]

    @property
    def largest_micro_batch(self) -> int:
        """Samples in the largest micro-batch of any rank: what memory must hold."""
        most = max(self.share(r)[1] for r in range(self.mesh.data_width))
        return -(-most // self.micro_batches)

    @property
    def strategy(self) -> str:
        """The name people know this plan by."""
        if self.mesh.size == 1:
            return "single device"
        parts = [f"tensor parallel {'x'.join(map(str, self.mesh.tp))}"] * (self.mesh.degree("tp") > 1)
        if self.memory.zero:
            parts.append(f"ZeRO-{self.memory.zero}" + (" hybrid" if self.mesh.dp > 1 else ""))
        elif self.mesh.dp > 1:
            parts.append("data parallel")
        return " × ".join(parts)

    def summary(self) -> str:
        """One line for tables: the strategy and every choice that is not a default."""
        parts = [f"{self.strategy} on {self.world} × {self.device}" if self.world > 1 else f"single {self.device}"]
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += [f"{self.threads} threads"] * (self.threads > 1)
        parts += [self.memory.precision]
        parts += ["recompute"] * (self.memory.recompute == "full")
        parts += [f"compile {self.compile}"] * (self.compile != "none")
        return ", ".join(parts)

    def save(self, path: Path) -> None:
        write_json(path, self)

    @staticmethod
    def load(path: Path) -> Plan:
        return from_data(Plan, read_json(path), str(path))
