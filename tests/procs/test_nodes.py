"""Two nodes: network namespaces joined by a wire of 1 Gbit/s, each with a host name of its own. Needs root; runs with `make prove`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.procs.nodes_job import NODES, SIZES, WORLD

JOB = Path(__file__).parent / "nodes_job.py"
SPACES = [f"mw{os.getpid()}{letter}" for letter in "ab"]
WIRE, ADDRESSES = "mw0", ["10.213.57.1", "10.213.57.2"]


def told(*words: str) -> str:
    """Empty, or what went wrong."""
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


@pytest.fixture
def wire() -> Iterator[None]:
    if not all(map(shutil.which, ("ip", "tc", "unshare", "hostname"))):
        pytest.skip("needs ip, tc, unshare and hostname")
    ends = [["link", "add", WIRE, "netns", SPACES[0], "type", "veth", "peer", "name", WIRE, "netns", SPACES[1]]]
    for space, address in zip(SPACES, ADDRESSES, strict=True):
        ends += [["-n", space, "addr", "add", f"{address}/24", "dev", WIRE], *(["-n", space, "link", "set", dev, "up"] for dev in (WIRE, "lo"))]
    slow = [["-n", space, "qdisc", "add", "dev", WIRE, "root", "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"] for space in SPACES]
    try:
        for words in [*(["ip", "netns", "add", space] for space in SPACES), *(["ip", *end] for end in ends), *(["tc", *one] for one in slow)]:
            if wrong := told(*words):
                pytest.skip(f"no network namespaces here: {' '.join(words)}: {wrong}")
        yield
    finally:
        for space in SPACES:
            told("ip", "netns", "del", space)


def started(rank: int, folder: Path) -> subprocess.Popen[str]:
    """A rank on its node: ranks are numbered through nodes."""
    node = 0 if rank < NODES[0] else 1
    job = f"hostname node{node} && exec {sys.executable} {JOB} {rank} {ADDRESSES[0]} {folder}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": WIRE}
    words = ["ip", "netns", "exec", SPACES[node], "unshare", "--uts", "sh", "-c", job]
    return subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.prove
def test_two_nodes_meet_by_two_levels(wire: None, tmp_path: Path) -> None:
    """The wire is slow, so two levels are the quickest way for what is large; a plan that goes by it trains as over gloo alone."""
    ranks = [started(rank, tmp_path) for rank in range(WORLD)]
    try:
        said = [rank.communicate(timeout=400)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, said
    found: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    assert all(one["shares"] == {"all": False, "near": True} for one in found)
    assert said[0].count("they are on several nodes") == 1 and not any("several nodes" in other for other in said[1:])
    points = {(p["backend"], p["bytes"]): p for p in found[0]["points"]}
    assert all(p["correct"] for p in points.values())
    print({f"{way} {size}": f"{p['median_s'] * 1e3:.2f} ms" for (way, size), p in points.items()})
    assert min((way for way, size in points if size == SIZES[-1]), key=lambda way: points[way, SIZES[-1]]["median_s"]) == "gloo:two-level"
    assert found[0]["routes"][-1]["algorithm"] == "two-level" and all(one["routes"] == found[0]["routes"] for one in found)
    for one in found:
        alone, routed = one["runs"]
        for key in ("losses", "norms", "state"):
            assert routed[key] == pytest.approx(alone[key], rel=1e-9, abs=1e-12)
        assert routed["ledger"] == alone["ledger"]
