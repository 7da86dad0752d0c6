"""A model that answers samples gives each what it would get alone, whatever its outputs look like and whoever comes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright.core.errors import RequestError
from meshwright.core.task import Field, Task
from meshwright.serve.input_specs import InputSpec, instance_schema, parse_instance, specs_from_data, specs_to_data
from meshwright.serve.model_inputs import find_inputs
from meshwright.serve.predict_model import ModelBrokenError, Outputs, PredictModel
from meshwright.serve.tensor_messages import decode_arrays, encode_message, payload_size

CPU = torch.device("cpu")


def plain(groups: list[Outputs], place: int) -> Any:
    """What one sample got, as the server reads it."""
    group = next(g for g in groups if place in g.samples)
    assert not group.error, group.error

    def fill(tree: Any) -> Any:
        if isinstance(tree, dict):
            if "$" in tree:
                tensor = group.tensors[tree["$"]]
                return (tensor[group.samples.index(place)] if tree["$"] in group.rows else tensor).tolist()
            return {key: fill(value) for key, value in tree[""].items()}
        return [fill(value) for value in tree] if isinstance(tree, list) else tree

    return fill(group.tree)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Record:
    value: Tensor
    name: str = "it"


TABLE = torch.arange(12.0).reshape(4, 3)
OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[list[float]], Any]]] = {
    "tensor": (lambda x: x * 2, lambda x: [2 * v for v in x]),
    "tuple": (lambda x: (x, x[:, 0]), lambda x: [x, x[0]]),
    "named tuple": (lambda x: Pair(x, x + 1), lambda x: {"first": x, "second": [v + 1 for v in x]}),
    "record": (lambda x: Record(x), lambda x: {"value": x, "name": "it"}),
    "nothing": (lambda x: {"x": x, "none": None}, lambda x: {"x": x}),
    "dollar": (lambda x: {"$": x}, lambda x: {"$": x}),
    "of all": (lambda x: {"x": x, "table": TABLE}, lambda x: {"x": x, "table": TABLE.tolist()}),  # as many rows as some batches
    "list": (lambda x: [{"row": row} for row in x], lambda x: [{"row": x}]),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("sizes", [(), (4, 8)])
def test_each_sample_gets_what_it_would_get_alone(name: str, sizes: tuple[int, ...]) -> None:
    call, expected = OUTPUTS[name]
    model = PredictModel(lambda inputs: call(inputs["x"]), sizes)
    for count in (1, 4, 3, 1, 5, 4):
        x = torch.arange(3.0 * count).reshape(count, 3)
        groups = model.run({"x": x})
        assert [plain(groups, i) for i in range(count)] == [expected(row.tolist()) for row in x]
    assert model.samples_meet == (name == "list")


def test_batches_go_together_once_they_have_been_tried() -> None:
    seen: list[int] = []
    model = PredictModel(lambda inputs: seen.append(len(inputs["x"])) or inputs["x"].sum(1), (2, 8))  # type: ignore[func-returns-value]
    model.run({"x": torch.zeros(3, 2)})
    assert seen == [1, 1, 1, 8]  # alone, then with one more, filled up
    seen.clear()
    model.run({"x": torch.zeros(5, 2)})
    model.run({"x": torch.zeros(5, 4)})  # another shape
    assert seen == [8, 1, 1, 1, 1, 1, 8]


@pytest.mark.parametrize("call", [lambda x: x - x.mean(0), lambda x: x.mean(), lambda x: x.flip(0), lambda x: x.cumsum(0), lambda x: x / x.norm()])
def test_samples_that_meet_are_told_from_others_even_if_they_are_equal(call: Callable[[Tensor], Tensor]) -> None:
    model = PredictModel(lambda inputs: call(inputs["x"]))
    for x in (torch.ones(4, 2), torch.arange(8.0).reshape(4, 2)):
        groups, alone = model.run({"x": x}), [PredictModel(lambda inputs: call(inputs["x"])).run({"x": row[None]}) for row in x]
        assert [plain(groups, i) for i in range(4)] == [plain(found, 0) for found in alone]
    assert model.samples_meet


def test_a_sample_that_fails_fails_alone() -> None:
    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        if bool((inputs["x"] == 7).any()):
            raise ValueError("seven\nmore")
        return inputs["x"]

    model = PredictModel(call)
    model.run({"x": torch.zeros(2, 1)})
    groups = model.run({"x": torch.tensor([[1.0], [7.0], [3.0]])})
    assert [plain(groups, 0), plain(groups, 2)] == [[1.0], [3.0]] and groups[1].error == "ValueError: seven"
    with pytest.raises(ModelBrokenError):
        PredictModel(lambda _: (_ for _ in ()).throw(RuntimeError("CUDA error: device-side assert"))).run({"x": torch.zeros(1, 1)})


# -- inputs --


def test_inputs_of_a_module_with_a_loss_of_its_own() -> None:
    class Model(nn.Module):
        def forward(self, pixels: Tensor, *, weights: list[Tensor], deep: bool = False) -> Tensor:
            return pixels.sum() + weights[0].sum()

    fields = {"image": Field((2, 2)), "tokens": Field((5,), "int64", 9), "label": Field((), "int64", 3)}
    loss = lambda model, batch: model(batch["image"] / 2, weights=[batch["tokens"][:, 1:]], deep=True)  # noqa: E731
    found = find_inputs(Model(), Task("m", Model, loss, fields), CPU)
    assert [(s.name, s.shape, s.dtype, s.high) for s in found.specs] == [("pixels", (2, 2), "float32", 0), ("weights.0", (4,), "int64", 9)]
    args, kwargs = found.arguments({"pixels": torch.ones(1, 2, 2), "weights.0": torch.ones(1, 4)})
    assert len(args) == 1 and kwargs["deep"] is True and kwargs["weights"][0].shape == (1, 4)
    assert specs_from_data(specs_to_data(found.specs)) == found.specs


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: batch["x"].sum(), "does not call the model"), (lambda model, batch: batch["y"], "fails on made-up samples"),
        (lambda model, batch: model(batch["x"].sum()), "the first dim must count samples"),
    ],
)  # fmt: skip
def test_a_loss_that_does_not_show_the_inputs_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        find_inputs(nn.Linear(2, 1), Task("m", lambda: nn.Linear(2, 1), loss, {"x": Field((2,))}), CPU)


def test_inputs_of_a_signature() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, n: int, mask: Tensor | None = None, scale: float = 1.0, *more: Any, **rest: Any) -> Tensor:
            return x

    found = find_inputs(Model(), Task("m", Model, lambda m, b: m, {}), CPU)
    assert [(s.name, s.required, s.shape) for s in found.specs] == [("x", True, None), ("mask", False, None)]


# -- JSON to arrays --


IMAGE, TOKENS = InputSpec("image", (2, 3), "float32"), InputSpec("ids", (None,), "int64", 10)
FLAG, ANY = InputSpec("flag", (), "bool"), InputSpec("any")


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        (IMAGE, [[1, 2, 3], [4, 5.5, 6]], np.array([[1, 2, 3], [4, 5.5, 6]], "float32")), (TOKENS, [1, 9], np.array([1, 9])),
        (TOKENS, [1.0, 9], np.array([1, 9])),
        (TOKENS, [], np.array([], "int64")),
        (FLAG, True, np.array(True)), (ANY, [1, 2], np.array([1, 2])), (ANY, [1, 2.5], np.array([1, 2.5], "float32")),
        (ANY, [[True]], np.array([[True]])),
        (ANY, 3.5, np.array(3.5, "float32")),
    ],
)  # fmt: skip
def test_samples_become_arrays(spec: InputSpec, value: Any, expected: Any) -> None:
    found = parse_instance([spec], {spec.name: value}, "it")[spec.name]
    assert found.dtype == expected.dtype and np.array_equal(found, expected)
    assert np.array_equal(parse_instance([spec], value, "it")[spec.name], expected) if not isinstance(value, dict) else True


@pytest.mark.parametrize(
    ("spec", "value", "words"),
    [
        (IMAGE, [[1, 2, 3], [4, None, 6]], "it.image[1][1]: a number is needed, and there is null"), (IMAGE, [[1, 2, 3]], "shape is (1, 3)"),
        (IMAGE, [[1, 2, 3], [4, "5", 6]], "it.image[1][1]: a number is needed, and there is '5'"), (IMAGE, [[1, 2], [3]], "lists differ in length"),
        (IMAGE, [[1, 2, 3], [4, True, 6]], "it.image[1][1]: a number is needed, and there is true"), (IMAGE, [[1, 2, {}], [4, 5, 6]], "an object"),
        (IMAGE, [[1, 2, 10**400], [4, 5, 6]], "too large"), (IMAGE, [[1, 2, 1e39], [4, 5, 6]], "too large for float32"),
        (TOKENS, [10], "it.ids[0] is 10, and must be from 0 to 9"),
        (TOKENS, [-1], "it.ids[0] is -1"), (TOKENS, [1.5], "an integer is needed, and there is 1.5"), (TOKENS, [2**64], "too large"),
        (TOKENS, [[1]], "its shape is (1, 1)"),
        (FLAG, 1, "true or false is needed, and there is 1"), (ANY, ["x"], "a number is needed"), (ANY, [[1], 2], "differ in length"),
        (InputSpec("b", (), "uint8"), 300, "too large for uint8"), (InputSpec("b", (), "uint8"), -1, "too large for uint8"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_sample_is_said(spec: InputSpec, value: Any, words: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_instance([spec], {spec.name: value}, "it")
    assert words in str(raised.value) and len(str(raised.value)) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["image", "ids", "x"]), inner, max_size=3), max_leaves=12,
)  # fmt: skip


@given(json_values)
def test_any_json_is_taken_or_refused(value: Any) -> None:
    """With arrays that fit, or with a RequestError; nothing else is raised."""
    for specs in ([IMAGE, TOKENS], [ANY], [FLAG], [TOKENS]):
        try:
            found = parse_instance(specs, value, "it")
        except RequestError:
            continue
        for spec in specs:
            assert spec.dtype is None or found[spec.name].dtype.name == spec.dtype


def test_the_schema_allows_what_is_taken() -> None:
    whole = instance_schema([IMAGE, TOKENS, InputSpec("mask", None, "int64", required=False)])
    assert whole["required"] == ["image", "ids"] and whole["properties"]["image"]["minItems"] == 2
    assert whole["properties"]["ids"]["items"] == {"type": "integer", "minimum": 0, "maximum": 9}
    assert "anyOf" in instance_schema([IMAGE])


# -- messages --


@given(st.lists(st.tuples(st.sampled_from(["float32", "int64", "bool", "uint8"]), st.lists(st.integers(0, 4), max_size=3)), max_size=4))
def test_arrays_arrive_as_they_were_sent(shapes: list[tuple[str, list[int]]]) -> None:
    import json

    arrays = [np.arange(int(np.prod(shape))).reshape(shape).astype(dtype) for dtype, shape in shapes]
    line, *parts = encode_message({"batch": 1}, arrays)
    header = json.loads(line)
    assert payload_size(header) == sum(map(len, parts))
    for found, sent in zip(decode_arrays(header, b"".join(parts)), arrays, strict=True):
        assert found.dtype == sent.dtype and np.array_equal(found, sent)


def test_messages_that_lie_about_their_arrays_are_refused() -> None:
    for header in ({"arrays": [["float32", [4]]], "bytes": 8}, {"arrays": [["object", [1]]], "bytes": 8}, {"arrays": [], "bytes": 8}):
        with pytest.raises(ValueError):
            decode_arrays(header, b"x" * 8)
    with pytest.raises(ValueError):
        payload_size({"bytes": -1})
