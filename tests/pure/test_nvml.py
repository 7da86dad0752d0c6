"""NVML through a made-up library, and the rules of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.errors import RequestError
from meshwright.describe import nvml
from meshwright.describe.catalog import datasheet, datasheets, find_by_driver_name, find_datasheet
from meshwright.describe.nvml import Gpu, list_gpus, select_visible

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]
CARDS = (
    Gpu(0, "NVIDIA H200", UUIDS[0], 150_754_820_096, 150_000_000_000, (9, 0), 18),
    Gpu(1, "NVIDIA H200", UUIDS[1], 150_754_820_096, 20_000_000_000, (9, 0), 18),
    Gpu(2, "NVIDIA L4", UUIDS[2], 24_152_899_584, 24_000_000_000, (8, 9), 0),
)


class FakeNvml:
    """Answers like libnvidia-ml: writes through the pointers it is given and returns 0, or an error code for what is in `broken`."""

    def __init__(self, cards: tuple[Gpu, ...], broken: tuple[str, ...] = ()) -> None:
        self.cards, self.broken, self.open = cards, broken, 0

    def _code(self, name: str) -> int:
        return 3 if name in self.broken else 0

    def nvmlInit_v2(self) -> int:
        self.open += self._code("init") == 0
        return self._code("init")

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return self._code("count")

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 100
        return self._code(f"handle{index.value}")

    def _card(self, handle: Any) -> Gpu:
        return self.cards[handle.value - 100]

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        assert len(self._card(handle).name) < size.value == len(buffer)
        buffer.value = self._card(handle).name.encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = self._card(handle).uuid.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        if not self._code("memory"):
            memory._obj.total, memory._obj.free = self._card(handle).memory_total, self._card(handle).memory_free
        return self._code("memory")

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._card(handle).compute_capability
        return 0

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, state: Any) -> int:
        # Links that a card does not have are an error (2: invalid argument), not "inactive".
        active = link.value < self._card(handle).nvlinks_active
        state._obj.value = int(active)
        return 0 if active else 2


def test_reads_every_field() -> None:
    library = FakeNvml(CARDS)
    assert list_gpus(library=library) == CARDS
    assert library.open == 0  # shut down again


def test_the_driver_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML leaves a thread behind; the process that forks workers must have none."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout=json.dumps([asdict(card) for card in CARDS]))

    monkeypatch.setattr(nvml, "_load_library", lambda: FakeNvml(CARDS, broken=("init",)))  # an answer can only come from the other process
    monkeypatch.setattr(nvml.subprocess, "run", run)
    assert list_gpus("2") == (CARDS[2],)
    assert asked == [[sys.executable, "-I", nvml.__file__]]

    def hang(command: list[str], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(nvml.subprocess, "run", hang)
    assert list_gpus() == ()


def test_the_module_runs_as_a_script_without_the_package() -> None:
    answer = subprocess.run([sys.executable, "-I", "-S", nvml.__file__], capture_output=True, text=True, timeout=60, check=True)
    assert len(json.loads(answer.stdout)) == len(list_gpus())


@pytest.mark.parametrize(("visible", "left"), [("2,0", (2, 0)), ("GPU-c,GPU-aa", (2, 0)), ("", ()), ("-1", ())])
def test_visible_gpus_keep_their_order_and_index(visible: str, left: tuple[int, ...]) -> None:
    assert tuple(gpu.index for gpu in list_gpus(visible, FakeNvml(CARDS))) == left


def test_no_driver_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(CARDS, broken=("init",))
    assert list_gpus(library=library) == ()
    assert library.open == 0

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert list_gpus() == ()


def test_shuts_down_when_counting_fails() -> None:
    library = FakeNvml(CARDS, broken=("count",))
    assert list_gpus(library=library) == ()
    assert library.open == 0


def test_a_lost_gpu_is_left_out_and_an_unknown_field_is_zero() -> None:
    assert [gpu.index for gpu in list_gpus(library=FakeNvml(CARDS, broken=("handle1",)))] == [0, 2]
    assert list_gpus("0", FakeNvml(CARDS, broken=("memory",))) == (replace(CARDS[0], memory_total=0, memory_free=0),)


@pytest.mark.parametrize(
    ("visible", "positions"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", [1]),
        (" 2 , 0 ", [2, 0]),
        ("0,-1,1", [0]),  # the first invalid entry ends the list
        ("0,7,1", [0]),
        ("0,0", []),  # a repeated one empties it
        ("1gpu", [1]),  # read like strtoul
        ("GPU-cc33", [2]),
        ("GPU-ab,GPU-c", [1, 2]),
        ("GPU-a", []),  # two match
        ("GPU-cc33,GPU-zz,GPU-aa11", [2]),
        ("MIG-GPU-aa11/1/0", []),
    ],
)
def test_visibility(visible: str | None, positions: list[int]) -> None:
    assert select_visible(visible, UUIDS) == positions


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800 PCIe", "h800-pcie"),
        ("NVIDIA A100-SXM-64GB", "a100-sxm-64gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD EPYC 7763 64-Core Processor", "epyc-7763"),
        ("Intel(R) Xeon(R) Platinum 8480+", "xeon-8480+"),
    ],
)
def test_catalog_knows_the_names_drivers_report(name: str, key: str) -> None:
    assert find_by_driver_name(name) is datasheet(key)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40",
        "GeForce RTX 3090 Ti",
        "GeForce RTX 4090 Laptop GPU",
        "GeForce RTX 4090 D",
        "Tesla T40",
        "NVIDIA A10G",
        "NVIDIA H20-3e",
        "NVIDIA GB300-WS",
        "",
    ],
)
def test_catalog_takes_no_other_product_for_it(name: str) -> None:
    assert find_by_driver_name(name) is None


def test_catalog_figures_are_consistent() -> None:
    for key, known in datasheets().items():
        flops = [known.peak_flops[p] for p in ("fp64", "fp32", "tf32", "bf16", "fp8", "fp4") if p in known.peak_flops]
        assert flops == sorted(flops), f"{key}: a narrower format is never slower"
        assert 2e11 < known.memory_bandwidth < 1e13, key
        assert 1e10 < known.host_bandwidth <= 4.5e11, key
        assert known.link_bandwidth < known.memory_bandwidth, key
        assert known.source[-4:].isdigit() or "20" in known.source, f"{key}: the source has a year"
        if known.kind == "cuda":
            assert known.peak_flops.get("bf16", known.peak_flops["fp16"]) == known.peak_flops["fp16"], key
            assert 1e10 < known.memory_bytes < 3.2e11, key


# Each with 2:4 sparsity in the same data sheet: twice as much.
DENSE = {"a100-sxm-80gb": 312, "h100-sxm": 989.5, "h100-pcie": 756.5, "b200": 2250, "l4": 121, "l40s": 362.05, "rtx-4090": 165.2, "mi300x": 1307.4}


@pytest.mark.parametrize("key", DENSE)
def test_catalog_has_the_figures_without_sparsity(key: str) -> None:
    assert datasheet(key).peak_flops["bf16"] == DENSE[key] * 1e12


@pytest.mark.parametrize(
    ("text", "memory_gb", "key"),
    [
        ("H100", None, "h100-sxm"),
        ("H100", 80, "h100-sxm"),
        ("H100", 94, "h100-nvl"),
        ("H100 PCIe", None, "h100-pcie"),
        ("A100", None, "a100-sxm-80gb"),
        ("A100", 40, "a100-sxm-40gb"),
        ("A100-80GB", None, "a100-sxm-80gb"),
        ("A100-SXM4-40GB", None, "a100-sxm-40gb"),
        ("A100 PCIe 80 GB", None, "a100-pcie-80gb"),
        ("V100", 32, "v100-sxm2-32gb"),
        ("A800", None, "a800-sxm-80gb"),
        ("H200", 141, "h200"),
        ("MI250X", None, "mi250x"),
        ("MI250X", 128, "mi250x"),
        ("GB200", None, "gb200"),
        ("GH200", 96, "gh200"),
        ("RTX 4090", None, "rtx-4090"),
        ("A6000", None, "rtx-a6000"),
        ("RTX 6000 Ada", None, "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 5090", None, "rtx-5090"),
        ("EPYC 9654", None, "epyc-9654"),
    ],
)
def test_catalog_knows_the_names_tables_use(text: str, memory_gb: float | None, key: str) -> None:
    assert find_datasheet(text, memory_gb) is datasheet(key)


@pytest.mark.parametrize(
    ("text", "memory_gb", "said"), [("A100", 48, "there is a100-sxm-80gb 80 GB"), ("H10", None, "unknown device 'H10'"), ("", None, "unknown device")]
)
def test_a_name_that_no_device_has(text: str, memory_gb: float | None, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        find_datasheet(text, memory_gb)


def test_catalog_figures() -> None:
    assert datasheet("h200").peak_flops["bf16"] == 989.5e12
    assert datasheet("b200").link_bandwidth == 900e9
