"""Clusters by name and by file: what they resolve to, and what is said of a file that is wrong."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.fabric import Dragonfly
from meshwright.core.quantities import parse_flops, parse_rate, parse_seconds
from meshwright.core.serialization import from_data, to_data
from meshwright.cost.constants import NEWEST_GENERATION, load_fitted_constants
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.describe.cluster_file import key_lines, parse_cluster
from meshwright.describe.cluster_resolver import catalog_cluster, machine_names, resolve_cluster

GUIDE = Path(__file__).parents[2] / "docs" / "clusters.md"
EXAMPLE = re.search(r"```toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[1]  # type: ignore[index]


def test_the_example_of_the_guide() -> None:
    found = parse_cluster(EXAMPLE, "lab.toml", "lab")
    assert [len(node.devices) for node in found.nodes] == [4, 4, 2]
    assert [d.name for d in found.devices[-2:]] == ["GeForce RTX 4090", "GeForce RTX 3090"]
    assert found.devices[-1].memory_bytes == 20 * 10**9
    assert found.devices[0].memory_bytes == 80 * 2**30
    assert found.group_bandwidth((0, 1, 2, 3)).rate == pytest.approx(3 * 74e9)
    assert found.group_bandwidth((0, 4)).rate == pytest.approx(12.5e9 * 0.8 / 4), "four ranks of each node share its card"
    assert found.group_bandwidth((0, 4), all_groups_active=False).rate == pytest.approx(12.5e9 * 0.8)
    assert found.group_bandwidth((8, 9)).rate == 12e9
    rates = datasheet_calibration(found).rates_for(8)
    large = rates.compute_rate("matmul", "bf16", 1e14)
    assert large == pytest.approx(load_fitted_constants().constants("ampere", NEWEST_GENERATION).matmul * 71e12, rel=0.02), "the slowest card decides"


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_of_the_catalog(name: str) -> None:
    found = catalog_cluster(name, 2) if name != "workstation" else catalog_cluster(name)
    assert "20" in found.source, "where the figures come from, with a year"
    assert from_data(Cluster, to_data(found), name) == found
    for ranks in (tuple(range(len(found.nodes[0].devices))), tuple(range(len(found.devices)))):
        for pattern in ("ring", "all_to_all"):
            assert 0 < found.group_bandwidth(ranks, pattern).rate < 1e12  # type: ignore[arg-type]
    assert datasheet_calibration(found).layouts[0].compute["matmul/bf16"]


def test_the_catalog_has_what_the_guide_lists() -> None:
    assert set(machine_names()) == {
        "alps", "dgx-a100", "dgx-b200", "dgx-h100", "dgx-h200", "frontier", "gb200-nvl72", "gb300-nvl72", "leonardo", "perlmutter",
        "workstation", "zaratan",
    }  # fmt: skip
    assert all(name in GUIDE.read_text(encoding="utf-8") for name in machine_names())


def test_whole_machines() -> None:
    sizes = {
        name: len(catalog_cluster(name).devices) for name in ("leonardo", "alps", "frontier", "zaratan", "workstation", "dgx-h100", "gb200-nvl72")
    }
    assert sizes == {"leonardo": 13824, "alps": 10752, "frontier": 75264, "zaratan": 80, "workstation": 2, "dgx-h100": 8, "gb200-nvl72": 72}


def test_frontier_has_the_global_bandwidth_that_was_published() -> None:
    """57% of what a group's cards inject leaves it (Atchley et al., 2023), spread over the other 73 groups."""
    fabric = catalog_cluster("frontier").fabric
    assert isinstance(fabric, Dragonfly)
    injected = fabric.switch * fabric.group * fabric.ports * fabric.link.bandwidth
    assert 73 * fabric.global_links * fabric.between.bandwidth / injected == pytest.approx(0.57, abs=0.005)


# Means of public tables of NCCL all-reduce on A100 (vTrain; Echo): (GPUs, bytes) → seconds. Eight a node, NVSwitch, HDR.
MEASURED = {
    (8, 2**22): 101e-6, (8, 2**24): 234e-6, (8, 2**26): 573e-6, (8, 2**28): 2.13e-3, (8, 2**30): 8.17e-3,
    (4, 2**26): 531e-6, (4, 2**30): 7.22e-3, (2, 2**26): 397e-6, (2, 2**30): 5.32e-3,
    (16, 2**24): 367e-6, (16, 2**26): 1.124e-3, (16, 2**30): 16.17e-3, (32, 2**28): 4.069e-3, (32, 2**30): 16.56e-3,
    (64, 2**26): 1.469e-3, (64, 2**30): 17.1e-3, (128, 2**26): 1.431e-3, (128, 2**28): 4.786e-3, (128, 2**30): 16.59e-3,
}  # fmt: skip


def test_all_reduce_on_a100_is_near_what_was_measured() -> None:
    found, errors = catalog_cluster("dgx-a100", 16), []
    for (gpus, size), seconds in MEASURED.items():
        predicted = found.group_bandwidth(range(gpus), all_groups_active=False).alpha_beta("all_reduce").seconds(2 * (gpus - 1) / gpus * size)
        errors.append(abs(predicted / seconds - 1))
    assert sum(errors) / len(errors) < 0.09
    assert max(errors) < 0.2


def test_a_hundred_thousand_devices_are_cheap() -> None:
    begun = time.process_time()
    found = catalog_cluster("dgx-h100", 12500)
    assert len(found.devices) == 100_000
    assert found.node_of(99_999) is found.nodes[-1]
    assert found.group_bandwidth(range(0, 100_000, 8)).rate == pytest.approx(40e9)
    assert found.group_bandwidth(range(100_000)).rate == pytest.approx(320e9)
    assert found.least_memory(99_999) == found.devices[0].memory_bytes
    assert len(found.first_devices(50_003).devices) == 50_003
    assert time.process_time() - begun < 2.0  # a fifth of that on a quiet core


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mars", "unknown cluster 'mars'"),
        ("dgx-h100:x", "write it like dgx-h100:4"),
        ("dgx-h100:0", "write it like dgx-h100:4"),
        ("ideal:", "write it like ideal:64"),
        ("leonardo:9999", "the machine has 3456 nodes; use 1..3456"),
        ("nowhere.toml", "nowhere.toml: No such file"),
    ],
)
def test_names_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        resolve_cluster(text, {})


def test_ideal_and_here() -> None:
    assert len(resolve_cluster("ideal:5", {}).devices) == 5
    assert len(resolve_cluster("ideal", {}, ranks=3).devices) == 3
    assert resolve_cluster("ideal:5", {}).link_between((0, 4)).bandwidth > 1e15
    assert resolve_cluster("here", {}, ranks=2).name == "here"
    assert len(resolve_cluster("dgx-h100:2", {}, ranks=9).devices) == 9


WRONG = {
    "unit": ('memory = "512 GB"', 'memory = "512 Gb"', "lab.toml:9: nodes[0].memory: '512 Gb' is not a size; write it like 24GB or 512MiB"),
    "rate": (
        '"100 Gb/s"',
        '"100 GHz"',
        "lab.toml:23: network.bandwidth: '100 GHz' is not a bandwidth; write it like 300 GB/s (bytes) or 200 Gb/s (bits)",
    ),
    "time": ('latency = "20 us"', 'latency = "20 bytes"', "lab.toml:24: network.latency: '20 bytes' is not a time; write it like 2 us or 1.5 ms"),
    "no unit": ('"128 GB"', "128", "lab.toml:17: nodes[1].memory: 128 has no unit; write it in quotes with one"),
    "bare": ('"128 GB"', '"128"', "lab.toml:17: nodes[1].memory: 128 has no unit; write it in quotes with one"),
    "inline": ('"12 GB/s"', '"12 GBs"', "lab.toml:18: nodes[1].inside.bandwidth: '12 GBs' is not a bandwidth"),
    "device": ('"RTX 4090"', '"RTX 4091"', "lab.toml:15: nodes[1].devices[0]: unknown device 'RTX 4091'; did you mean 'rtx-4090'?"),
    "key": ("cores = 16", "coers = 16", "lab.toml:16: nodes[1]: unknown key 'coers'; did you mean 'cores'?"),
    "inner key": ('kind = "flat"', "prots = 2", "lab.toml:21: network: unknown key 'prots'; did you mean 'ports'?"),
    "kind": ('kind = "flat"', 'kind = "star"', "lab.toml:20: network: found"),
    "no inside": ('inside = { bandwidth = "12 GB/s", latency = "10 us" }', "", "lab.toml:13: nodes[1]: 2 devices and no link between them"),
    "no latency": ('latency = "20 us"', "", "lab.toml:20: network: the key 'latency' is missing"),
    "count": ("count = 2", "count = 0", "lab.toml:6: nodes[0].count: found 0: input should be greater than or equal to 1"),
    "efficiency": ("efficiency = 0.8", "efficiency = 80", "lab.toml:25: network.efficiency: found 80"),
    "syntax": ("cores = 64", "cores 64", "lab.toml:8: not TOML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(case: str) -> None:
    old, new, said = WRONG[case]
    assert EXAMPLE.count(old) >= 1
    with pytest.raises(RequestError) as raised:
        parse_cluster(EXAMPLE.replace(old, new, 1), "lab.toml", "lab")
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


def test_nodes_without_a_network_and_too_small_a_torus() -> None:
    with pytest.raises(RequestError, match=r"lab.toml:1: 3 nodes and no \[network\]"):
        parse_cluster(EXAMPLE.split("[network]")[0], "lab.toml", "lab")
    torus = EXAMPLE.replace('kind = "flat"', 'kind = "torus"\nshape = [1, 2]')
    with pytest.raises(RequestError, match="2 positions for 3 nodes"):
        parse_cluster(torus, "lab.toml", "lab")
    with pytest.raises(RequestError, match="2 kinds of nodes"):
        parse_cluster(EXAMPLE, "lab.toml", "lab", nodes=4)


def test_lines_of_keys() -> None:
    lines = key_lines("a = 1\n[[nodes]]\nb = 2\n[nodes.inside]\nc = 3\n[[nodes]]\nb = 4\n[network]\nd = 5\n")
    wanted = {("a",): 1, ("nodes", 0): 2, ("nodes", 0, "b"): 3, ("nodes", 0, "inside", "c"): 5, ("nodes", 1, "b"): 7, ("network", "d"): 9}
    assert {path: lines[path] for path in wanted} == wanted


def test_quantities() -> None:
    assert parse_rate("200 Gb/s") == parse_rate("200 Gbit/s") == parse_rate("25 GB/s") == 25e9
    assert parse_rate("1GiB/s") == 2**30
    assert parse_seconds("2 us") == parse_seconds("2µs") == pytest.approx(2e-6)
    assert parse_flops("312 TFLOP/s") == parse_flops("312TFLOPS") == pytest.approx(3.12e14)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, RequestError):
        return RequestError.exit_code, str(result.exception)
    return result.exit_code, result.output


def test_describe_another_cluster(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(EXAMPLE, encoding="utf-8")
    code, said = run("describe", "cluster", "--cluster", str(file), "--json")
    found = json.loads(said)
    assert code == 0
    assert (found["devices"], found["counts"]) == (10, [2, 1])
    assert found["reach"]["the ranks of a node"]["ring"]["rate"] == pytest.approx(222e9)
    code, said = run("describe", "cluster", "--cluster", "leonardo:64")
    assert code == 0 and "256 devices on 64 nodes" in said and "HDR100" in said
    code, said = run("describe", "cluster", "--cluster", "leonardo:64", "--probe")
    assert code == 2 and "--probe" in said


def test_a_proxy_on_another_cluster() -> None:
    code, said = run("proxy", "gpt2", "--backend", "sim", "--cluster", "dgx-a100:1", "--json")
    assert code == 0, said
    fast = json.loads(said[said.index("{") :])["step_s"]["median"]
    code, said = run("proxy", "gpt2", "--backend", "sim", "--cluster", "workstation", "--json")
    assert code == 2 and "has 2 devices, fewer than the 4 ranks" in said
    code, said = run("proxy", "gpt2", "--backend", "sim", "--cluster", "frontier:1", "--json")
    assert json.loads(said[said.index("{") :])["step_s"]["median"] > fast


def test_a_plan_for_another_cluster() -> None:
    """Data parallel over two nodes: what a rank gets is its own card's, and tensor parallelism stays on the faster wires."""
    wide = ("--global-batch", "16", "--set", "micro_batches=1", "--set", "recompute=none", "--set", "zero=0", "--json")
    code, said = run("plan", "gpt-tiny", "--cluster", "dgx-h100:2", "--mesh", "dp=16", *wide)
    assert code == 0, said
    found = json.loads(said[said.index("{") :])["plans"][0]
    assert (found["plan"]["device"], found["plan"]["backend"], found["fits"]) == ("cuda", "nccl", True)
    assert 0.1 < found["estimate"]["error"] < 0.4
    assert "fitted to published runs" in found["estimate"]["notes"][0]
    code, said = run("plan", "gpt-tiny", "--cluster", "ideal:16", "--mesh", "dp=16", *wide)
    ideal = json.loads(said[said.index("{") :])["plans"][0]["estimate"]
    assert ideal["breakdown"]["communication"] < 1e-6 < found["estimate"]["breakdown"]["communication"]
    code, said = run("plan", "gpt-tiny", "--cluster", "dgx-h100:2", "--mesh", "dp=32", *wide)
    assert code == 2 and "this cluster has 16 devices" in said
    code, said = run("train", "gpt-tiny", "--set", "cluster=dgx-h100:2", "--mesh", "dp=2", "--steps", "1")
    assert code == 2 and "train runs on this machine, not on --cluster" in said
