"""A model that is split over ranks generates what transformers does on one: families, uneven heads, pipelines; and the commands around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from meshwright.core.serialization import to_data
from meshwright.core.serve_policy import ServePolicy
from meshwright.describe.discover import discover
from meshwright.plan import InferenceConstraints
from meshwright.serve.model_source import ModelSource
from meshwright.serve.serve_plan import make_serve_plan
from tests import serve_models

Command = Callable[..., tuple[str, str]]
_PROMPTS = serve_models.prompts(4)
_NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folders(ground: Path) -> Callable[..., tuple[Path, list[list[int]]]]:
    """A folder with a family's model, and what transformers generates from it."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def folder(name: str, **changes: Any) -> tuple[Path, list[list[int]]]:
        key = "-".join([name, *map(str, changes.values())])
        if key not in made:
            model = serve_models.build(name, **changes)
            model.save_pretrained(ground / key)
            made[key] = ground / key, [serve_models.greedy(model, prompt, _NUM_TOKENS) for prompt in _PROMPTS]
        return made[key]

    return folder


def run(pool: Any, folder: Path, mesh: str, page_tokens: int = 4, **params: Any) -> list[dict[str, Any]]:
    source = ModelSource("test", f"hf:{folder}", weights=str(folder))
    chosen = Mesh.parse(mesh)
    plan = make_serve_plan(source.load_task(seq=16), chosen, discover({}, ranks=chosen.size), ServePolicy(64, 4, page_tokens), InferenceConstraints())
    given = {"max_tokens": _NUM_TOKENS, **params}
    return pool.run(  # type: ignore[no-any-return]
        "procs.serve_jobs:answer", world=chosen.size, source=to_data(source), plan=to_data(plan), prompts=_PROMPTS, params=given
    )


@pytest.mark.parametrize("name", serve_models.FAMILIES)
def test_families_over_two_tensor_parallel_ranks(pool: Any, folders: Any, measured: None, name: str) -> None:
    folder, expected = folders(name)
    found = run(pool, folder, "tp=2")
    assert found[0]["answers"] == expected
    assert found[0]["decoding"] == ("packed" if name in serve_models.PACKED else "one sequence at a time"), found[0]["reasons"]


@pytest.mark.parametrize("name", [name for name in serve_models.PACKED if name != "mixtral"])
def test_families_in_two_stages(pool: Any, folders: Any, measured: None, name: str) -> None:
    folder, expected = folders(name)
    found = run(pool, folder, "pp=2")
    assert found[0]["answers"] == expected
    assert sum(rank["kv_layers"] for rank in found) == 3  # each rank has the keys and values of its own layers


@pytest.mark.parametrize(
    ("name", "changes", "mesh", "kv_heads"),
    [
        ("llama", {}, "tp=4", None),  # two key-value heads for four ranks
        ("gpt2", {}, "tp=3", [2, 1, 1]),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}, "tp=2", [2, 1]),
        ("llama", {}, "pp=2,tp=2", [1, 1, 1, 1]),
    ],
)
def test_heads_that_do_not_divide(pool: Any, folders: Any, measured: None, name: str, changes: dict[str, Any], mesh: str, kv_heads: Any) -> None:
    folder, expected = folders(name, **changes)
    found = run(pool, folder, mesh)
    assert found[0]["answers"] == expected
    if kv_heads is not None:
        assert [rank["kv_heads"] for rank in found] == [[heads] for heads in kv_heads]


def test_ranks_hold_their_part_of_the_weights(pool: Any, folders: Any, measured: None) -> None:
    folder, _ = folders("llama", num_hidden_layers=6)
    whole = sum(p.numel() for p in serve_models.build("llama", num_hidden_layers=6).parameters())
    for rank in run(pool, folder, "tp=2"):
        assert rank["parameters"] < 0.6 * whole


def test_samples_do_not_depend_on_the_ranks(pool: Any, folders: Any, measured: None) -> None:
    folder, _ = folders("llama")
    sampled = {"temperature": 0.8, "seed": 3, "top_p": 0.95}
    assert run(pool, folder, "tp=2", **sampled)[0]["answers"] == run(pool, folder, "tp=1", **sampled)[0]["answers"]


@pytest.mark.parametrize("page_tokens", [1, 64])
def test_pages_of_any_size(pool: Any, folders: Any, measured: None, page_tokens: int) -> None:
    folder, expected = folders("llama")
    assert run(pool, folder, "tp=2", page_tokens)[0]["answers"] == expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_collectives_are_in_the_compiled_graph(pool: Any, folders: Any, measured: None, name: str) -> None:
    """The whole cut model is one graph, and the ledger counts the same calls by the same names, forward and backward."""
    folder, _ = folders(name)
    source = ModelSource("test", f"hf:{folder}", weights=str(folder))
    plan = make_serve_plan(source.load_task(seq=16), Mesh.parse("tp=2"), discover({}, ranks=2), ServePolicy(64, 4), InferenceConstraints())
    given = replace(plan, compile="model")
    for rank in pool.run("procs.serve_jobs:compiled", world=2, source=to_data(source), plan=to_data(given), prompts=_PROMPTS):
        assert rank["same_calls"] and rank["calls"] > 6 and rank["same_parameters"]
        assert rank["logits"] < 1e-4 and rank["gradients"] < 1e-4
