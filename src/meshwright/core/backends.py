"""The traits of each process-group backend, one table entry each: what it supports, needs and lacks. Its implementation is in `comm/`; all other
code reads these traits instead of comparing names."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from meshwright.core.cluster import DeviceKind

Backend = Literal["gloo", "mpi", "nccl"]
Fallback = tuple[str, str]  # (what a backend lacks, what is done instead): reported at its first use, and by `bench comm`
SCALED_SUM: Fallback = ("scaled sum (PREMUL_SUM)", "a product, then a sum")
UNEVEN_GATHER: Fallback = ("all-gather of unequal shards", "padded to the longest")
_COMMON_DTYPES = frozenset({"float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"})


@dataclass(frozen=True)
class BackendTraits:
    """The traits of one backend. The defaults are for a backend that torch knows and this table does not."""

    default_for: DeviceKind | None = None  # ranks on such devices use it unless another is requested
    devices: tuple[DeviceKind, ...] = ("cpu", "cuda")  # devices whose tensors it sends and receives; buffers are on the first by default
    shares_gpus: bool = True  # ranks may share a GPU, or have none
    launchers: tuple[str, ...] = ()  # one of these must start its ranks, and numbers them: there is no rendezvous
    package: str = ""  # the Python package that it needs
    install: str = ""  # the command that installs it
    dtypes: frozenset[str] | None = None  # what it supports natively, by torch's names; None: everything
    fallbacks: tuple[Fallback, ...] = (SCALED_SUM,)
    routable: bool = False  # single calls may be routed to it, and other algorithms may be composed of its messages
    sync_on_caller: bool = False  # a blocking call is faster from the calling thread than from the backend's own
    copies_input: bool = False  # holds a copy of a reduce-scatter's or all-gather's buffer until the call is waited for
    kernels: str = ""  # its calls run as GPU kernels, whose names contain this
    priced_like: str = ""  # the backend whose measurements are used until its own exist

    @property
    def is_installed(self) -> bool:
        """Whether the Python package that it needs is installed."""
        return not self.package or importlib.util.find_spec(self.package) is not None


BACKENDS: Mapping[str, BackendTraits] = {
    "gloo": BackendTraits(
        default_for="cpu",
        devices=("cpu",),
        dtypes=_COMMON_DTYPES,
        fallbacks=(
            SCALED_SUM,
            UNEVEN_GATHER,
            ("8-bit floating point", "moved as bytes, reduced in float32"),
            ("split_group", "groups are made by listing their ranks"),
        ),
        routable=True,
        copies_input=True,
    ),
    "mpi": BackendTraits(
        launchers=("mpirun", "mpich"),
        package="mpi4py",
        install="pip install 'meshwright[mpi]'",
        fallbacks=(("reduction of 16- and 8-bit floating point", "done in float32"), SCALED_SUM),
        routable=True,
        sync_on_caller=True,
        priced_like="gloo",
    ),
    "nccl": BackendTraits(default_for="cuda", devices=("cuda",), shares_gpus=False, dtypes=_COMMON_DTYPES, fallbacks=(), kernels="nccl"),
}
_UNLISTED = BackendTraits()


def backend_traits(backend: str) -> BackendTraits:
    return BACKENDS.get(backend, _UNLISTED)


def backend_for(kind: str, rank_devices: Sequence[str] = ()) -> str:
    """The default backend of ranks on such devices. `rank_devices` are given where ranks are on mixed devices or share a GPU: then it is the
    CPU backend, which supports them all."""
    return next(name for name, traits in BACKENDS.items() if traits.default_for == ("cpu" if rank_devices else kind))
