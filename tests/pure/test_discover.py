"""Discovery on made-up /proc and /sys trees, and once on this machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.serialization import from_data, to_data
from meshwright.describe import discover as module
from meshwright.describe.discover import (
    available_memory,
    cpu_list,
    cpu_model,
    discover,
    interfaces,
    numa_domains,
    scheduler,
    total_memory,
    usable_cores,
)
from meshwright.describe.nvml import Gpu

GIB = 1 << 30
H200 = Gpu(0, "NVIDIA H200", "GPU-aa", 150_754_820_096, 150_000_000_000, (9, 0), 18)
L4 = Gpu(1, "NVIDIA L4", "GPU-bb", 24_152_899_584, 20_000_000_000, (8, 9), 0)
STRANGE = Gpu(2, "NVIDIA X9000", "GPU-cc", 10 * GIB, 9 * GIB, (15, 0), 4)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total: int, available: int) -> str:
    return f"MemTotal:       {total // 1024} kB\nMemFree:        1 kB\nMemAvailable:   {available // 1024} kB\n"


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.fixture
def machine(tmp_path: Path, eight_cores: None) -> Path:
    """Two NUMA domains with 8 of 16 cores allowed, 64 GiB, an Ethernet and an InfiniBand card."""
    return tree(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\n\nprocessor\t: 1\nmodel name\t: other\n",
            "proc/meminfo": meminfo(64 * GIB, 48 * GIB),
            "proc/self/cgroup": "0::/\n",
            "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
            "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
            "sys/devices/system/node/node2/cpulist": "\n",
            "sys/class/net/lo/operstate": "unknown\n",
            "sys/class/net/mw-eth0/operstate": "up\n",
            "sys/class/net/mw-eth0/speed": "1000\n",
            "sys/class/net/mw-ib0/operstate": "up\n",
            "sys/class/net/mw-ib0/speed": "200000\n",
            "sys/class/net/mw-wifi0/operstate": "up\n",
            "sys/class/net/mw-wifi0/speed": "-1\n",
            "sys/class/net/mw-gone/operstate": "down\n",
            "sys/class/net/bonding_masters": "bond0\n",
        },
    )


def test_cpu_machine(machine: Path) -> None:
    cluster = discover({}, root=machine, gpus=())
    (node,) = cluster.nodes
    assert (cluster.name, cluster.scheduler) == ("here", "none")
    assert (node.cores, node.memory_bytes, node.cpu) == (8, 64 * GIB, "AMD EPYC 7763 64-Core Processor")
    assert node.numa == ((0, 1, 2, 3), (4, 5, 6, 7))  # the cores outside the affinity, and the domain without cores, are left out
    assert [(i.name, i.bits_per_s) for i in node.interfaces] == [("mw-ib0", 2e11), ("mw-eth0", 1e9), ("mw-wifi0", 0.0)]
    assert [d.index for d in node.devices] == list(range(8))
    assert {(d.kind, d.name, d.memory_bytes) for d in node.devices} == {("cpu", node.cpu, 6 * GIB)}
    assert from_data(Cluster, to_data(cluster), "cluster.json") == cluster


def test_ranks_share_the_memory(machine: Path) -> None:
    assert [d.memory_bytes for d in discover({}, ranks=2, root=machine, gpus=()).devices] == [24 * GIB] * 2
    assert len(discover({}, ranks=12, root=machine, gpus=()).devices) == 12  # more than cores: allowed
    picked = discover({}, devices=(1, 5), root=machine, gpus=()).devices
    assert [(d.index, d.memory_bytes) for d in picked] == [(1, 24 * GIB), (5, 24 * GIB)]
    assert [d.index for d in discover({}, ranks=1, devices=(1, 5), root=machine, gpus=()).devices] == [1]


def test_gpu_machine(machine: Path) -> None:
    cluster = discover({}, root=machine, gpus=(H200, H200))
    first, second = cluster.devices
    assert (first.kind, first.index, first.memory_bytes) == ("cuda", 0, H200.memory_total)
    assert first.peak_flops["bf16"] == 989.5e12
    assert first.memory_bandwidth == 4.8e12
    assert "H200" in first.source
    assert "150.0 GB of 150.8 GB free now" in first.source
    assert second.index == 1
    assert (cluster.nodes[0].link.name, cluster.nodes[0].link.bandwidth) == ("NVLink 4", 450e9)


def test_unequal_gpus_meet_over_the_host(machine: Path) -> None:
    assert discover({}, root=machine, gpus=(H200, L4)).nodes[0].link.bandwidth == 32e9
    link = discover({}, root=machine, gpus=(H200, STRANGE)).nodes[0].link
    assert (link.name, link.bandwidth) == ("PCIe", 12e9)


def test_a_gpu_without_a_data_sheet_has_no_invented_figures(machine: Path) -> None:
    (device,) = discover({}, root=machine, gpus=(STRANGE,)).devices
    assert (dict(device.peak_flops), device.memory_bandwidth, device.memory_bytes) == ({}, 0.0, 10 * GIB)
    assert "no data sheet" in device.source


def test_a_gpu_that_shares_the_hosts_memory(machine: Path) -> None:
    shared = Gpu(0, "NVIDIA GB10", "GPU-dd", 0, 0, (12, 1), 0)
    assert discover({}, root=machine, gpus=(shared,)).devices[0].memory_bytes == 48 * GIB


def test_picking_gpus(machine: Path) -> None:
    def indices(ranks: int | None, devices: tuple[int, ...] | None) -> list[int]:
        return [d.index for d in discover({}, ranks=ranks, devices=devices, root=machine, gpus=(H200, L4, STRANGE)).devices]

    assert indices(None, (0, 2)) == [0, 2]
    assert indices(None, (2, 0)) == [2, 0]
    assert indices(2, None) == [0, 1]
    for ranks, devices, said in (
        (None, (0, 3), r"--devices 0,3: there is no device 3; this machine has 3 GPUs, valid: 0\.\.2"),
        (None, (-1,), "no device -1"),
        (None, (), "no device is named"),
        (4, None, r"--nproc 4: there are 3 GPUs to use; give 1\.\.3.*--devices 0,cpu"),
        (2, (1,), r"give 1\.\.1"),
        (0, None, "at least 1"),
    ):
        with pytest.raises(RequestError, match=said):
            indices(ranks, devices)


def test_wrong_cpu_devices(machine: Path) -> None:
    with pytest.raises(RequestError, match=r"no device 8; this machine has 8 CPU devices, valid: 0\.\.7"):
        discover({}, devices=(8,), root=machine, gpus=())
    with pytest.raises(RequestError, match="--nproc 3: there are 2 CPU devices"):
        discover({}, ranks=3, devices=(0, 1), root=machine, gpus=())


def test_hidden_gpus_are_asked_for_by_the_environment_given(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(module.nvml, "list_gpus", lambda visible: asked.append(visible) or ())
    discover({"CUDA_VISIBLE_DEVICES": "1"}, root=machine)
    discover({}, root=machine)
    assert asked == ["1", None]


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "200000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2),  # the parent's is tighter
        ("0::/not/here\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),  # the host's path, seen in a container
        ("3:memory:/x\n2:cpu:/j\n", {"sys/fs/cgroup/cpu/j/cpu.cfs_quota_us": "200000\n", "sys/fs/cgroup/cpu/j/cpu.cfs_period_us": "100000\n"}, 2),
        ("2:cpu,cpuacct:/\n", {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "500000", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 5),
        ("2:cpu:/\n", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("", {}, 8),
    ],
)
def test_cpu_quota(tmp_path: Path, eight_cores: None, cgroup: str, files: dict[str, str], cores: int) -> None:
    assert usable_cores(tree(tmp_path, {"proc/self/cgroup": cgroup, **files})) == cores


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "available"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, 64 * GIB, 48 * GIB),
        # 16 of a limit of 20 GiB are in use, 10 of these by the page cache: 20 − (16 − 10) can still be had.
        (
            "0::/job\n",
            {
                "sys/fs/cgroup/job/memory.max": f"{20 * GIB}\n",
                "sys/fs/cgroup/job/memory.current": f"{16 * GIB}\n",
                "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {10 * GIB}\n",
            },
            20 * GIB,
            14 * GIB,
        ),
        (
            "4:memory:/job\n",
            {
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{20 * GIB}\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{16 * GIB}\n",
                "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            20 * GIB,
            6 * GIB,
        ),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "2000\n"}, 1000, 0),
    ],
)
def test_memory_limit(tmp_path: Path, cgroup: str, files: dict[str, str], total: int, available: int) -> None:
    root = tree(tmp_path, {"proc/meminfo": meminfo(64 * GIB, 48 * GIB), "proc/self/cgroup": cgroup, **files})
    assert (total_memory(root), available_memory(root)) == (total, available)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "Arm Neoverse-N1"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "Arm Neoverse-V2"),
        ("CPU implementer\t: 0x46\nCPU part\t: 0x001\n", "Fujitsu A64FX"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xfff\n", "Arm core 0x41/0xfff"),
        ("processor : 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("", platform.processor() or platform.machine()),
    ],
)
def test_cpu_model(tmp_path: Path, cpuinfo: str, name: str) -> None:
    assert cpu_model(tree(tmp_path, {"proc/cpuinfo": cpuinfo})) == name


def test_cpu_list() -> None:
    assert cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert cpu_list("\n") == ()


def test_numa_domains_are_in_numeric_order(tmp_path: Path, eight_cores: None) -> None:
    files = {f"sys/devices/system/node/node{n}/cpulist": f"{core}\n" for n, core in ((10, 2), (9, 1), (0, 0))}
    assert numa_domains(tree(tmp_path, files)) == ((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "none"),
        ({"SLURM_JOB_ID": "7"}, "slurm"),
        ({"SLURM_JOB_ID": "7", "PMI_SIZE": "4"}, "slurm"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpi"),
        ({"PMI_SIZE": "4"}, "mpi"),
        ({"RAY_ADDRESS": "auto"}, "ray"),
        ({"RAY_JOB_ID": "01"}, "ray"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RANK": "0", "WORLD_SIZE": "2"}, "kubernetes"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
        ({"RANK": "0"}, "none"),
    ],
)
def test_scheduler(environ: dict[str, str], name: str) -> None:
    assert scheduler(environ) == name


def test_a_system_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: no /proc, no /sys, no affinity."""
    monkeypatch.delattr(module.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 10)
    monkeypatch.setattr(module.os, "sysconf", lambda key: {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 1 << 14}[key])
    monkeypatch.setattr(module.socket, "if_nameindex", lambda: [(1, "lo0"), (2, "en-made-up")])
    (node,) = discover({}, root=tmp_path, gpus=()).nodes
    assert (node.cores, len(node.devices), node.memory_bytes) == (10, 10, 16 * GIB)
    assert node.devices[0].memory_bytes == 8 * GIB // 10
    assert [i.name for i in node.interfaces] == ["en-made-up"]
    assert node.numa == ()
    assert node.cpu


def test_this_machine() -> None:
    (node,) = discover(os.environ, gpus=()).nodes
    assert 1 <= node.cores <= (os.cpu_count() or 1)
    assert 0 < sum(d.memory_bytes for d in node.devices) <= node.memory_bytes
    assert all(i.name != "lo" for i in interfaces())
    assert node.name == platform.node()


def test_describing_a_machine_imports_no_torch() -> None:
    """A supervisor that imported torch or CUDA before it forks would hand both to every worker."""
    code = "import sys, meshwright.describe.discover as d; d.discover({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
