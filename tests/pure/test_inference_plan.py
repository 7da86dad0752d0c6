"""Plans for inference: what attention keeps, what fits, what each objective prefers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import serve_models

from meshwright.cli.main import main
from meshwright.core.errors import RequestError
from meshwright.core.inference import InferenceLoad, InferenceModel
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.cost.inference_cost import kv_token_bytes
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.execute.apply import apply
from meshwright.plan import InferenceConstraints, InferenceRanking, explain_inference, rank_inference_plans
from meshwright.serve.decoders import PackedDecoder
from meshwright.serve.inference_model import trace_inference_model, trace_kv_layers
from meshwright.serve.model_source import ModelSource
from meshwright.serve.steps import Chunk, Step
from meshwright.zoo import load

CPU = torch.device("cpu")
_traced: dict[tuple[str, str], InferenceModel] = {}


def traced(name: str, precision: Any = "bf16") -> InferenceModel:
    if (name, precision) not in _traced:
        _traced[name, precision] = trace_inference_model(ModelSource(name, name), 16, precision, "cuda", split=True)
    return _traced[name, precision]


def ranked(name: str, cluster: str, load: InferenceLoad, **fixed: Any) -> InferenceRanking:
    where = resolve_cluster(cluster, {}, ranks=None)
    return rank_inference_plans(traced(name), load, where, datasheet_calibration(where), InferenceConstraints(**{"precision": "bf16", **fixed}))


def test_the_zoo_keeps_what_the_trace_says() -> None:
    for name in ("llama-tiny", "gpt-tiny"):
        task = load(name, seq=8)
        decoder = PackedDecoder(apply(Plan("t", 1, Mesh()), task.build().eval(), None), 4, CPU)
        with torch.inference_mode():
            decoder.forward(Step((Chunk(0, 0, (1, 2, 3)),)))
        model = InferenceModel(name, traced(name).prompt, traced(name).token, 16, trace_kv_layers(task))
        assert kv_token_bytes(Plan("t", 1, Mesh()), model) == decoder.memory.token_bytes > 0


@pytest.mark.parametrize("name", serve_models.FAMILIES)
def test_families_keep_one_entry_for_each_layer_and_kv_head(name: str, tmp_path: Path) -> None:
    model = serve_models.build(name)
    model.config.save_pretrained(tmp_path)
    layers = trace_kv_layers(load(f"hf:{tmp_path}", seq=8))
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // config.num_attention_heads
    assert [(layer.heads, layer.key_width, layer.value_width) for layer in layers] == [(heads, width, width)] * config.num_hidden_layers


@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 300), context=st.integers(256, 8192), mesh=st.sampled_from([Mesh(), Mesh(tp=(2,)), Mesh(pp=2)]), replicas=st.integers(1, 4)
)  # fmt: skip
def test_the_largest_batch_fits_and_a_larger_one_does_not(batch: int, context: int, mesh: Mesh, replicas: int) -> None:
    fixed, load = {"mesh": mesh, "replicas": replicas}, InferenceLoad(batch, context, 16)
    most = ranked("llama3-8b", "dgx-h100:1", load, **fixed).best.estimate.max_batch
    assert ranked("llama3-8b", "dgx-h100:1", load.with_batch(int(0.9 * most)), **fixed).best.estimate.fits
    assert not ranked("llama3-8b", "dgx-h100:1", load.with_batch(int(1.2 * most) + replicas), **fixed).best.estimate.fits


def test_decoding_cannot_be_faster_than_reading_the_weights() -> None:
    best = ranked("llama3-8b", "dgx-h100:1", InferenceLoad(1, 1024, 16), mesh=Mesh(), compile="model").best
    device = resolve_cluster("dgx-h100:1", {}, ranks=None).devices[0]
    weights = best.estimate.memory_kinds["parameters"]
    assert weights == pytest.approx(2 * 8.03e9, rel=0.01)
    assert weights / device.memory_bandwidth < best.estimate.decode_s < 2 * weights / device.memory_bandwidth
    more = ranked("llama3-8b", "dgx-h100:1", InferenceLoad(64, 1024, 16), mesh=Mesh(), compile="model").best.estimate
    assert best.estimate.decode_s < more.decode_s < 2 * best.estimate.decode_s, "64 answers at once read the weights once"


def test_objectives() -> None:
    """One answer at a time is quickest on several devices, many on a replica each."""
    alone = ranked("llama3-8b", "dgx-h100:1", InferenceLoad(1, 1024, 16), compile="model")
    assert alone.best.plan.mesh.degree("tp") > 1 and alone.best.plan.serve.replicas == 1
    many = ranked("llama3-8b", "dgx-h100:1", InferenceLoad(512, 1024, 16, "throughput"), compile="model")
    assert many.best.plan.serve.replicas > 1
    assert many.best.estimate.tokens_per_s == max(s.estimate.tokens_per_s for s in many.scored if s.estimate.fits)
    largest = ranked("llama3-8b", "dgx-h100:1", InferenceLoad(8, 1024, 16, "batch"), compile="model")
    assert largest.best.estimate.max_batch >= 0.98 * max(s.estimate.max_batch for s in largest.scored)
    for ranking in (alone, many, largest):
        why = explain_inference(ranking)
        assert why.startswith("Chosen: ") and "A token's time: " in why and "Memory: " in why and "Second: " in why


def test_a_model_larger_than_a_device_is_split() -> None:
    ranking = ranked("llama3-8b", "dgx-h100:1", InferenceLoad(4000, 8192, 16))
    assert not ranking.best.estimate.fits
    assert explain_inference(ranking).startswith("nothing fits: ") and "--set batch=" in explain_inference(ranking)


def test_stages_share_the_keys_and_values() -> None:
    ranking = ranked("llama-tiny", "dgx-h100:1", InferenceLoad(4, 64, 16), mesh=Mesh(pp=2))
    plan, model = ranking.best.plan, ranking.model
    assert sum(kv_token_bytes(plan, model, rank) for rank in range(2)) == kv_token_bytes(Plan("t", 1, Mesh(), memory=plan.memory), model)


def test_what_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt=64 and context=64"):
        InferenceLoad(1, 64, 64)
    with pytest.raises(RequestError, match="and the mesh has cp=2"):
        ranked("llama-tiny", "dgx-h100:1", InferenceLoad(1, 64, 16), mesh=Mesh(cp=2))
    with pytest.raises(RequestError, match="what this model can be split by: --mesh tp=1, --mesh pp=2"):
        ranked("llama-tiny", "dgx-h100:1", InferenceLoad(1, 64, 16), mesh=Mesh(pp=64))
    with pytest.raises(RequestError, match="vae is no language model"):
        trace_inference_model(ModelSource("vae", "vae"), 16, "fp32", "cpu", split=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "llama-tiny", "--cluster", "dgx-h100", *arguments])
    return int(ended.value.code or 0), *capsys.readouterr()


def test_the_command_prints_plans_and_writes_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    settings = ["--set", "kind=serve", "--set", "batch=8", "--set", "context=128"]
    code, out, err = run(capsys, *settings, "--json", "-o", str(file))
    result = json.loads(out)
    assert code == 0 and result["plans"][0]["fits"] and result["why"].startswith("Chosen: ") and result["seconds"] > 0, err
    assert {"prefill_s", "decode_s", "tokens_per_s", "max_batch", "memory_bytes"} <= result["plans"][0]["estimate"].keys()
    assert Plan.load(file).serve.context == 128
    code, out, _ = run(capsys, *settings)
    assert code == 0 and "answers at once" in out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--set", "kind=infer"], "unknown kind 'infer'"),
        (["--set", "kind=serve", "--global-batch", "8"], "--global-batch is for training"),
        (["--set", "kind=serve", "--set", "zero=3"], "unknown key 'zero'"),
        (["--set", "kind=serve", "--mesh", "shard=2"], "inference splits a model over tp"),
    ],
)
def test_wrong_requests_are_one_line(capsys: pytest.CaptureFixture[str], options: list[str], line: str) -> None:
    code, out, err = run(capsys, *options)
    lines = [text for text in err.splitlines() if not text.startswith("·")]
    assert (code, out, len(lines)) == (2, "", 1) and line in lines[0]
