"""How ranks on other machines reach their server: who does not know the secret is not listened to, and nobody is after the first who does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from meshwright.core.errors import MeshwrightError, RunError
from meshwright.core.plan import Plan
from meshwright.serve.async_replica import ReplicaJob
from meshwright.serve.messages import LineSocket, connect_channel
from meshwright.serve.model_source import ModelSource
from meshwright.serve.replica_ranks import LocalRanks, in_thread
from meshwright.serve.text_replica import TextReplica


class Elsewhere:
    """One rank, as if on another machine. `refused` counts connections that were closed."""

    pids: list[int] = []  # noqa: RUF012
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.refused = 0

    async def open(self, world: int) -> None: ...

    async def run(self, target: str, kwargs: Mapping[str, Any]) -> None:
        await in_thread(self._talk, kwargs["channel"])

    def _talk(self, channel: str) -> None:
        address, _, secret = channel.removeprefix("tcp://").partition("/")
        for wrong in (secret[::-1], "", "x" * 1000, f"{secret[:-1]}g"):
            self._refuse(f"tcp://{address}/{wrong}")
        with connect_channel(channel) as peer:
            lines = LineSocket(peer)
            lines.send({"ready": {"plan": "mine"}})
            self._refuse(channel)
            with pytest.raises(EOFError):
                lines.receive(20)

    def _refuse(self, channel: str) -> None:
        try:
            with connect_channel(channel) as peer:
                peer.settimeout(20)
                peer.sendall(b'{"ready": {"plan": "a stranger\'s"}}\n')
                peer.shutdown(socket.SHUT_WR)
                assert peer.recv(1) == b""
        except TimeoutError:
            raise
        except (OSError, RunError):  # closed with bytes unread, perhaps before the shutdown, or the listener is gone
            pass
        self.refused += 1

    async def close(self) -> None: ...

    async def release(self) -> None: ...


def test_only_the_first_rank_is_listened_to() -> None:
    async def talk() -> tuple[TextReplica, Elsewhere]:
        ranks = Elsewhere()
        job = ReplicaJob("", ModelSource("m", "m"), Plan("m", 1))
        replica = TextReplica("r", job, ranks)
        await replica.start()
        facts = replica.facts
        await asyncio.sleep(0.2)
        await replica.stop()
        assert replica.facts is facts
        return replica, ranks

    replica, ranks = asyncio.run(talk())
    assert replica.facts == {"plan": "mine"} and ranks.refused == 5 and replica.failure == ""


def test_ranks_that_end_for_any_reason_end_the_start() -> None:
    class Broken(Elsewhere):
        async def run(self, target: str, kwargs: Mapping[str, Any]) -> None:
            raise OSError(9, "planted")

    replica = TextReplica("r", ReplicaJob("", ModelSource("m", "m"), Plan("m", 1)), Broken())
    with pytest.raises(MeshwrightError, match=r"the replica ended: OSError: .*planted"):
        asyncio.run(asyncio.wait_for(replica.start(), 20))


def test_a_server_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RunError, match=f"cannot reach the server at 127.0.0.1:{port}: connection refused"):
        connect_channel(f"tcp://127.0.0.1:{port}/secret")


def test_each_replica_has_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Pool:
        pids = (1, 2)

        def __init__(self, *_: Any) -> None: ...

        def call(self, target: str, kwargs: dict[str, Any]) -> None:
            calls.append(kwargs["devices"])

    monkeypatch.setattr("meshwright.serve.replica_ranks.WorkerPool", Pool)
    monkeypatch.setattr("meshwright.serve.replica_ranks.ForkServer", lambda *_: None)

    async def use(number: int) -> None:
        ranks = LocalRanks(1, {}, first_device=2 * number)
        await ranks.open(2)
        await ranks.run("module:function", {})

    for number in range(2):
        asyncio.run(use(number))
    assert calls == [[0, 1], [2, 3]]
