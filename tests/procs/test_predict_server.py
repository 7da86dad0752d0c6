"""`/predict` and `/v1/embeddings`: any module answers samples as it would alone, whatever comes together with them; wrong samples are refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from torch import Tensor, nn

from meshwright import zoo
from tests.procs import predict_models
from tests.procs.served import Serve, Served

MODELS = Path(predict_models.__file__)
Sample = dict[str, Any]


def born(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that a server makes of random weights."""
    torch.manual_seed(0)
    return build().eval()


def ask(server: Served, *samples: Any) -> list[Any]:
    status, body, _ = server.request("/predict", {"instances": list(samples)})
    assert status == 200, body
    return body["predictions"]  # type: ignore[no-any-return]


def ask_together(server: Served, samples: Sequence[Any]) -> list[Any]:
    """Each sample in a request of its own, all at once."""
    with ThreadPoolExecutor(24) as threads:
        return [found[0] for found in threads.map(lambda sample: ask(server, sample), samples)]


def close(found: Any, expected: Any) -> None:
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# -- models of the zoo --


@pytest.fixture(scope="module")
def cnn(serve: Serve) -> Served:
    return serve("cnn", "--replicas", "2", "--set", "max_waiting=64", "--set", "request_timeout_s=60")


def test_samples_that_come_together_get_what_the_model_gives_each_alone(cnn: Served) -> None:
    model, images = born(zoo.load("cnn").build), draw(40, 3, 32, 32)
    with torch.inference_mode():
        alone = [model(image[None])[0].tolist() for image in images]
    close(ask_together(cnn, [{"image": image.tolist()} for image in images]), alone)
    assert cnn.metric("predict_batch_size_count") < 40  # some came together
    close(ask(cnn, *(image.tolist() for image in images[:5])), alone[:5])  # without the name; several in one request


@pytest.mark.parametrize(
    ("instance", "words"),
    [
        ({}, "image: it is missing"), ({"image": 1}, "its shape is ()"), ({"image": [[1.0]]}, "its shape is (1, 1)"),
        ({"image": [[["x"] * 32] * 32] * 3}, "image[0][0][0]: a number is needed, and there is 'x'"),
        ({"image": [[[None] * 32] * 32] * 3}, "there is null"), ({"image": [[[True] * 32] * 32] * 3}, "there is true"),
        ({"image": [[[1e300] * 32] * 32] * 3}, "too large for float32"), ({"image": [[1], [1, 2]]}, "lists differ in length"),
        ({"image": [], "colour": 1}, "there is no such input: the model takes image: float32 (3, 32, 32)"), ([], "its shape is (0,)"),
        ("text", "a number is needed"),
    ],
)  # fmt: skip
def test_wrong_samples_are_refused_with_what_to_change(cnn: Served, instance: Any, words: str) -> None:
    status, body, _ = cnn.request("/predict", {"instances": [instance]})
    assert status == 400 and words in body["error"]["message"] and "instances[0]" in body["error"]["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'{"instances": []}', b'{"instances": 3}', b'{"instances": [1], "x": 2}', b"[" * 9999, b"\xff"]
)
def test_broken_bodies_are_refused(cnn: Served, raw: bytes) -> None:
    status, body, _ = cnn.request("/predict", raw=raw)
    assert status == 400 and body["error"]["message"]


def test_the_schema_is_that_of_the_model(cnn: Served) -> None:
    document = cnn.request("/openapi.json")[1]
    schema = document["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    image = schema["properties"]["instances"]["items"]["anyOf"][0]["properties"]["image"]
    assert (image["minItems"], image["items"]["maxItems"], image["items"]["items"]["items"]["type"]) == (3, 32, "number")
    assert "422" not in json.dumps(document)


def test_accepted_samples_are_answered_though_a_replica_is_killed(cnn: Served) -> None:
    model, images = born(zoo.load("cnn").build), draw(60, 3, 32, 32, seed=1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(ask_together(cnn, [image.tolist() for image in images])))
    restarts = cnn.metric("replica_restarts_total")
    thread.start()
    time.sleep(0.1)
    cnn.kill_a_rank()
    thread.join()
    with torch.inference_mode():
        close(found, model(images).tolist())
    cnn.wait_for(lambda: cnn.metric("replica_restarts_total") > restarts and cnn.metric("replica_ready") == 2, "the replica is not replaced")


@pytest.mark.parametrize("name", ["vae", "dlrm-tiny", "cosmoflow-tiny"])
def test_models_of_the_zoo(serve: Serve, name: str) -> None:
    server, task = serve(name), zoo.load(name)
    model = born(task.build)
    fields = {key: field for key, field in task.fields.items() if key not in ("label", "target")}
    make = lambda f: torch.randint(f.high, (6, *f.shape)) if f.dtype == "int64" else draw(6, *f.shape)  # noqa: E731
    batch = {key: make(field) for key, field in fields.items()}
    found = ask_together(server, [{key: tensor[i].tolist() for key, tensor in batch.items()} for i in range(6)])
    with torch.inference_mode():
        expected = model(**batch)
    if isinstance(expected, tuple):
        for i, output in enumerate(expected):
            close([answer[i] for answer in found], output.tolist())
    else:
        close(found, expected.tolist())
    if name == "dlrm-tiny":
        sample = {"dense": [0.5] * 16, "sparse": [0, 1, 2, 200]}
        assert "sparse[3] is 200, and must be from 0 to 199" in server.request("/predict", {"instances": [sample]})[1]["error"]["message"]
        sample["sparse"] = [0, 1, 2, 3.5]
        assert "an integer is needed, and there is 3.5" in server.request("/predict", {"instances": [sample]})[1]["error"]["message"]


# -- a user's own modules --


def test_a_module_is_called_as_its_loss_calls_it(serve: Serve) -> None:
    server, model = serve(f"{MODELS}:Named"), born(predict_models.Named)
    names = [spec["name"] for spec in server.request("/v1/plan")[1]["inputs"]]
    assert names == ["features", "extra.kind", "extra.flag"]
    x, kind, flag = draw(5, 4), torch.randint(5, (5, 2)), torch.tensor([True, False, True, True, False])
    samples = [{"features": x[i].tolist(), "extra.kind": kind[i].tolist(), "extra.flag": bool(flag[i])} for i in range(5)]
    with torch.inference_mode():
        expected = model(x, {"kind": kind, "flag": flag}, scale=0.5)
    for i, answer in enumerate(ask_together(server, samples)):
        close(answer["scores"], expected["scores"][i].tolist())
        assert answer["pair"] == [int(expected["pair"][0][i]), bool(expected["pair"][1][i])] and answer["version"] == 3
        close(answer["table"], model.table.weight.tolist())
    assert "an integer is needed" in server.request("/predict", {"instances": [{**samples[0], "extra.kind": [True, 1]}]})[1]["error"]["message"]


def test_a_module_that_says_nothing_of_itself(serve: Serve) -> None:
    server, model = serve(f"{MODELS}:Plain"), born(predict_models.Plain)
    x = draw(8, 3)
    with torch.inference_mode():
        close(ask_together(server, [{"x": row.tolist()} for row in x]), model(x).tolist())
        close(ask(server, {"x": x[:2].tolist()}), [model(x[:2]).tolist()])  # another shape
        close(ask(server, {"x": x[0].tolist(), "gate": [2.0, 3.0]})[0], model(x[0], torch.tensor([2.0, 3.0])).tolist())
    status, body, _ = server.request("/predict", {"instances": [[1.0, 2.0]]})
    assert status == 400 and "instances[0]: the model does not take it" in body["error"]["message"] and "File" not in body["error"]["message"]
    assert server.request("/predict", {"instances": [[1, 2, 3]]})[0] == 400  # integers stay integers where no type is known


@pytest.mark.prove
def test_a_compiled_model_answers_the_same(serve: Serve) -> None:
    server, model = serve(f"{MODELS}:Plain", "--set", "compile=true", "--set", "batch_sizes=[4]"), born(predict_models.Plain)
    x = draw(6, 3)
    with torch.inference_mode():
        close(ask_together(server, [{"x": row.tolist()} for row in x]), model(x).tolist())
    assert "compile model" in server.request("/v1/plan")[1]["plan"]


def test_samples_that_would_meet_are_computed_alone(serve: Serve) -> None:
    server = serve(f"{MODELS}:Meeting", "--set", "max_wait_ms=100")
    assert server.request("/v1/plan")[1]["batches_samples"] is False
    assert ask_together(server, [[1.0, 2.0, i] for i in range(12)]) == [[0.0, 0.0, 0.0]] * 12


def test_a_sample_that_ends_replicas_does_not_take_others_with_it(serve: Serve) -> None:
    server = serve(f"{MODELS}:Deadly", "--set", "max_wait_ms=300")
    found: list[tuple[int, Any]] = []

    def post(x: float) -> tuple[int, Any]:
        return server.request("/predict", {"instances": [[x, 1.0]]})[:2]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(post, [1.0, 2.0, predict_models.DEADLY, 3.0]))
    assert [found[i][1]["predictions"] for i in (0, 1, 3)] == [[[2.0, 2.0]], [[4.0, 2.0]], [[6.0, 2.0]]]
    assert found[2][0] == 500 and "its log has the cause" in found[2][1]["error"]["message"]
    server.wait_for(lambda: server.request("/ready")[0] == 200, "the replica is not replaced")
    assert ask(server, [1.0, 2.0]) == [[2.0, 4.0]]


def test_failures_overload_and_deadlines(serve: Serve) -> None:
    options = ("max_waiting=8", "max_batch=2", "request_timeout_s=2", "batch_sizes=[2]")
    server = serve(f"{MODELS}:Slow", *(word for option in options for word in ("--set", option)))
    assert ask(server, [1.0, 0.5]) == [[3.0, None]]  # what is not finite is null
    status, body, headers = server.request("/predict", {"instances": [[1.0, -1.0]]})
    assert status == 500 and "secret" not in json.dumps(body) and "negative" not in json.dumps(body)
    assert "negative numbers" in server.line(headers["x-request-id"])["error"]
    with ThreadPoolExecutor(60) as threads:
        statuses = list(threads.map(lambda i: server.request("/predict", {"instances": [[1.0, float(i)]]})[0], range(60)))
    assert set(statuses) <= {200, 429} and statuses.count(429) > 0 and statuses.count(200) > 8
    status, body, _ = server.request("/predict", {"instances": [[1.0, 2.0]] * 4000})
    assert status == 504 and "longer than 2 s" in body["error"]["message"]
    assert ask(server, [1.0, 2.0]) == [[3.0, 6.0]]  # its place is free again


def test_a_model_is_split_over_ranks(serve: Serve) -> None:
    server, model, images = serve("vae", "--mesh", "tp=2"), born(zoo.load("vae").build), draw(9, 1, 8, 8)
    assert len(server.ranks()) == 2
    found = ask_together(server, [image.tolist() for image in images])
    with torch.inference_mode():
        close([answer[0] for answer in found], model(images)[0].tolist())


# -- runs --


def test_what_training_wrote_is_served_and_newer_weights_replace_it(serve: Serve, tmp_path: Path) -> None:
    train = [sys.executable, "-m", "meshwright.cli.main", "train", "cnn", "--nproc", "1", "--global-batch", "8", "--set", "data=synthetic"]
    subprocess.run([*train, "--steps", "3"], cwd=tmp_path, check=True, capture_output=True, timeout=240)
    server = serve("last", cwd=tmp_path)
    image = draw(3, 32, 32)
    weights = next(tmp_path.glob("runs/*/model/model.safetensors"))
    close(ask(server, image.tolist())[0], _cnn_with(weights, image))
    assert server.request("/v1/reload", {})[1] == {"model": "last: nothing newer"}
    subprocess.run([*train, "--steps", "6"], cwd=tmp_path, check=True, capture_output=True, timeout=240)
    newer = max(tmp_path.glob("runs/*/model/model.safetensors"), key=lambda path: path.stat().st_mtime)
    status, body, _ = server.request("/v1/reload", {})
    assert (status, body) == (200, {"model": str(newer.parent.resolve())})
    close(ask(server, image.tolist())[0], _cnn_with(newer, image))
    _spoil(newer)
    status, body, _ = server.request("/v1/reload", {})
    assert status == 500 and "roll-back" not in body  # the new weights are NaN: those of before stay
    assert server.request("/ready")[0] == 200
    assert all(math.isfinite(x) for x in ask(server, image.tolist())[0])


def _cnn_with(weights: Path, image: Tensor) -> Any:
    from safetensors.torch import load_file

    model = zoo.load("cnn").build().eval()
    model.load_state_dict(load_file(str(weights)))
    with torch.inference_mode():
        return model(image[None])[0].tolist()


def _spoil(weights: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: tensor * float("nan") for name, tensor in load_file(str(weights)).items()}, str(weights), {"format": "pt"})


# -- folders of transformers --


_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "big", "cat", "dog", "ran", "the", "to", "tree", "where"]


def _save_bert(folder: Path, model_class: str = "BertModel", **changes: Any) -> Any:
    """A small BERT with a tokenizer of a few words."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40}
    config = transformers.BertConfig(vocab_size=len(_WORDS), **{**sizes, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(_WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return model


TEXTS = ["the cat ran", "a big dog ran to the tree", "where", "the big big big big big big cat ran to the tree where the dog ran to the cat"]


@pytest.fixture(scope="module")
def bert(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Any, Any]:
    folder = tmp_path_factory.mktemp("bert")
    model = _save_bert(folder)
    return serve(str(folder), "--set", "served_name=bert"), model, transformers.AutoTokenizer.from_pretrained(str(folder))


def _mean(model: Any, tokenizer: Any, text: str) -> Tensor:
    with torch.inference_mode():
        return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)  # type: ignore[no-any-return]


def test_embeddings_are_those_of_each_text_alone(bert: tuple[Served, Any, Any]) -> None:
    server, model, tokenizer = bert
    expected = [_mean(model, tokenizer, text).tolist() for text in TEXTS]
    found = server.client.embeddings.create(model="bert", input=TEXTS)  # base64, which the client decodes
    close([entry.embedding for entry in found.data], expected)
    assert [entry.index for entry in found.data] == [0, 1, 2, 3] and found.usage.prompt_tokens == sum(len(tokenizer(t).input_ids) for t in TEXTS)
    plain = server.client.embeddings.create(model="bert", input=TEXTS[0], encoding_format="float")
    close(plain.data[0].embedding, expected[0])
    tokens = server.client.embeddings.create(model="bert", input=[tokenizer(text).input_ids for text in TEXTS])
    close([entry.embedding for entry in tokens.data], expected)
    with ThreadPoolExecutor(8) as threads:
        each = list(threads.map(lambda text: server.client.embeddings.create(model="bert", input=text).data[0].embedding, TEXTS * 4))
    close(each, expected * 4)
    assert "mean of the last hidden states" in server.request("/v1/plan")[1]["embedding"]["pooling"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input": []}, "it is empty"), ({"input": ""}, "it is empty"), ({"input": [[]]}, "it is empty"), ({"input": "cat " * 60}, "model takes 40"),
        ({"input": [3, 99]}, "no token 99"), ({"input": "cat", "dimensions": 8}, "32 numbers"), ({"input": [10**30]}, "input"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_embedded_are_refused(bert: tuple[Served, Any, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        bert[0].client.embeddings.create(**{"model": "bert", **options})


def test_an_encoder_answers_samples_too(bert: tuple[Served, Any, Any]) -> None:
    server, model, tokenizer = bert
    ids = tokenizer(TEXTS[1]).input_ids
    answer = ask(server, {"input_ids": ids, "attention_mask": [1] * len(ids)})[0]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]))
    close(answer["last_hidden_state"], expected.last_hidden_state[0].tolist())
    close(answer["pooler_output"], expected.pooler_output[0].tolist())
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "hi"}])


def test_pooling_is_as_the_folder_or_the_request_says(serve: Serve, tmp_path: Path) -> None:
    model = _save_bert(tmp_path / "st", "BertForMaskedLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "st"))
    (tmp_path / "st" / "1_Pooling").mkdir()
    (tmp_path / "st" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    types = ["Transformer", "Pooling", "Normalize"]
    modules = [{"path": "" if i != 1 else "1_Pooling", "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(types)]
    (tmp_path / "st" / "modules.json").write_text(json.dumps(modules))
    found = serve(str(tmp_path / "st")).request("/v1/embeddings", {"input": TEXTS[:2]})[1]["data"]
    for entry, text in zip(found, TEXTS, strict=False):
        with torch.inference_mode():
            first = model.bert(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0]
        close(entry["embedding"], (first / first.norm()).tolist())
    pooled = _save_bert(tmp_path / "pooled")
    found = serve(str(tmp_path / "pooled"), "--set", "pooling=pooler").request("/v1/embeddings", {"input": TEXTS[1]})[1]["data"]
    with torch.inference_mode():
        close(found[0]["embedding"], pooled(**tokenizer(TEXTS[1], return_tensors="pt")).pooler_output[0].tolist())


@pytest.mark.parametrize("split", [(), ("--mesh", "tp=2")])
def test_a_classifier_of_texts(serve: Serve, tmp_path: Path, split: tuple[str, ...]) -> None:
    model = _save_bert(tmp_path, "BertForSequenceClassification", num_labels=3)
    server = serve(str(tmp_path), *split)
    ids = [torch.randint(5, len(_WORDS), (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (3, 7, 7, 7, 20)]
    for tokens, answer in zip(ids, ask_together(server, [{"input_ids": tokens} for tokens in ids]), strict=True):
        with torch.inference_mode():
            close(answer["logits"], model(torch.tensor([tokens])).logits[0].tolist())


def test_a_model_of_pictures(serve: Serve, tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, num_labels=4
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    pictures = draw(6, 3, 16, 16)
    with torch.inference_mode():
        expected = model(pictures).logits.tolist()
    close([answer["logits"] for answer in ask_together(serve(str(tmp_path)), [p.tolist() for p in pictures])], expected)


def test_a_folder_that_lacks_a_shard_says_which(tmp_path: Path) -> None:
    model = _save_bert(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    missing = sorted(tmp_path.glob("model-*.safetensors"))[1]
    missing.unlink()
    command = [sys.executable, "-m", "meshwright.cli.main", "serve", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and missing.name in ended.stderr and "Traceback" not in ended.stderr
