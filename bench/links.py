"""Links between this machine's ranks, shaped: each rank moves into a network namespace behind a token bucket.

Needs root, `ip` and `tc`. Names contain the process id; all namespaces are removed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

from meshwright.core.errors import RequestError

RATES = {"fast": "", "slow": "200mbit"}  # fast: the machine's loopback as it is
_NETNS = "/var/run/netns"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@contextlib.contextmanager
def shaped(link: str, ranks: int) -> Iterator[str]:
    """Creates `ranks` namespaces on one bridge for the duration; yields their common name, or '' where links are not shaped."""
    if not RATES[link]:
        yield ""
        return
    name = f"mw{os.getpid() % 100000}"
    try:
        _ip("link", "add", f"{name}b", "type", "bridge")
        _ip("link", "set", f"{name}b", "up")
        for rank in range(ranks):
            _add(name, rank, RATES[link])
        yield name
    finally:
        for rank in range(ranks):
            subprocess.run(["ip", "netns", "del", f"{name}r{rank}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{name}b"], capture_output=True, check=False)


def _add(name: str, rank: int, rate: str) -> None:
    space, here, there = f"{name}r{rank}", f"{name}h{rank}", f"{name}t{rank}"
    _ip("netns", "add", space)
    _ip("link", "add", here, "type", "veth", "peer", "name", there)
    _ip("link", "set", there, "netns", space)
    _ip("link", "set", here, "master", f"{name}b", "up")
    _ip("-n", space, "addr", "add", f"10.213.0.{rank + 1}/24", "dev", there)
    _ip("-n", space, "link", "set", there, "up")
    _ip("-n", space, "link", "set", "lo", "up")
    bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    _run("tc", "-n", space, "qdisc", "add", "dev", there, "root", *bucket)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise RequestError(f"--link slow needs root, ip and tc: `{' '.join(words)}` said {said.strip()}: use --link fast") from error


def move_in(name: str, rank: int) -> None:
    """In a worker, before ranks meet: into the namespace of its rank, and gloo onto its interface."""
    if not name:
        return
    with open(f"{_NETNS}/{name}r{rank}", "rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEW_NETWORK):
            raise RequestError(f"rank {rank} could not enter its namespace: {os.strerror(ctypes.get_errno())}")
    os.environ["GLOO_SOCKET_IFNAME"] = f"{name}t{rank}"
