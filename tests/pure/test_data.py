"""Data: the sampler's stream and its resumption, the built-in data sets, files that lie, and the loader's thread."""

from __future__ import annotations

import codecs
import gzip
import io
import pickle
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright import data
from meshwright.core.errors import RequestError
from meshwright.core.task import Field
from meshwright.data import GlobalSampler, Loader, images

TOKENS = {"tokens": Field((65,), "int64", 256)}
IMAGE = {"image": Field((1, 8, 8)), "label": Field((), "int64", 10)}
CLICKS = {"dense": Field((16,)), "sparse": Field((4,), "int64", 200), "label": Field((), "int64", 2)}
VOLUME = {"volume": Field((4, 8, 8, 8)), "target": Field((4,))}


# Sampler


def test_an_epoch_holds_each_sample_once_and_epochs_differ() -> None:
    sampler = GlobalSampler(103, 10, seed=5)
    first = torch.cat([sampler.indices(step) for step in range(10)])
    second = torch.cat([sampler.indices(step) for step in range(10, 20)])
    assert len(set(first.tolist())) == len(set(second.tolist())) == 100
    assert not torch.equal(first, second)
    assert torch.equal(sampler.indices(3), GlobalSampler(103, 10, seed=5).indices(3))
    assert not torch.equal(sampler.indices(3), GlobalSampler(103, 10, seed=6).indices(3))


@given(length=st.integers(1, 60), batch=st.integers(1, 90), step=st.integers(0, 40), shuffle=st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_global_batch_repeats_samples_only_if_it_is_larger_than_the_data_set(length: int, batch: int, step: int, shuffle: bool) -> None:
    sampler = GlobalSampler(length, batch, seed=1, shuffle=shuffle)
    whole = sampler.indices(step)
    assert whole.shape == (batch,)
    assert 0 <= whole.min() <= whole.max() < length
    if batch <= length:
        assert len(set(whole.tolist())) == batch
    else:  # runs over epochs: no sample is seen two times more often than another
        counts = torch.bincount(whole, minlength=length)
        assert counts.max() - counts.min() <= 2


@given(length=st.integers(5, 50), batch=st.integers(1, 60), steps=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_walking_by_position_is_the_same_as_asking_by_step(length: int, batch: int, steps: int) -> None:
    sampler, position = GlobalSampler(length, batch, seed=2), 0
    for step in range(steps):
        assert torch.equal(sampler.indices_from(position, batch), sampler.indices(step))
        position = sampler.position_after(position, batch)


def test_resuming_with_another_batch_size_continues_at_the_exact_sample() -> None:
    before = GlobalSampler(100, 12, seed=9)
    for _ in range(3):
        before.position = before.position_after(before.position, 12)
    after = GlobalSampler(100, 8, seed=9)
    after.load_state_dict(before.state_dict())
    stream = GlobalSampler(100, 100, seed=9).indices(0)
    assert torch.equal(after.indices_from(after.position, 8), stream[36:44])
    seen = [stream[:36]]
    for _ in range(8):
        seen.append(after.indices_from(after.position, 8))
        after.position = after.position_after(after.position, 8)
    assert torch.equal(torch.cat(seen), stream)  # nothing missed, nothing twice
    assert torch.equal(after.indices_from(after.position, 8), GlobalSampler(100, 100, seed=9).indices(1)[:8])


def test_the_state_of_another_stream_is_refused() -> None:
    state = GlobalSampler(100, 10, seed=1).state_dict()
    for other in (GlobalSampler(99, 10, seed=1), GlobalSampler(100, 10, seed=2), GlobalSampler(100, 10, seed=1, shuffle=False)):
        with pytest.raises(RequestError, match="cannot resume the data"):
            other.load_state_dict(state)
    with pytest.raises(RequestError, match="empty"):
        GlobalSampler(0, 1, seed=0)
    with pytest.raises(RequestError, match="at least 1"):
        GlobalSampler(1, 0, seed=0)


def test_a_huge_data_set_in_order_costs_nothing() -> None:
    sampler = GlobalSampler(10**15, 4, seed=0, shuffle=False)
    assert sampler.indices(10**12).tolist() == [4 * 10**12 + i for i in range(4)]


# Data sets


def test_source_is_text_in_overlapping_windows() -> None:
    began = time.process_time()
    corpus = data.load("source", TOKENS)
    taken = time.process_time() - began
    first, second = corpus.batch(torch.tensor([0, 1]))["tokens"]
    assert first.dtype == torch.int64
    assert first.shape == (65,)
    assert first[-1] == second[0]
    text = bytes(corpus.batch(torch.arange(200))["tokens"][:, :-1].flatten().tolist())
    assert b"\nimport " in text
    assert len(corpus) > 10_000
    assert taken < 3.0  # CPU time: a tenth of a second


def test_source_parts_do_not_overlap() -> None:
    train, validation = (data.load("source", TOKENS, split=split) for split in ("train", "validation"))
    assert len(validation) == pytest.approx(0.05 * (len(train) + len(validation)), abs=2)
    last, first = train.batch(torch.tensor([len(train) - 1]))["tokens"], validation.batch(torch.tensor([0]))["tokens"]
    assert not torch.equal(last, first)


def test_digits_fit_the_field() -> None:
    pytest.importorskip("sklearn")
    plain, coloured = data.load("digits", IMAGE), data.load("digits", {**IMAGE, "image": Field((3, 32, 32))})
    validation = data.load("digits", IMAGE, split="validation")
    assert len(plain) + len(validation) == 1797
    assert len(validation) == pytest.approx(0.15 * 1797, abs=1)
    small, large = (d.batch(torch.arange(64)) for d in (plain, coloured))
    assert small["image"].shape == (64, 1, 8, 8)
    assert large["image"].shape == (64, 3, 32, 32)
    assert torch.equal(large["image"][:, 0], large["image"][:, 2])
    assert torch.equal(small["label"], large["label"])
    assert (small["image"].min(), small["image"].max()) == (0, 1)
    # Enlarging and averaging back gives nearly the same picture.
    assert torch.nn.functional.avg_pool2d(large["image"][:, :1], 4).sub(small["image"]).abs().mean() < 0.08
    whole = torch.cat([d.batch(torch.arange(len(d)))["label"] for d in (plain, validation)])
    assert whole.bincount().min() > 170


def test_scikit_learn_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RequestError, match=r"pip install 'meshwright\[data\]'"):
        data.load("digits", IMAGE)


def write_mnist(folder: Path, pixels: np.ndarray, labels: np.ndarray, zipped: bool) -> None:
    contents = {
        "train-images-idx3-ubyte": struct.pack(">4B3I", 0, 0, 8, 3, *pixels.shape) + pixels.tobytes(),
        "train-labels-idx1-ubyte": struct.pack(">4BI", 0, 0, 8, 1, len(labels)) + labels.tobytes(),
    }
    for name, raw in contents.items():
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist(tmp_path: Path, zipped: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    write_mnist(tmp_path, pixels, np.arange(5, dtype=np.uint8), zipped)
    dataset = data.load("mnist", {**IMAGE, "image": Field((1, 28, 28))}, folder=tmp_path)
    batch = dataset.batch(torch.tensor([4, 0]))
    assert len(dataset) == 5
    assert torch.equal(batch["image"][0, 0], torch.from_numpy(pixels[4]).float() / 255)
    assert batch["label"].tolist() == [4, 0]
    with pytest.raises(RequestError, match="there is no t10k-images-idx3-ubyte"):
        data.load("mnist", IMAGE, split="validation", folder=tmp_path)


def test_broken_mnist_files(tmp_path: Path) -> None:
    write_mnist(tmp_path, np.zeros((5, 28, 28), np.uint8), np.zeros(4, np.uint8), zipped=False)
    with pytest.raises(RequestError, match="5 train images but 4 labels"):
        data.load("mnist", IMAGE, folder=tmp_path)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RequestError, match="header promises"):
        data.load("mnist", IMAGE, folder=tmp_path)
    file.write_bytes(b"<html>not found</html>")
    with pytest.raises(RequestError, match="not an IDX file"):
        data.load("mnist", IMAGE, folder=tmp_path)


def test_both_versions_of_cifar10_agree(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    pixels, labels = rng.integers(0, 256, (10, 3072), dtype=np.uint8), rng.integers(0, 10, 10, dtype=np.uint8)
    for part in range(5):
        rows = slice(2 * part, 2 * part + 2)
        binary, pickled = tmp_path / "bin" / f"data_batch_{part + 1}.bin", tmp_path / "py" / "cifar-10-batches-py" / f"data_batch_{part + 1}"
        for file in (binary, pickled):
            file.parent.mkdir(parents=True, exist_ok=True)
        binary.write_bytes(np.concatenate([labels[rows, None], pixels[rows]], axis=1).tobytes())
        raw = pickle.dumps({b"data": pixels[rows], b"labels": labels[rows].tolist()}, protocol=2)
        pickled.write_bytes(raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))  # as the published files say it
    fields = {**IMAGE, "image": Field((3, 32, 32))}
    batches = [data.load("cifar10", fields, folder=tmp_path / version).batch(torch.arange(10)) for version in ("bin", "py")]
    assert torch.equal(batches[0]["image"], torch.from_numpy(pixels).view(10, 3, 32, 32).float() / 255)
    assert batches[0]["label"].tolist() == labels.tolist()
    assert all(torch.equal(batches[0][k], batches[1][k]) for k in fields)
    with pytest.raises(RequestError, match="there is no test_batch"):
        data.load("cifar10", fields, split="validation", folder=tmp_path / "bin")


class Malicious:
    """A pickle that calls a function when it is read."""

    def __init__(self, call, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("call", [exec, eval, getattr, __import__])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, call) -> None:
    mark = tmp_path / "was-run"
    code = f"open({str(mark)!r}, 'w').close()"
    attack = Malicious(call, *((code,) if call in (exec, eval) else ("os", "system") if call is getattr else ("os",)))
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": attack, b"labels": []}))
    with pytest.raises(RequestError, match="which data never needs; it was not run"):
        data.load("cifar10", {**IMAGE, "image": Field((3, 32, 32))}, split="validation", folder=folder)
    assert not mark.exists()


def test_the_unpickler_allows_one_codec_only() -> None:
    raw = pickle.dumps(Malicious(codecs.encode, "x", "rot13"))
    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        images.ArrayUnpickler(io.BytesIO(raw)).load()


@pytest.mark.parametrize("fields", [TOKENS, IMAGE, CLICKS, VOLUME], ids=["tokens", "image", "clicks", "volume"])
def test_synthetic_samples_depend_on_seed_and_index_alone(fields: dict[str, Field]) -> None:
    dataset = data.load("synthetic", fields)
    whole = dataset.batch(torch.arange(16))
    assert len(dataset) == 4096
    for name, field in fields.items():
        assert whole[name].shape == (16, *field.shape)
        assert whole[name].dtype == getattr(torch, field.dtype)
        assert not field.high or 0 <= whole[name].min() <= whole[name].max() < field.high
    again = data.load("synthetic", fields).batch(torch.tensor([11, 3]))
    assert all(torch.equal(again[name], whole[name][[11, 3]]) for name in fields)
    first = next(iter(fields))
    for other in (data.load("synthetic", fields, seed=1), data.load("synthetic", fields, split="validation")):
        assert not torch.equal(other.batch(torch.arange(16))[first], whole[first])


def test_synthetic_values_do_not_change_between_versions() -> None:
    """A run's curve is comparable with an older one only while these stay."""
    batch = data.load("synthetic", CLICKS, seed=3).batch(torch.tensor([5]))
    assert batch["sparse"].tolist() == [[0, 3, 0, 184]]
    assert batch["dense"][0, :2].tolist() == pytest.approx([0.8291, 0.1385], abs=1e-4)


def linear_fit(inputs: Tensor, targets: Tensor) -> Tensor:
    design = torch.cat((inputs, torch.ones(len(inputs), 1)), dim=1)
    return design @ torch.linalg.lstsq(design, targets).solution


def test_synthetic_targets_can_be_learned() -> None:
    volume = data.load("synthetic", VOLUME).batch(torch.arange(1000))
    predicted = linear_fit(volume["volume"].mean(dim=(2, 3, 4)), volume["target"])
    assert (predicted - volume["target"]).square().mean() < 0.05 * volume["target"].var()
    picture = data.load("synthetic", IMAGE).batch(torch.arange(2000))
    assert picture["label"].bincount(minlength=10).min() > 50
    scores = linear_fit(picture["image"].flatten(1), torch.nn.functional.one_hot(picture["label"], 10).float())
    assert (scores.argmax(1) == picture["label"]).float().mean() > 0.5
    tokens = data.load("synthetic", TOKENS).batch(torch.arange(100))["tokens"]
    steps = (tokens[:, 1:] - tokens[:, :-1]) % 64
    assert (steps == steps.flatten().mode().values).float().mean() > 0.75


@pytest.mark.parametrize(
    ("name", "fields", "options", "message"),
    [
        ("sorce", TOKENS, {}, "unknown data set 'sorce'; did you mean 'source'"),
        ("source", IMAGE, {}, "feeds language models"),
        ("source", {"tokens": Field((9,), "int64", 100)}, {}, "vocabulary of 256"),
        ("source", {"tokens": Field((10**8,), "int64", 256)}, {}, "use a smaller --seq"),
        ("digits", TOKENS, {}, "has the fields image and label"),
        ("digits", {"label": Field((), "int64", 3)}, {}, "10 classes"),
        ("digits", {"image": Field((64,))}, {}, r"\(channels, height, width\)"),
        ("mnist", IMAGE, {}, "give the folder"),
        ("mnist", IMAGE, {"folder": Path("/no/such")}, "there is no train-images-idx3-ubyte"),
        ("cifar10", IMAGE, {"folder": Path("/no/such")}, "there is no data_batch_1.bin"),
        ("synthetic", {"x": Field((2,), "int64")}, {}, "has no bound"),
        ("synthetic", {"x": Field((2,), "float31")}, {}, "no type 'float31'"),
        ("source", TOKENS, {"split": "test"}, "unknown split 'test'"),
    ],
)
def test_wrong_requests_are_one_clear_line(name: str, fields: dict[str, Field], options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        data.load(name, fields, **options)
    assert "\n" not in str(caught.value)


# Loader


class Numbers:
    """Sample i is i. Can be told to fail at one sample; remembers which batches were asked for."""

    def __init__(self, length: int = 100, fail_at: int = -1) -> None:
        self.length, self.fail_at = length, fail_at
        self.threads: list[str] = []

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        self.threads.append(threading.current_thread().name)
        if self.fail_at in indices.tolist():
            raise OSError("disk on fire")
        return {"x": indices.clone()}


def loader_threads() -> int:
    return sum(t.name.startswith("loader") for t in threading.enumerate())


def test_ranks_together_load_the_global_batches_in_the_background() -> None:
    dataset = Numbers()
    ranks = [Loader(dataset, GlobalSampler(100, 10, seed=4), first, count, steps=12) for first, count in ((0, 3), (3, 7))]
    reference = GlobalSampler(100, 10, seed=4)
    for step, (a, b) in enumerate(zip(*ranks, strict=True)):
        assert torch.equal(torch.cat((a["x"], b["x"])), reference.indices(step))
    assert step == 11
    assert all(name.startswith("loader") for name in dataset.threads)
    assert loader_threads() == 0


def test_the_state_counts_batches_handed_out() -> None:
    first = Loader(Numbers(), GlobalSampler(100, 10, seed=4), 0, 10)
    stream = iter(first)
    seen = [next(stream)["x"] for _ in range(3)]
    state = first.state_dict()
    assert state["position"] == 30
    stream.close()
    second = Loader(Numbers(), GlobalSampler(100, 6, seed=4), 0, 6, steps=5)
    second.load_state_dict(state)
    seen += [batch["x"] for batch in second]
    assert torch.equal(torch.cat(seen), GlobalSampler(100, 60, seed=4).indices(0))
    assert second.state_dict()["position"] == 60
    assert torch.equal(next(iter(second))["x"], GlobalSampler(100, 66, seed=4).indices(0)[60:])  # goes on where it stopped


def test_leaving_early_leaves_no_thread_and_little_work() -> None:
    dataset = Numbers()
    for _ in Loader(dataset, GlobalSampler(100, 10, seed=0), 0, 10):
        break
    assert loader_threads() == 0
    assert len(dataset.threads) <= 4


def test_an_exception_in_the_thread_reaches_the_loop_after_the_good_batches() -> None:
    sampler = GlobalSampler(100, 10, seed=0, shuffle=False)
    loader, seen = Loader(Numbers(fail_at=25), sampler, 0, 10), []
    with pytest.raises(OSError, match="disk on fire"):
        seen.extend(batch["x"][0].item() for batch in loader)
    assert seen == [0, 10]
    assert loader.state_dict()["position"] == 20
    assert loader_threads() == 0


def test_a_slice_outside_the_batch_is_refused() -> None:
    for first, count in ((-1, 2), (0, 0), (8, 3)):
        with pytest.raises(RequestError, match="not a part of a global batch of 10"):
            Loader(Numbers(), GlobalSampler(100, 10, seed=0), first, count)
