"""Where samples meet, and how a loss reduces them: found in the dataflow, without false alarms; what is said about a plan; what is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.sample_coupling import SampleCoupling, SampleMeeting, batch_parts, describe_inexactness, explain_samples
from meshwright.describe.dataflow_tracer import trace_dataflow, trace_module_dataflow
from meshwright.describe.profile_tracer import trace_module
from meshwright.execute.counted_loss import run_counted, runs_same_code
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.job import load_task
from meshwright.plan.sample_analysis import find_sample_coupling
from meshwright.schedule import plan_ledger

Batch = dict[str, Tensor]
LossFn = Callable[[nn.Module, Batch], Any]


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    x, other, target = torch.randn(3, 8, 6, generator=generator).unbind()
    labels = torch.tensor([0, 1, 2, 3, -100, -100, 4, 5])
    return {"x": x, "other": other, "target": target, "label": labels, "mask": (target > 0).float()}


def squares(model: nn.Module, b: Batch) -> Tensor:
    return (model(b["x"]) - b["target"]) ** 2


def clip(model: nn.Module, b: Batch) -> Tensor:
    logits = F.normalize(model(b["x"]), dim=-1) @ F.normalize(model(b["other"]), dim=-1).t()
    targets = torch.arange(len(logits))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2


def simclr(model: nn.Module, b: Batch) -> Tensor:
    z = F.normalize(torch.cat([model(b["x"]), model(b["other"])]), dim=1)
    size = len(b["x"])
    scores = (z @ z.t()).masked_fill(torch.eye(2 * size, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.cat([torch.arange(size) + size, torch.arange(size)]))


def barlow_twins(model: nn.Module, b: Batch) -> Tensor:
    correlation = model(b["x"]).t() @ model(b["other"]) / len(b["x"])
    return ((correlation - torch.eye(6)) ** 2).sum()


def dice(model: nn.Module, b: Batch) -> Tensor:
    p = model(b["x"]).sigmoid()
    return 1 - (2 * (p * b["mask"]).sum() + 1) / (p.sum() + b["mask"].sum() + 1)


LOSSES: list[tuple[str, LossFn, str, tuple[str, ...]]] = [
    ("mean of squares", lambda m, b: F.mse_loss(m(b["x"]), b["target"]), "mean", ()),
    ("plain mean", lambda m, b: squares(m, b).mean(), "mean", ()),
    ("sums of means", lambda m, b: squares(m, b).mean() + 0.1 * m(b["x"]).abs().mean(), "mean", ()),
    ("per-sample masked mean", lambda m, b: ((squares(m, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(), "mean", ()),
    ("sum over the batch size", lambda m, b: squares(m, b).sum() / len(b["x"]), "mean", ()),
    ("sum of parts", lambda m, b: (squares(m, b) / b["x"].shape[0]).sum(), "mean", ()),
    ("regularised", lambda m, b: squares(m, b).mean() + 0.1 * sum(p.square().sum() for p in m.parameters()), "mean", ()),
    ("soft labels", lambda m, b: F.cross_entropy(m(b["x"]), b["target"].softmax(1)), "mean", ()),
    ("binary", lambda m, b: F.binary_cross_entropy_with_logits(m(b["x"]), b["mask"]), "mean", ()),
    ("batchmean", lambda m, b: F.kl_div(m(b["x"]).log_softmax(1), b["target"].softmax(1), reduction="batchmean"), "mean", ()),
    ("sum", lambda m, b: squares(m, b).sum(), "sum", ()),
    ("half a sum", lambda m, b: squares(m, b).sum() / 2, "sum", ()),
    ("mean times batch", lambda m, b: squares(m, b).mean() * len(b["x"]), "sum", ()),
    ("counted", lambda m, b: (squares(m, b).sum(), b["mask"].sum()), "counted", ()),
    ("cross entropy", lambda m, b: F.cross_entropy(m(b["x"]), b["label"]), "masked mean", ()),
    ("its multiple", lambda m, b: 0.5 * F.cross_entropy(m(b["x"]), b["label"]), "masked mean", ()),
    ("class weights", lambda m, b: F.cross_entropy(m(b["x"]), b["label"], torch.arange(1.0, 7.0)), "masked mean", ()),
    ("label smoothing", lambda m, b: F.cross_entropy(m(b["x"]), b["label"], label_smoothing=0.1), "masked mean", ()),
    ("likelihood", lambda m, b: F.nll_loss(m(b["x"]).log_softmax(1), b["label"]), "masked mean", ()),
    ("quotient", lambda m, b: (squares(m, b) * b["mask"]).sum() / b["mask"].sum(), "masked mean", ()),
    ("guarded quotient", lambda m, b: (squares(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1), "masked mean", ()),
    ("quotient with epsilon", lambda m, b: (squares(m, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-8), "masked mean", ()),
    ("two terms", lambda m, b: F.cross_entropy(m(b["x"]), b["label"]) + 0.1 * m(b["x"]).square().mean(), "terms", ()),
    ("root", lambda m, b: F.mse_loss(m(b["x"]), b["target"]).sqrt(), "other", ("statistics",)),
    ("dice", dice, "other", ("statistics",)),
    ("centred", lambda m, b: (m(b["x"]) - m(b["x"]).mean(0)).square().mean(), "mean", ("statistics",)),
    ("spread", lambda m, b: F.relu(1 - m(b["x"]).std(0)).mean(), "other", ("statistics",)),
    ("barlow twins", barlow_twins, "other", ("statistics",)),
    ("softmax over samples", lambda m, b: (m(b["x"]).softmax(0) * b["target"]).mean(), "mean", ("statistics",)),
    ("neighbours", lambda m, b: (m(b["x"]) - m(b["x"]).roll(1, 0)).square().mean(), "mean", ("order",)),
    ("clip", clip, "mean", ("products",)),
    ("simclr", simclr, "masked mean", ("products",)),
]


@pytest.mark.parametrize(("loss_fn", "reduction", "kinds"), [case[1:] for case in LOSSES], ids=[case[0] for case in LOSSES])
def test_losses(loss_fn: LossFn, reduction: str, kinds: tuple[str, ...]) -> None:
    found = find_sample_coupling(trace_module_dataflow(nn.Linear(6, 6), loss_fn, batch()))
    assert (found.loss, tuple(dict.fromkeys(m.kind for m in found.meetings))) == (reduction, kinds)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "vae", "vae-conv", "cnn", "cosmoflow-tiny", "dlrm"])
def test_samples_of_the_zoo_do_not_meet(name: str) -> None:
    found = find_sample_coupling(trace_dataflow(load_task(RunConfig(model=name))))
    assert not found.meetings
    assert found.loss == ("masked mean" if name == "cnn" else "mean")


def test_a_buffer_that_is_updated_and_used() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), Counting())
    found = find_sample_coupling(trace_module_dataflow(model, lambda m, b: squares(m, b).mean(), batch()))
    assert {(m.module, m.kind) for m in found.meetings} == {("0.parametrizations.weight.0", "updates")}
    plan = Plan("m", 8, Mesh(dp=2), samples=found)
    assert describe_inexactness(plan) == ""
    assert "0.parametrizations.weight.0 updates a buffer that it computes with" in describe_inexactness(replace(plan, micro_batches=2))


class Counting(nn.Module):
    """Counts its calls in a buffer that it does not use."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_batch_norm_that_trains() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6), nn.InstanceNorm1d(6, affine=False))
    loss_fn: LossFn = lambda m, b: m[3](m[:3](b["x"])[:, :, None].expand(-1, -1, 4)).square().mean()  # noqa: E731
    assert find_sample_coupling(trace_module_dataflow(model, loss_fn, batch())).meetings == (
        SampleMeeting("1", "batch_norm", "native_batch_norm", 5),
    )
    model[1].eval()
    assert not find_sample_coupling(trace_module_dataflow(model, loss_fn, batch())).meetings


def transformers_models() -> dict[str, tuple[Callable[[Any], nn.Module], Batch, str]]:
    ids, images, classes = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64, "decoder_start_token_id": 0}
    vit = {**sizes, "image_size": 16, "patch_size": 4}
    text = {"input_ids": ids, "labels": ids}
    return {
        "bert": (lambda T: T.BertForMaskedLM(T.BertConfig(**sizes)), text, ""),
        "gpt2": (lambda T: T.GPT2LMHeadModel(T.GPT2Config(**small)), text, ""),
        "llama": (lambda T: T.LlamaForCausalLM(T.LlamaConfig(**sizes)), text, ""),
        "mixtral": (lambda T: T.MixtralForCausalLM(T.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4)), text, ""),
        "t5": (lambda T: T.T5ForConditionalGeneration(T.T5Config(**t5)), text, ""),
        "vit": (lambda T: T.ViTForImageClassification(T.ViTConfig(**vit, num_labels=3)), {"pixel_values": images, "labels": classes}, ""),
        "resnet": (
            lambda T: T.ResNetForImageClassification(T.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)),
            {"pixel_values": images, "labels": classes},
            "batch_norm",
        ),
        "clip": (
            lambda T: T.CLIPModel(T.CLIPConfig(text_config=sizes | {"bos_token_id": 0, "eos_token_id": 1}, vision_config=vit, projection_dim=8)),
            {"input_ids": ids, "pixel_values": images},
            "products",
        ),
    }


@pytest.mark.parametrize("name", transformers_models())
def test_transformers_models(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    build, inputs, kind = transformers_models()[name]
    options = {"return_loss": True} if name == "clip" else {}
    found = find_sample_coupling(trace_module_dataflow(build(transformers).train(), lambda m, b: m(**b, **options).loss, inputs))
    assert {m.kind for m in found.meetings} == ({kind} if kind else set())
    assert found.loss == ("mean" if name == "clip" else "masked mean")


# -- counting --


@pytest.mark.parametrize("name", [case[0] for case in LOSSES if case[2] == "masked mean"])
@pytest.mark.parametrize("after", [None, ""])
def test_a_masked_mean_becomes_sum_and_count(name: str, after: str | None) -> None:
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(6, 6), next(case[1] for case in LOSSES if case[0] == name)
    total, count = run_counted(loss_fn, model, batch(), after)
    mean = loss_fn(model, batch())
    assert float((total / count).detach()) == pytest.approx(float(mean.detach()), rel=1e-6)
    (expected,) = torch.autograd.grad(mean, model.weight)
    (found,) = torch.autograd.grad(total, model.weight)
    torch.testing.assert_close(found / count, expected)


def test_where_all_targets_are_masked_the_sum_and_the_count_are_zero() -> None:
    model, masked = nn.Linear(6, 6), {**batch(), "label": torch.full((8,), -100), "mask": torch.zeros(8, 6)}
    for name in ("cross entropy", "class weights", "label smoothing", "guarded quotient"):
        total, count = run_counted(next(case[1] for case in LOSSES if case[0] == name), model, masked)
        (gradient,) = torch.autograd.grad(total, model.weight)
        assert (float(total.detach()), float(count), float(gradient.abs().max())) == (0.0, 0.0, 0.0)


def test_means_of_an_untraceable_loss_are_counted_and_other_losses_are_left_alone() -> None:
    model = nn.Linear(6, 6)
    _, count = run_counted(lambda m, b: squares(m, b)[b["mask"].bool()].mean(), model, batch())
    assert int(count) == int(batch()["mask"].sum())
    two_terms: LossFn = next(case[1] for case in LOSSES if case[0] == "two terms")
    assert float(run_counted(two_terms, model, batch()).detach()) == pytest.approx(float(two_terms(model, batch()).detach()))


# -- what is said --

COUPLED = SampleCoupling((SampleMeeting("bn1", "batch_norm", "native_batch_norm", 8), SampleMeeting("(loss)", "products", "mm")), "mean")


def test_only_a_plan_that_splits_the_batch_is_called_inexact() -> None:
    whole = Plan("m", 8, Mesh(tp=(2,)), samples=COUPLED)
    split = Plan("m", 8, Mesh(dp=2), samples=COUPLED)
    assert batch_parts(whole) == 1
    assert not describe_inexactness(whole)
    assert not explain_samples(whole)
    text = describe_inexactness(split)
    assert "BatchNorm (bn1) normalises each data rank's samples by themselves, as in DDP: set batchnorm=sync" in text
    assert "the loss compares samples with each other, and each data rank has only its own (mm): set samples=together" in text
    assert "\n" not in text
    assert "BatchNorm" not in describe_inexactness(replace(split, batch_norm="sync"))
    assert "each micro-batch" in describe_inexactness(Plan("m", 8, micro_batches=2, samples=COUPLED))


def test_what_is_not_known_is_not_claimed() -> None:
    assert not describe_inexactness(Plan("m", 8, Mesh(dp=2)))
    assert "is not known" in explain_samples(Plan("m", 8, Mesh(dp=2)))[0]
    assert not explain_samples(Plan("m", 8, Mesh(dp=2), samples=SampleCoupling(loss="masked mean")))


def test_the_ledger_lists_synced_statistics_and_counts() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
    loss_fn: LossFn = lambda m, b: F.cross_entropy(m(b["x"]), b["label"])  # noqa: E731
    samples = find_sample_coupling(trace_module_dataflow(model, loss_fn, batch()))
    plan = Plan("m", 8, Mesh(dp=2), samples=samples, batch_norm="sync")
    profile = trace_module(model, loss_fn, batch(), name="m")
    lines = {(line.name, line.op): (line.calls, line.bytes) for line in plan_ledger(plan, profile) if line.phase == "step"}
    assert lines["statistics/1", "all_gather"] == (1, (2 * 5 + 1) * 4 * 2)
    assert lines["statistics/1", "all_reduce"] == (1, 2 * 5 * 4)
    assert lines["loss", "all_reduce"] == (1, 8)


def test_synced_batch_norm_needs_one_micro_batch() -> None:
    with pytest.raises(RequestError, match="set micro_batches=1, or batchnorm=local"):
        Plan("m", 8, Mesh(dp=2), micro_batches=2, batch_norm="sync")


def test_a_loss_that_a_loop_makes_anew_is_the_same() -> None:
    def make(factor: float) -> Any:
        return lambda model, batch: model(batch).mean() * factor

    def other(model: Any, batch: Any) -> Any:
        return model(batch).sum()

    assert runs_same_code(make(1.0), make(2.0)) and runs_same_code(partial(other, 1), partial(other, 2)) and runs_same_code(other, other)
    assert not runs_same_code(make(1.0), other) and not runs_same_code(nn.MSELoss(), nn.L1Loss())
