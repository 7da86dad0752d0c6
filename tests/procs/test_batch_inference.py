"""`meshwright generate` for models that generate no text: what it writes and prints equals a plain PyTorch loop over the same samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright import data, zoo
from meshwright.observe.pictures import GAP
from tests.procs import batch_models
from tests.pure.test_output_kinds import decode_png

Command = Callable[..., tuple[str, str]]
MODELS = Path(batch_models.__file__)
_STEPS = {"vae": 40, "cnn": 12, "dlrm-tiny": 60}


@pytest.fixture
def trained(command: Command, ground: Path) -> Callable[[str], tuple[Path, nn.Module]]:
    """A run's folder, trained once, and the plain model with its weights."""

    def run(name: str) -> tuple[Path, nn.Module]:
        folder = ground / "runs" / f"batch-{name}"
        if not folder.exists():
            words = ("--global-batch", "64", "--set", f"name=batch-{name}", "--set", "profile=false", "--set", "checkpoint_every=10")
            command("train", name, "--nproc", "1", "--steps", str(_STEPS[name]), *words)
        model = zoo.load(name).build().eval()
        model.load_state_dict(load_file(folder / "model" / "model.safetensors"))
        return folder, model

    return run


def generate(command: Command, *words: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The summary that is printed, and the tensors that were written."""
    out, err = command("generate", *words, "--json")
    found = json.loads(out)
    assert found == json.loads((Path(found["folder"]) / "summary.json").read_text())
    assert ("random weights" in err) == (found["weights"] == "random")
    assert not list(Path(found["folder"]).glob(".*"))
    return found, load_file(Path(found["folder"]) / "predictions.safetensors")


def samples_of(name: str, count: int | None = None, split: Any = "validation") -> dict[str, Tensor]:
    task = zoo.load(name)
    dataset = data.load(task.data, task.fields, split=split)
    return dataset.batch(torch.arange(count or len(dataset)))


def close(found: Tensor | float, expected: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(found).double(), torch.as_tensor(expected).double(), rtol=2e-5, atol=2e-5)


def check_vae(found: dict[str, Any], columns: dict[str, Tensor], model: Any, image: Tensor) -> None:
    with torch.inference_mode():
        logits, mean, log_variance = model(image)
        error = F.binary_cross_entropy_with_logits(logits, image, reduction="sum") / len(image)
        drawn = torch.sigmoid(model.decoder(torch.randn((16, 16), generator=torch.Generator().manual_seed(7))))
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, (0.5 * log_variance).exp()), torch.distributions.Normal(0.0, 1.0)
    )  # fmt: skip
    close(columns["reconstruction"], logits.sigmoid())
    close(columns["mean"], mean)
    close(columns["drawn"], drawn)
    figures = found["figures"]
    close(figures["reconstruction_error"], error)
    close(figures["divergence"], divergence.sum() / len(image))
    close(found["loss"], figures["negative_elbo"])
    close(figures["squared_error"], (logits.sigmoid() - image).square().mean())
    picture = decode_png(Path(found["folder"]) / "images.png")
    assert picture.shape == (3 * (64 + GAP) + GAP, 16 * (64 + GAP) + GAP, 1)
    for y, images in enumerate((image, logits.sigmoid(), drawn)):
        for x in (0, 5, 15):
            cell = picture[GAP + y * (64 + GAP) :, GAP + x * (64 + GAP) :][:64:8, :64:8, 0]
            assert np.abs(cell - 255.0 * images[x, 0].numpy()).max() < 0.51


def test_a_vae_reconstructs_and_draws(command: Command, trained: Any) -> None:
    folder, model = trained("vae")
    found, columns = generate(command, "batch-vae", "--seed", "7", "--set", "batch=100")
    assert (found["samples"], found["batch"]) == (270, 100)
    assert Path(found["folder"]).parent == folder / "predictions"
    check_vae(found, columns, model, samples_of("vae")["image"])
    other, again = generate(command, "batch-vae", "--samples", "3")
    assert other["folder"] != found["folder"]  # what was written before stays
    assert again["drawn"].shape == (3, 1, 8, 8) and not torch.equal(again["drawn"], columns["drawn"][:3])


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_replicas_and_split_models_give_the_same(command: Command, trained: Any, mesh: str) -> None:
    _, model = trained("vae")
    found, columns = generate(command, "batch-vae", "--seed", "7", "--mesh", mesh, "--samples", "131", "--set", "batch=20")
    assert found["replicas"] == (2 if mesh == "dp=2" else 1)
    check_vae(found, columns, model, samples_of("vae", 131)["image"])


def test_a_cnn_classifies(command: Command, trained: Any) -> None:
    folder, model = trained("cnn")
    found, columns = generate(command, "batch-cnn", "--samples", "256")
    batch = samples_of("cnn", 256)
    with torch.inference_mode():
        scores = model(batch["image"])
    close(columns["scores"], scores)
    assert torch.equal(columns["label"], batch["label"]) and torch.equal(columns["predicted"], columns["scores"].argmax(1))
    accuracy = (scores.argmax(1) == batch["label"]).double().mean().item()
    assert found["figures"] == {"accuracy": accuracy} and accuracy > 0.2
    close(found["loss"], F.nll_loss(scores, batch["label"]))
    close(found["loss"], json.loads((folder / "result.json").read_text())["validation"][-1]["loss"])  # of the same samples
    assert f"{100 * accuracy:.2f} %" in command("generate", "batch-cnn", "--samples", "256")[0]


def test_a_checkpoint_and_another_part_of_the_data(command: Command, trained: Any) -> None:
    folder, model = trained("cnn")
    found, columns = generate(command, str(folder / "checkpoints" / "12"), "--samples", "20", "--set", "split=train")
    with torch.inference_mode():
        close(columns["scores"], model(samples_of("cnn", 20, "train")["image"]))
    assert found["weights"].endswith("checkpoints/12") and found["split"] == "train"


def test_dlrm_scores(command: Command, trained: Any) -> None:
    from sklearn.metrics import log_loss, roc_auc_score

    _, model = trained("dlrm-tiny")
    found, columns = generate(command, "batch-dlrm-tiny")
    batch = samples_of("dlrm-tiny")
    with torch.inference_mode():
        logits = model(batch["dense"], batch["sparse"])
    close(columns["logit"], logits)
    close(columns["score"], logits.sigmoid())
    close(found["figures"]["auc"], roc_auc_score(batch["label"], columns["logit"]))
    close(found["figures"]["log_loss"], log_loss(batch["label"], logits.double().sigmoid()))
    close(found["figures"]["accuracy"], ((logits > 0) == (batch["label"] == 1)).double().mean())
    assert found["figures"]["auc"] > 0.6


def test_a_name_of_the_zoo_has_random_weights(command: Command) -> None:
    found, _ = generate(command, "cosmoflow-tiny", "--samples", "2")
    assert found["weights"] == "random" and found["figures"]["squared_error"] > 0 and Path(found["folder"]).parent.name == "runs"
    assert "learnt nothing" in command("generate", "cosmoflow-tiny", "--samples", "1")[0]


def test_any_module(command: Command) -> None:
    """Its tensors with a row for each sample, also where their first dim happens to be as long as the batch for others."""
    torch.manual_seed(0)
    model = batch_models.Named()
    found, columns = generate(command, f"{MODELS}:Named", "--samples", "6", "--set", "batch=2")
    fields = batch_models.Named.fields
    batch = data.load("synthetic", fields, split="validation").batch(torch.arange(6))
    with torch.inference_mode():
        expected = model(batch["x"])
    assert set(columns) == {"scores", "pair.0", "pair.1"} and found["figures"] == {} and found["loss"] is None
    close(columns["scores"], expected["scores"])
    assert torch.equal(columns["pair.1"], expected["pair"][1])


def test_samples_that_meet_are_computed_alone(command: Command) -> None:
    out, err = command("generate", f"{MODELS}:Meeting", "--samples", "5", "--json")
    columns = load_file(Path(json.loads(out)["folder"]) / "predictions.safetensors")
    assert "samples meet in this model" in err and columns["output"].shape == (5, 3) and not columns["output"].any()


def test_nan_is_counted(command: Command) -> None:
    out, _ = command("generate", f"{MODELS}:Spoilt", "--samples", "40")
    found, columns = generate(command, f"{MODELS}:Spoilt", "--samples", "40")
    spoilt = int(columns["scores"].isnan().any(1).sum())
    assert 0 < spoilt < 40 and found["nonfinite_samples"] == spoilt and "NaN" in out
    assert not columns["correct"][columns["scores"].isnan().any(1)].any()


WRONG = {
    "prompt": (["cnn", "--prompt", "x"], "cnn generates no text"), "many": (["cnn", "--samples", "999"], "the validation part of digits has 270"),
    "seed": (["cnn", "--seed", "1"], "cnn draws nothing"), "tokens": (["cnn", "--max-tokens", "3"], "max_tokens is for models that generate text"),
    "data": (["cnn", "--data", "digit"], "did you mean 'digits'?"), "fields": (["cnn", "--data", "source"], "this model's fields: image, label"),
    "text": (["gpt-tiny", "--data", "source"], "gpt-tiny generates text"), "scalar": ([f"{MODELS}:Scalar"], "none has a row for each sample"),
    "no fields": ([f"{MODELS}:NoFields"], "give the module `fields`"), 
    "error": ([f"{MODELS}:Failing"], "fails on samples 0 to 255 of synthetic: ValueError: no"),
    "pipeline": (["cnn", "--mesh", "pp=2"], "use --mesh tp=2, or dp=K"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_one_line_and_leave_no_folder(command: Command, ground: Path, name: str) -> None:
    words, text = WRONG[name]
    before = sorted((ground / "runs").glob("*"))
    out, err = command("generate", *words, expect=2)
    lines = [line for line in err.splitlines() if not line.startswith("·")]
    assert len(lines) == 1 and text in lines[0] and not out
    assert sorted((ground / "runs").glob("*")) == before
