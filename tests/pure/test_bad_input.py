"""Bad input: broken, huge and impossible files and numbers are refused with one line; nothing else than RequestError comes out."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import calibration

from meshwright.core import text_files
from meshwright.core.calibration_checks import check_calibration
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import dump_json, from_data, read_json, to_data, write_json
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.describe.discover import discover
from meshwright.orchestrate import calibrate
from meshwright.orchestrate.config import load_config, parse_setting
from meshwright.zoo import load

PLANS = sorted((Path(__file__).parent.parent / "golden" / "plans_v1").glob("*.json"))
CONFIGS = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.json"))
MACHINES = Path(text_files.__file__).parent.parent / "describe" / "catalog" / "machines"
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_TOML = "a = " + DEEP
DIGITS = "9" * 5000


def refusal(call: Callable[[], object]) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(RequestError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 1000
    return line


# Files


READERS: dict[str, Callable[[Path], object]] = {
    "plan.json": Plan.load,
    "config.json": lambda path: load_config(path, {}),
    "cluster.json": lambda path: resolve_cluster(str(path), {}),
    "cluster.toml": lambda path: resolve_cluster(str(path), {}),
    "hf/config.json": lambda path: load(f"hf:{path}"),
    "calibration.json": lambda path: read_calibration(path),
}


def read_calibration(path: Path) -> object:
    environ = {"XDG_CACHE_HOME": str(path.parent)}
    cached = calibrate.cache_path(discover(environ), environ)
    cached.parent.mkdir(exist_ok=True)
    cached.symlink_to(path)
    return calibrate.load_cached(discover(environ), environ)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", ["deep", "digits", "binary", "empty", "folder", "pipe", "huge", "null"])
def test_a_file_that_is_none(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    number = f"name = {DIGITS}" if name.endswith("toml") else f'{{"version": {DIGITS}}}'
    texts = {"deep": DEEP_TOML if name.endswith("toml") else DEEP, "digits": number, "empty": "", "null": "null"}
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    elif content == "binary":
        path.write_bytes(bytes(range(256)))
    elif content == "huge":
        with path.open("wb") as file:
            file.truncate(2**30)  # takes no space
    else:
        path.write_text(texts[content])
    refusal(lambda: READERS[name](path))


def test_a_setting_that_is_deep_or_long() -> None:
    for value in (DEEP, DIGITS, "1e999", "-1", "[" * 900 + "]" * 900):
        for key in ("steps", "global_batch", "placements", "seed", "bucket_mb", "timeout_s", "mesh", "betas"):
            key, parsed = parse_setting(f"{key}={value}")
            if not (key == "mesh" and isinstance(parsed, str)):
                refusal(lambda key=key, parsed=parsed: load_config(None, {key: parsed}))  # type: ignore[misc]


# Numbers


@pytest.mark.parametrize("text", [f"cp={10**30}", f"tp={2**31}", "dp=100000,shard=100000", f"tp={2**20}x2", f"dp={DIGITS}"])
def test_a_mesh_beyond_all_machines(text: str) -> None:
    refusal(lambda: Mesh.parse(text))


@pytest.mark.parametrize("mesh", [{"tp": [2**31]}, {"cp": 10**30}, {"dp": 2**20, "pp": 2}, {"tp": [10**4000]}])
def test_a_plan_with_such_a_mesh(mesh: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"model": "vae", "global_batch": 8, "mesh": mesh}))
    refusal(lambda: Plan.load(tmp_path / "plan.json"))


@pytest.mark.parametrize("name", ["ideal:99999999999", f"ideal:{DIGITS}", "dgx-h100:99999999999", "dgx-h100:1000000", "ideal:²", "ideal:0"])
def test_a_cluster_beyond_all_machines(name: str) -> None:
    refusal(lambda: resolve_cluster(name, {}))


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400])
def test_a_number_that_is_not_finite(value: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(f'{{"model": "vae", "global_batch": 8, "sync": {{"timeout_s": {value}}}}}')
    assert "expected a finite number" in refusal(lambda: Plan.load(tmp_path / "plan.json"))


# Calibrations


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("layouts", 0, "memory", 0, 1), -1e9),
        (("layouts", 0, "memory", 0, 0), 0.0),
        (("layouts", 0, "compute", "matmul/fp32", 0, 1), 0.0),
        (("layouts", 1, "collectives", "gloo/all_reduce", "bytes_per_s"), -1.0),
        (("layouts", 1, "collectives", "gloo/all_reduce", "alpha_s"), -1.0),
        (("layouts", 1, "collectives", "gloo/all_reduce", "alpha_s"), float("nan")),
        (("layouts", 0, "op_overhead_s"), float("inf")),
        (("layouts", 0, "op_overhead_s"), -1.0),
        (("layouts", 0, "overlap"), 1.5),
        (("layouts", 0, "ranks"), 0),
        (("layouts", 0, "memory_correction"), 0.0),
        (("copies",), {"host_to_device": 0.0}),
        (("error",), -0.1),
        (("layouts",), []),
    ],
)  # fmt: skip
def test_a_calibration_with_impossible_rates(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    data = to_data(calibration(4))
    entry = data
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value
    (tmp_path / "rates.json").write_text(json.dumps(data))
    assert "delete" in refusal(lambda: read_calibration(tmp_path / "rates.json"))


def test_a_measured_calibration_passes() -> None:
    check_calibration(calibration(4), "rates")


# Hugging Face configurations


@pytest.mark.parametrize(
    "change",
    [{"n_layer": "<b>"}, {"n_layer": 10**9}, {"n_head": 0}, {"n_embd": [1]}, {"n_embd": -4}, {"vocab_size": "<b>"}, {"n_layer": None},
     {"n_head": 10**30}, {"vocab_size": -5}, {"n_positions": "x"}, {"activation_function": "<b>"}, {"model_type": "<b>"}, {"model_type": 3}],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_no_model_has(change: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 300, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **change}))
    assert "hf:" in refusal(lambda: load(f"hf:{tmp_path}").build())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_line_that_converts_them(name: str, tmp_path: Path) -> None:
    sizes = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 300, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "training_args.bin").write_bytes(b"")
    assert "random weights: there are no *.safetensors files" in load(f"hf:{tmp_path}").note
    (tmp_path / name).write_bytes(b"")
    line = refusal(lambda: load(f"hf:{tmp_path}"))
    assert name in line
    assert f"from_pretrained({str(tmp_path)!r}" in line
    assert f"save_pretrained({str(tmp_path)!r})" in line
    assert "random weights, as random_init asks" in load(f"hf:{tmp_path}", random_init=True).note
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "the weights in its folder" in load(f"hf:{tmp_path}").note


# Mutated files


_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**62, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("-inf"), "", "<b>", "dp", "x" * 5000,
    [], [[]], {}, [1, 2], {"kind": []}, {"kind": 3}, ["a"], [None], {"": None},
)  # fmt: skip


def mutate(data: Any, chance: random.Random) -> Any:
    """A copy of the data in which one value, at any depth, is another, missing, doubled or under another key."""
    data = json.loads(json.dumps(data))
    entry = data
    while True:
        key = chance.choice(list(entry) if isinstance(entry, dict) else range(len(entry)))
        if isinstance(entry[key], (dict, list)) and entry[key] and chance.random() < 0.8:
            entry = entry[key]
            continue
        action = chance.randrange(8)
        if action == 0:
            del entry[key]
        elif action == 1 and isinstance(entry, dict):
            entry[f"{key}x"] = entry.pop(key)
        elif action == 2 and isinstance(entry, list):
            entry.append(entry[key])
        elif action == 3 and isinstance(entry[key], (int, float)) and not isinstance(entry[key], bool):
            entry[key] = entry[key] * chance.choice((-1, 2, 10**9, 0.5))
        else:
            entry[key] = chance.choice(_VALUES)
        return data


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_a_mutated_plan_is_read_or_refused(file: Path) -> None:
    original = json.loads(file.read_text())
    lines: list[str] = []
    for seed in range(150):
        data = mutate(original, random.Random(seed))
        try:
            plan = from_data(Plan, data, file.name)
            plan.summary()
        except RequestError as error:
            lines.append(str(error))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_mutated_configuration_is_read_or_refused(file: Path, tmp_path: Path) -> None:
    original = json.loads(file.read_text())
    lines: list[str] = []
    for seed in range(40):
        (tmp_path / file.name).write_text(json.dumps(mutate(original, random.Random(seed))))
        try:
            load_config(tmp_path / file.name, {}, lambda *_: 1)
        except RequestError as error:
            lines.append(str(error))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert not any("\n" in line for line in lines)


def test_a_mutated_calibration_is_read_or_refused() -> None:
    original = to_data(calibration(4))
    lines: list[str] = []
    for seed in range(300):
        try:
            kind = type(calibration(4))
            check_calibration(from_data(kind, mutate(original, random.Random(seed)), "rates"), "rates")
        except RequestError as error:
            lines.append(str(error))
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("file", sorted(MACHINES.glob("*.toml")), ids=lambda file: file.stem)
def test_a_mutated_cluster_file_is_read_or_refused(file: Path, tmp_path: Path) -> None:
    """Characters of a file are changed: some of what comes out is TOML still."""
    text = file.read_text()
    lines: list[str] = []
    for seed in range(60):
        chance = random.Random(seed)
        at = chance.randrange(len(text))
        changed = text[:at] + chance.choice(['"', "0", "999999999", "-", "[", "inf", "nan", "=", "", "\n", "e9"]) + text[at + chance.randrange(3) :]
        (tmp_path / file.name).write_text(changed)
        try:
            resolve_cluster(f"{tmp_path / file.name}", {})
        except RequestError as error:
            lines.append(str(error))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert not any("\n" in line for line in lines)


# Names


def test_a_name_is_suggested_only_where_it_is_near() -> None:
    assert "one of: cnn, cosmoflow" in refusal(lambda: load("nosuchmodel"))
    assert "did you mean 'cosmoflow'?" in refusal(lambda: load("cosmoflw"))
    assert "did you mean 'gpt-mini'?" in refusal(lambda: load("gpt-mni"))
    assert len(str(unknown_name_error("run", "x" * 9000, [f"run-{i}" for i in range(10_000)]))) < 1000


# Writing


def test_json_is_written_whole_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.json"
    other.write_text("mine")
    (tmp_path / "x.json").symlink_to(other)
    (tmp_path / "x.json.partial").symlink_to(other)
    write_json(tmp_path / "x.json", {"a": 1})
    assert other.read_text() == "mine"  # neither link was followed
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["other.json", "x.json", "x.json.partial"]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "x.json", {"a": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def test_nothing_but_files_is_written_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        assert "name a file" in refusal(lambda name=name: write_json(tmp_path / name, {}))  # type: ignore[misc]


def test_a_calibration_is_private(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = calibrate.save_to_cache(calibration(1), discover(environ), environ)
    assert path is not None
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [0o600, 0o700]


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"losses": [1.0, float("nan")], "best": float("inf"), "pair": (float("-inf"), 2)})
    assert read_json(tmp_path / "x.json") == {"losses": [1.0, None], "best": None, "pair": [None, 2]}
    assert dump_json({"a": float("nan")}) == '{"a": null}'
