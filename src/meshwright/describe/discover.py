"""This machine as a `Cluster`: its GPUs, or else its cores, with memory, CPU, NUMA and network as the kernel reports them.

Every file is read below `root`, so that a test's /proc and /sys can describe any machine; the environment is a parameter."""

from __future__ import annotations

import math
import os
import platform
import re
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from meshwright.core.cluster import FP8_MIN_CAPABILITY, Cluster, Device, Interface, Link, Node
from meshwright.core.errors import RequestError
from meshwright.core.quantities import show_bytes
from meshwright.describe import nvml
from meshwright.describe.catalog import find_by_driver_name

# Which launcher started this process, by its environment variables. The first match wins, so the owner of an allocation (Slurm sets PMI_SIZE too)
# comes before the tool that starts processes inside it. All variables of an entry must be set.
_SCHEDULERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("slurm", ("SLURM_JOB_ID",)),
    ("mpi", ("OMPI_COMM_WORLD_SIZE",)),
    ("mpi", ("PMI_SIZE",)),
    ("ray", ("RAY_ADDRESS",)),
    ("ray", ("RAY_JOB_ID",)),
    ("kubernetes", ("KUBERNETES_SERVICE_HOST",)),
    ("torchrun", ("TORCHELASTIC_RUN_ID",)),
    ("torchrun", ("RANK", "WORLD_SIZE")),
)

# ARM cores identify themselves by number only: (implementer, part) → name.
_ARM_CORES = {
    (0x41, 0xD03): "Arm Cortex-A53", (0x41, 0xD05): "Arm Cortex-A55", (0x41, 0xD07): "Arm Cortex-A57", (0x41, 0xD08): "Arm Cortex-A72",
    (0x41, 0xD0B): "Arm Cortex-A76", (0x41, 0xD0C): "Arm Neoverse-N1", (0x41, 0xD40): "Arm Neoverse-V1", (0x41, 0xD49): "Arm Neoverse-N2",
    (0x41, 0xD4F): "Arm Neoverse-V2", (0x41, 0xD83): "Arm Neoverse-V3AE", (0x41, 0xD84): "Arm Neoverse-V3", (0x41, 0xD8E): "Arm Neoverse-N3",
    (0x46, 0x001): "Fujitsu A64FX", (0x48, 0xD01): "HiSilicon TaiShan v110", (0x4E, 0x004): "NVIDIA Carmel", (0x51, 0x001): "Qualcomm Oryon",
    (0xC0, 0xAC3): "AmpereOne", (0xC0, 0xAC4): "AmpereOne A",
}  # fmt: skip

# Assumed until a probe measures them: common latencies between two GPUs of one node, and a PCIe 3.0 path for an unknown card.
_NVLINK_LATENCY_S, _PCIE_LATENCY_S = 5e-6, 1e-5
_UNKNOWN_PCIE = Link("PCIe", _PCIE_LATENCY_S, 12e9)
DeviceSelection = tuple[int | Literal["cpu"], ...]  # GPUs by index, and "cpu" for CPU devices beside them
_SIOCGIFADDR = 0xC0206921 if sys.platform == "darwin" else 0x8915
_NO_LIMIT = 1 << 60  # a cgroup without a limit reports a number near 2**63 (v1) or "max" (v2)


def discover(
    environ: Mapping[str, str], *, ranks: int | None = None, devices: DeviceSelection | None = None, root: Path = Path("/"),
    gpus: Sequence[nvml.Gpu] | None = None,
) -> Cluster:  # fmt: skip
    """This machine. `devices` selects by index and `ranks` sets how many; `gpus` replaces what the driver reports.

    With GPUs, one device each, plus CPU devices where `devices` names them; without, one for each core that this process may use, or `ranks` of
    them. A GPU that is named twice is shared by two ranks."""
    if ranks is not None and ranks < 1:
        raise RequestError(f"--nproc {ranks}: at least 1 process is needed")
    gpus = nvml.list_gpus(environ.get("CUDA_VISIBLE_DEVICES")) if gpus is None else gpus
    cpu, cores, free = cpu_model(root), usable_cores(root), available_memory(root)
    if gpus and not (devices and set(devices) == {"cpu"}):
        selection = _select_devices(len(gpus), ranks, devices, "GPUs")
        indices = [i for i in selection if i != "cpu"]
        selected = _devices_in_order(selection, {i: _cuda_device(i, gpus[i], free) for i in indices}, cpu, free)
        link = _gpu_link([gpus[i] for i in indices]) if len(set(indices)) == len(selection) else Node.link  # others communicate through host memory
    else:
        # More ranks than cores is allowed: slow, but it lets a laptop try out a large plan.
        devices = tuple(range(len(devices))) if devices and "cpu" in devices else devices
        selection = _select_devices(max(cores, ranks or 0, len(devices or ())), ranks, devices, "CPU devices")
        selected, link = _cpu_devices(tuple(i for i in selection if i != "cpu"), cpu, free), Node.link
    node = Node(socket.gethostname(), selected, cores, total_memory(root), cpu, numa_domains(root), interfaces(root), link)
    return Cluster("here", (node,), scheduler=scheduler(environ))


def scheduler(environ: Mapping[str, str]) -> str:
    """slurm, mpi, ray, kubernetes or torchrun when one of them started this process, else none."""
    return next((name for name, keys in _SCHEDULERS if all(key in environ for key in keys)), "none")


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, limited by its cgroup's CPU quota."""
    allowed = _affinity()
    cores = len(allowed) if allowed else os.cpu_count() or 1
    quota = min(_cpu_quotas(root), default=float(cores))
    return max(1, min(cores, int(quota)))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes can allocate now: the kernel's estimate, limited by what the cgroup still allows."""
    info = _meminfo(root)
    # Without a figure for free memory, the system and its other programs are assumed to hold half.
    available = info.get("MemAvailable", info.get("MemFree", _physical_memory() // 2))
    return max(0, min([available, *(limit - used for limit, used in _memory_limits(root))]))


def bytes_below_limit(root: Path = Path("/")) -> float:
    """Bytes that this process may still allocate by its own limit (ulimit -d); infinite without one."""
    try:
        import resource
    except ImportError:  # Windows
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    used = re.search(r"^VmData:\s*(\d+)", _read_text(root / "proc/self/status"), re.MULTILINE)
    return math.inf if limit == resource.RLIM_INFINITY or used is None else max(0, limit - 1024 * int(used[1]))


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of memory in this machine, or in the share of it that the cgroup allows."""
    total = _meminfo(root).get("MemTotal", _physical_memory())
    return min([total, *(limit for limit, _ in _memory_limits(root))])


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name, from the kernel or else from Python's platform module."""
    fields: dict[str, str] = {}
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    for key in ("model name", "cpu", "uarch"):  # x86; POWER and s390; RISC-V
        if fields.get(key):
            return fields[key]
    if "CPU implementer" in fields and "CPU part" in fields:
        code = int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
        return _ARM_CORES.get(code, f"Arm core {code[0]:#04x}/{code[1]:#05x}")
    return platform.processor() or platform.machine() or "unknown CPU"


def numa_domains(root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """The cores that this process may use, by NUMA domain; domains without cores are omitted."""
    allowed = _affinity()
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    lists = (cpu_list(_read_text(folder / "cpulist")) for folder in folders)
    domains = (tuple(core for core in cores if not allowed or core in allowed) for cores in lists)
    return tuple(filter(None, domains))


def cpu_list(text: str) -> tuple[int, ...]:
    """'0-3,8' → (0, 1, 2, 3, 8): the kernel's notation for sets of cores."""
    cores: list[int] = []
    for interval in filter(None, text.strip().split(",")):
        first, _, last = interval.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def interfaces(root: Path = Path("/")) -> tuple[Interface, ...]:
    """Network interfaces that are not down, without the loopback; the fastest first."""
    folder = root / "sys/class/net"
    if folder.is_dir():
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _read_text(entry / "operstate").strip() != "down")
    else:
        names = [name for _, name in socket.if_nameindex()]
    all_interfaces = [Interface(name, _ipv4(name), _bits_per_s(folder / name)) for name in names if not re.fullmatch(r"lo\d*", name)]
    return tuple(sorted(all_interfaces, key=lambda interface: -interface.bits_per_s))


def _select_devices(count: int, ranks: int | None, devices: DeviceSelection | None, kind: str) -> DeviceSelection:
    """Which of `count` devices to use: those in `devices`, or all, and the first `ranks` of these."""
    selection: DeviceSelection = tuple(range(count)) if devices is None else devices
    unknown = [index for index in selection if index != "cpu" and not 0 <= index < count]
    option = f"--devices {','.join(map(str, selection))}"
    if unknown or not selection:
        problem = f"there is no device {unknown[0]}" if unknown else "no device is named"
        valid = "0" if count == 1 else f"0..{count - 1}"
        raise RequestError(f"{option}: {problem}; this machine has {count} {kind}, valid: {valid}")
    if len(set(selection)) < len(selection) and kind != "GPUs":
        raise RequestError(f"{option}: a device is named twice; name each once")
    if ranks is not None and ranks > len(selection):
        other = ", or add CPUs (--devices 0,cpu,cpu)" if kind == "GPUs" else ""
        raise RequestError(f"--nproc {ranks}: there are {len(selection)} {kind} to use; give 1..{len(selection)}{other}")
    return selection[:ranks]


def _cuda_device(index: int, gpu: nvml.Gpu, host_memory: int) -> Device:
    sheet = find_by_driver_name(gpu.name)
    # A GPU that reports no memory of its own shares the host's.
    total, free = (gpu.memory_total, gpu.memory_free) if gpu.memory_total else (host_memory, host_memory)
    origin = sheet.source if sheet else "no data sheet known: measure it with `describe cluster --probe`"
    source, fp8 = f"{origin}; {show_bytes(free)} of {show_bytes(total)} free now", gpu.compute_capability >= FP8_MIN_CAPABILITY
    peak_flops, bandwidth = (dict(sheet.peak_flops), sheet.memory_bandwidth) if sheet else ({}, 0.0)
    return Device("cuda", gpu.name, index, total, peak_flops, bandwidth, source, fp8)


def _devices_in_order(selection: DeviceSelection, gpus: Mapping[int, Device], cpu: str, memory: int) -> tuple[Device, ...]:
    """Devices in the order they were named. Ranks on one GPU divide its memory, and CPU ranks the host's."""
    num_ranks = Counter(selection)
    cpus = iter(_cpu_devices(tuple(range(num_ranks["cpu"])), cpu, memory))
    return tuple(next(cpus) if i == "cpu" else replace(gpus[i], memory_bytes=gpus[i].memory_bytes // num_ranks[i]) for i in selection)


def _gpu_link(gpus: Sequence[nvml.Gpu]) -> Link:
    """The slowest link between two of `gpus`: NVLink where all have it, else PCIe through the host."""
    sheets = [sheet for gpu in gpus if (sheet := find_by_driver_name(gpu.name)) is not None]
    if len(sheets) < len(gpus):
        return _UNKNOWN_PCIE
    if all(gpu.nvlinks_active for gpu in gpus):
        slowest = min(sheets, key=lambda sheet: sheet.link_bandwidth)
        return Link(slowest.link, _NVLINK_LATENCY_S, slowest.link_bandwidth)
    return Link("PCIe", _PCIE_LATENCY_S, min(sheet.host_bandwidth for sheet in sheets))


def _cpu_devices(indices: tuple[int, ...], cpu: str, memory: int) -> tuple[Device, ...]:
    origin = "share of the memory available now; no data sheet: measure it with `describe cluster --probe`"
    return tuple(Device("cpu", cpu, index, memory // len(indices), source=origin) for index in indices)


def _affinity() -> frozenset[int]:
    """Cores the OS may schedule this process on; empty where the system has no affinity (macOS)."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", _read_text(root / "proc/meminfo"), re.MULTILINE)
    return {key: int(value) * 1024 for key, value in lines}


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and its ancestors, in v2 and in `controller`'s v1 tree: the tightest limit of them applies.

    Inside a container the path may be the host's and not exist here; the root, which always exists, is then the container's own."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        if not mount.is_dir():  # v1 mounts cpu and cpuacct together; the short name is a symlink that not every system has
            mount = mount.parent / controllers
        folder = mount / path.strip().lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = _read_text(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = _read_text(folder / "cpu.cfs_quota_us").strip(), _read_text(folder / "cpu.cfs_period_us").strip()
        # "max" and -1 both mean no quota.
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each cgroup with a limit."""
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, used_file in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit = _read_text(folder / limit_file).strip()
            if not limit.isdigit() or int(limit) >= _NO_LIMIT:
                continue
            used = int(_read_text(folder / used_file).strip() or 0)
            # Cached file pages count as used but are reclaimed as soon as a process needs memory. v1 has a total_ for the whole subtree.
            stat = dict(line.split() for line in _read_text(folder / "memory.stat").splitlines() if line.count(" ") == 1)
            yield int(limit), max(0, used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))


def _bits_per_s(folder: Path) -> float:
    speed = _read_text(folder / "speed").strip()  # Mbit/s; -1, or an error on reading, when the driver does not know
    return float(speed) * 1e6 if speed.isdigit() else 0.0


def _ipv4(name: str) -> str:
    """The interface's address; '' when it has none."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except (ImportError, OSError):
        return ""
    return socket.inet_ntoa(answer[20:24])


def _read_text(path: Path) -> str:
    """The file's text; '' when it is missing or unreadable, which is normal on other systems."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
