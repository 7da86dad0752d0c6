"""The doctor: each check says what it found and the command that mends it, whatever state torch is in."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.describe import environment_checks
from meshwright.describe.environment_checks import (
    EnvironmentCheck,
    TorchBuildInfo,
    check_cuda,
    check_distributed,
    check_python,
    check_threads,
    check_torch,
    query_torch,
    run_checks,
)
from meshwright.describe.nvml import Gpu

GPU = Gpu(0, "NVIDIA H200", "GPU-aa", 150_754_820_096, 150_000_000_000, (9, 0), 18)
INSTALL = "pip install 'torch>=2.11,<2.15'"
WELL = TorchBuildInfo(distributed=True, gloo=True)


def script(folder: Path, text: str) -> str:
    """An executable that stands in for Python in `query_torch`."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def named(found: list[EnvironmentCheck]) -> dict[str, EnvironmentCheck]:
    return {check.name: check for check in found}


def test_this_environment_is_sound(tmp_path: Path) -> None:
    """With the real torch, asked in a process of its own."""
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    found = named(run_checks(environ, folder=tmp_path, gpus=()))
    # Not the memory, disk and /dev/shm of whatever machine runs this test.
    for name in ("Python", "torch", "torch.distributed", "gloo", "OMP_NUM_THREADS", "working folder", "loopback"):
        assert found[name].ok, found[name]
    assert found["torch"].found == importlib.metadata.version("torch")
    assert found["gloo"].found == "available"
    assert list(tmp_path.iterdir()) == []  # the write test cleans up


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    def not_asked(*args: Any) -> TorchBuildInfo:
        raise AssertionError("a torch that is not there was imported")

    monkeypatch.setattr(environment_checks.importlib.metadata, "version", nothing)
    monkeypatch.setattr(environment_checks, "query_torch", not_asked)
    found = named(run_checks({}, root=tmp_path, folder=tmp_path, gpus=()))
    assert found["torch"] == EnvironmentCheck("torch", False, "not installed", INSTALL)
    assert (found["torch.distributed"].ok, found["torch.distributed"].mend) == (False, INSTALL)
    assert found["sklearn"] == EnvironmentCheck("sklearn", True, "not installed", "pip install scikit-learn")
    assert {"tensorboard", "prometheus_client", "transformers", "mpi4py"} <= found.keys()
    assert found["GPU"].ok


@pytest.mark.parametrize(
    ("version", "good"), [("2.11.0", True), ("2.13.0+cpu", True), ("2.14.1", True), ("2.10.2", False), ("2.15.0", False), ("odd", False)]
)
def test_torch_version(version: str, good: bool) -> None:
    check = check_torch(version)
    assert (check.ok, check.mend) == (good, "" if good else INSTALL)
    assert version in check.found


def test_python_version() -> None:
    assert check_python((3, 11, 0)).ok
    old = check_python((3, 9, 2))
    assert (old.ok, old.found) == (False, "3.9.2")
    assert old.mend


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'ImportError: libfoo.so is missing' >&2; exit 1", "importing torch failed: ImportError: libfoo.so is missing"),
        ("kill -SEGV $$", "crashed: signal 11"),
        ("exit 0", "importing torch failed"),
        ("echo not json", "importing torch failed"),
        ("exec sleep 30", "longer than"),
    ],
)
def test_a_broken_torch_cannot_crash_the_doctor(tmp_path: Path, text: str, said: str) -> None:
    facts = query_torch(os.environ, python=script(tmp_path, text), timeout_s=0.5 if "sleep" in text else 20)
    assert said in facts.error
    distributed, gloo = check_distributed(facts)
    assert not distributed.ok
    assert not gloo.ok
    assert distributed.mend.startswith("pip install --force-reinstall")


def test_a_noisy_torch_is_heard(tmp_path: Path) -> None:
    python = script(tmp_path, """echo 'a warning'; echo '{"distributed": true, "gloo": true, "nccl": false, "built_for": "12.8", "cuda": true}'""")
    assert query_torch(os.environ, python=python) == TorchBuildInfo(True, True, False, "12.8", True)


def test_no_interpreter(tmp_path: Path) -> None:
    assert "No such file" in query_torch({}, python=str(tmp_path / "none")).error


def test_torch_built_without_parts() -> None:
    distributed, gloo = check_distributed(TorchBuildInfo(distributed=True, gloo=False))
    assert distributed == EnvironmentCheck("torch.distributed", True, "available")
    assert (gloo.ok, bool(gloo.mend)) == (False, True)


@pytest.mark.parametrize(
    ("facts", "gpus", "driver", "visible", "good", "said"),
    [
        (WELL, (), False, None, True, "no NVIDIA driver"),
        (WELL, (GPU,), True, None, False, "NVIDIA H200; torch is a CPU build"),
        (WELL, (), True, None, False, "CPU build"),  # a driver whose library does not answer still counts
        (TorchBuildInfo(True, True, True, "12.8", True), (GPU,), True, None, True, "1 × NVIDIA H200; torch built for CUDA 12.8"),
        (TorchBuildInfo(True, True, True, "12.8", False), (GPU,), True, None, False, "too old or broken"),
        (TorchBuildInfo(True, True, True, "12.8", False), (GPU,), True, "", True, "hidden by CUDA_VISIBLE_DEVICES"),
        (TorchBuildInfo(True, True, True, "12.8", False), (GPU,), True, "0", False, "too old or broken"),
    ],
)
def test_driver_and_torch(facts: TorchBuildInfo, gpus: tuple[Gpu, ...], driver: bool, visible: str | None, good: bool, said: str) -> None:
    check = check_cuda(facts, gpus, driver, visible)
    assert check.ok is good
    assert said in check.found
    assert check.ok or check.mend


def test_driver_is_looked_for_below_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_checks, "query_torch", lambda environ: WELL)
    assert named(run_checks({}, tmp_path, tmp_path, gpus=()))["GPU"].ok
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 570\n")
    assert not named(run_checks({}, tmp_path, tmp_path, gpus=()))["GPU"].ok


@pytest.mark.parametrize(("value", "good"), [(None, True), ("4", True), ("4,2", True), ("5", False), ("0", False), ("-1", False), ("many", False)])
def test_threads(value: str | None, good: bool) -> None:
    check = check_threads(value, cores=4)
    assert (check.ok, check.mend) == (good, "" if good else "unset OMP_NUM_THREADS")


def test_little_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable: 500000 kB\n")
    check = environment_checks.check_memory(environment_checks.available_memory(tmp_path))
    assert (check.ok, check.found) == (False, "512.0 MB free")


def test_full_disk_and_small_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000_000))
    monkeypatch.setattr(environment_checks.os, "statvfs", lambda folder: SimpleNamespace(f_frsize=4096, f_blocks=16384))
    disk, shm = environment_checks.check_disk(tmp_path), environment_checks.check_shm(tmp_path)
    assert (disk.ok, "10.0 MB free" in disk.found, bool(disk.mend)) == (False, True, True)
    assert (shm.ok, shm.found, "--shm-size" in shm.mend) == (False, "67.1 MB", True)  # Docker's default
    assert environment_checks.check_shm(tmp_path / "none").ok


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    check = environment_checks.check_writable(tmp_path / "missing")
    assert (check.ok, "No such file" in check.found) == (False, True)
    assert not environment_checks.check_disk(tmp_path / "missing").ok


def test_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_checks.check_loopback().ok

    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(environment_checks.socket, "socket", type("Closed", (socket.socket,), {"bind": refuse}))
    check = environment_checks.check_loopback()
    assert (check.ok, check.found) == (False, "127.0.0.1: Cannot assign requested address")


def test_doctor_keeps_torch_out_of_this_process() -> None:
    code = (
        "import sys, meshwright.describe.environment_checks as d; d.check_loopback(); d.installed_version('torch'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
