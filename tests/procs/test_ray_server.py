"""`serve --ray` on a cluster of two nodes: the answers of a server without Ray, a replica that dies under way, and what cannot be placed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.procs import predict_models
from tests.procs.served import Serve, Served

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'meshwright[ray]'")
pytestmark = pytest.mark.timeout(600)

_STORE_BYTES = 100 * 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of two nodes with two CPUs each, on this machine."""
    from ray.cluster_utils import Cluster

    options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=options)
    made.add_node(num_cpus=2, object_store_memory=_STORE_BYTES)
    yield made.address
    made.shutdown()


def greedy(server: Served, prompt: str = "def ", num: int = 300) -> str:
    body = {"prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_end": True}
    status, found, _ = server.request("/v1/completions", body)
    assert status == 200, found
    return found["choices"][0]["text"]  # type: ignore[no-any-return]


def processes(title: str) -> list[int]:
    """Ray's actors, on all nodes of this machine: they have a title each."""
    return [int(pid) for pid in subprocess.run(["pgrep", "-f", title], capture_output=True, text=True).stdout.split()]


def rank_processes() -> list[int]:
    return processes("^ray::RankActor")


def refused(*arguments: str) -> str:
    """The last line of a command that is refused."""
    command = [sys.executable, "-m", "meshwright.cli.main", "serve", *arguments, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


def test_two_replicas_of_two_ranks(serve: Serve, cluster: str) -> None:
    """Greedy tokens are those of a server without Ray, while all goes well and when a rank is killed under way; the command leaves nothing behind."""
    alone = serve("llama-tiny", "--set", "context=512")
    prompts = [f"number {i}" for i in range(6)]
    with ThreadPoolExecutor(6) as threads:
        expected = list(threads.map(lambda prompt: greedy(alone, prompt), prompts))
    server = serve("llama-tiny", "--ray", cluster, "--mesh", "tp=2", "--replicas", "2", "--set", "context=512", "--set", "threads=1")
    assert [greedy(server, prompt) for prompt in prompts[:2]] == expected[:2]
    about = server.request("/v1/plan")[1]
    assert [replica["state"] for replica in about["replicas"]] == ["ready", "ready"] and "tensor parallel 2" in about["plan"]
    groups = placement_groups(cluster)
    assert sorted(len(bundles) for bundles in groups) == [2, 2] and {node for bundles in groups for node in bundles} == nodes(cluster)
    assert len(rank_processes()) == 4

    chunks = list(server.client.completions.create(model="llama-tiny", prompt=prompts[0], max_tokens=300, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0] and len(chunks) > 3
    assert server.request("/v1/completions", {"prompt": "x" * 600})[0] == 400
    assert server.metric("requests_total") > 3

    found: dict[int, str] = {}
    with ThreadPoolExecutor(6) as threads:
        waits = [threads.submit(lambda i=i: found.update({i: greedy(server, prompts[i])})) for i in range(6)]
        server.wait_for(lambda: server.metric("sequences_running") > 0 or all(wait.done() for wait in waits), "no request runs")
        os.kill(rank_processes()[0], signal.SIGKILL)
        for wait in waits:
            wait.result()
    assert [found[i] for i in range(6)] == expected
    assert any(line.get("event") == "retry" for line in server.lines)
    server.wait_for(lambda: server.metric("replica_restarts_total") == 1, "the replica does not come back", 120)
    server.wait_for(lambda: len(rank_processes()) == 4, "its ranks do not come back", 60)
    assert greedy(server, prompts[0]) == expected[0]

    assert "serves a model already" in refused("llama-tiny", "--ray", cluster)
    server.process.terminate()
    assert server.process.wait(120) == 143
    server.wait_for(lambda: not rank_processes(), "ranks are left", 30)
    assert placement_groups(cluster) == []


def test_a_pipeline(serve: Serve, cluster: str) -> None:
    server = serve("llama-tiny", "--ray", cluster, "--mesh", "pp=2", "--set", "context=512", "--set", "threads=1")
    text = greedy(server, "def ", 24)
    assert "pipeline 2" in server.request("/v1/plan")[1]["plan"] and len(rank_processes()) == 2
    server.process.terminate()
    server.process.wait(120)
    assert text == greedy(serve("llama-tiny", "--set", "context=512"), "def ", 24)


def _state(cluster: str, expression: str) -> Any:
    """Something that Ray says of the cluster, from a process of its own: a test's process joins none."""
    code = f"import json, ray\nray.init({cluster!r}, logging_level='error', log_to_driver=False)\nprint(json.dumps({expression}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def placement_groups(cluster: str) -> list[list[str]]:
    """The node of each bundle of each placement group that is there."""
    table = "[list(g['bundles_to_node_id'].values()) for g in ray.util.placement_group_table().values() if g['state'] != 'REMOVED']"
    return _state(cluster, table)  # type: ignore[no-any-return]


def nodes(cluster: str) -> set[str]:
    return set(_state(cluster, "[n['NodeID'] for n in ray.nodes() if n['Alive']]"))


def test_a_model_that_answers_samples_and_a_deployment_that_dies(serve: Serve, cluster: str) -> None:
    server = serve(f"{Path(predict_models.__file__)}:Plain", "--ray", cluster, "--set", "threads=1")
    samples = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).tolist()
    torch.manual_seed(0)
    expected = predict_models.Plain().eval()(torch.tensor(samples))
    status, found, _ = server.request("/predict", {"instances": [{"x": sample} for sample in samples]})
    assert status == 200 and torch.allclose(torch.tensor(found["predictions"]), expected, atol=1e-5), found
    (rank,) = rank_processes()
    (deployment,) = processes("^ray::ServeReplica")
    os.kill(deployment, signal.SIGKILL)  # Ray Serve makes another, whose ranks are new
    server.wait_for(lambda: processes("^ray::ServeReplica") not in ([], [deployment]), "the deployment does not come back", 120)
    server.wait_for(lambda: server.request("/ready")[0] == 200, "its replica does not come back", 120)
    assert server.request("/predict", {"instances": [{"x": sample} for sample in samples]})[1] == found
    server.wait_for(lambda: len(rank_processes()) == 1 and rank not in rank_processes(), "the former rank is left", 30)
    server.process.terminate()
    server.process.wait(120)


def test_what_cannot_be_placed_is_refused(cluster: str) -> None:
    line = refused("llama-tiny", "--ray", cluster, "--mesh", "tp=2", "--replicas", "3", "--set", "threads=1")
    assert "room for 4 ranks of 1 CPU, and 3 replicas of 2 ranks need 6: it has 2 nodes with 4 CPUs in all" in line
    assert "room for 0 ranks of 3 CPUs" in refused("llama-tiny", "--ray", cluster, "--set", "threads=3")


def test_resources_that_others_hold_are_not_waited_for_in_silence(cluster: str) -> None:
    hold = (
        f"import ray, time\nray.init({cluster!r}, logging_level='error', log_to_driver=False)\n"
        "group = ray.util.placement_group([{'CPU': 2}, {'CPU': 1}])\nray.get(group.ready())\nprint('held', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            line = refused("llama-tiny", "--ray", cluster, "--mesh", "tp=2", "--set", "threads=1")
        finally:
            holder.kill()
    assert "has not placed a replica of 2 ranks" in line and "needs 2 CPUs" in line and "1 CPU are free" in line


def test_wrong_requests() -> None:
    assert "no-such-model" in refused("no-such-model", "--ray", "local")
    assert "--ray 127.0.0.1:1: Connection refused: start a cluster with `ray start --head`" in refused("llama-tiny", "--ray", "127.0.0.1:1")
    assert "--api-key" in refused("llama-tiny", "--ray", "local", "--host", "0.0.0.0")
