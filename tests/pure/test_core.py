"""Core values: JSON there and back, what their errors say, units, meshes, and what a plan refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.calibration import AlphaBetaModel, Calibration, Rates
from meshwright.core.cluster import Cluster, Device, Interface, Link, Node
from meshwright.core.errors import MeshwrightError, RequestError, RunError, unknown_name_error
from meshwright.core.estimate import Estimate
from meshwright.core.mesh import AXES, Mesh
from meshwright.core.plan import OVERLAPS, BalancePolicy, MemoryPolicy, Plan, Stage, SyncPolicy
from meshwright.core.quantities import parse_bytes, show_bytes, show_count, show_rate, show_seconds
from meshwright.core.schedule import wire_factor
from meshwright.core.serialization import from_data, read_json, to_data, write_json

WORDS = st.text(max_size=12)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SIZES = st.integers(0, 2**63 - 1)
DEGREES = st.integers(1, 4)
OVERLAPPED = st.sampled_from([(), ("inputs",), OVERLAPS])


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    tp = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    return Mesh(**{axis: draw(st.integers(1, 2)) for axis in AXES if axis != "tp"}, tp=tp)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Legal plans: ZeRO goes with a shard axis, the batch or the shares divide, and a pipeline has as many stages as ranks."""
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    pp = draw(DEGREES)
    grid = st.sampled_from([(1,), (3,)] if pp > 1 else [(1,), (2, 2)])
    mesh = Mesh(dp=draw(DEGREES), shard=draw(st.integers(2, 4)) if zero else 1, pp=pp, tp=draw(grid))
    micro = draw(st.integers(1, 5))
    piped = mesh.pp > 1
    uneven = st.just([]) if piped else st.lists(st.integers(micro, 50), min_size=mesh.data_parallel_size, max_size=mesh.data_parallel_size)
    shares = draw(st.one_of(st.just([]), uneven))
    stages = st.lists(st.builds(Stage, st.lists(WORDS, max_size=3).map(tuple)), min_size=mesh.pp if piped else 0, max_size=mesh.pp if piped else 2)
    return Plan(
        model=draw(WORDS),
        global_batch=sum(shares) if shares else mesh.data_parallel_size * micro * draw(st.integers(1, 9)),
        mesh=mesh,
        micro_batches=micro,
        stages=tuple(draw(stages)),
        schedule="gpipe",
        memory=MemoryPolicy(
            zero,  # type: ignore[arg-type]
            tuple(draw(st.lists(WORDS, max_size=3))),
            draw(st.sampled_from(["none", "full"])),
            draw(st.sampled_from(["fp64", "fp32", "bf16", "fp16"])),
        ),
        sync=SyncPolicy(draw(st.integers(1, 2**40)), draw(st.integers(1, 2**40)), draw(OVERLAPPED), draw(st.floats(0.1, 1e6))),
        balance=BalancePolicy(tuple(shares)),
        placements=draw(st.dictionaries(WORDS, WORDS, max_size=3)),
        compile=draw(st.sampled_from(["none", "blocks"] if piped else ["none", "blocks", "model"])),
        device=draw(st.sampled_from(["cpu", "cuda"])),
        backend=draw(WORDS),
        threads=draw(st.integers(0, 256)),
    )


LINKS = st.builds(Link, WORDS, NUMBERS, NUMBERS)
DEVICES = st.builds(Device, st.sampled_from(["cpu", "cuda"]), WORDS, st.integers(0, 99), SIZES, st.dictionaries(WORDS, NUMBERS, max_size=3), NUMBERS)
NODES = st.builds(
    Node,
    name=WORDS,
    devices=st.lists(DEVICES, max_size=3).map(tuple),
    cores=st.integers(1, 256),
    memory_bytes=SIZES,
    cpu=WORDS,
    numa=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=2).map(tuple),
    interfaces=st.lists(st.builds(Interface, WORDS, WORDS, NUMBERS), max_size=2).map(tuple),
    link=LINKS,
)
CLUSTERS = st.builds(Cluster, WORDS, st.lists(NODES, max_size=2).map(tuple), LINKS, WORDS)
POINTS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple)
RATES = st.builds(
    Rates,
    ranks=st.integers(1, 99),
    threads=st.integers(0, 99),
    compute=st.dictionaries(WORDS, POINTS, max_size=2),
    memory=POINTS,
    op_overhead_s=NUMBERS,
    collectives=st.dictionaries(WORDS, st.builds(AlphaBetaModel, NUMBERS, NUMBERS), max_size=2),
    overlap=st.floats(0, 1),
    base_bytes=SIZES,
)
CALIBRATIONS = st.builds(
    Calibration, WORDS, WORDS, WORDS, st.lists(RATES, max_size=2).map(tuple), st.dictionaries(WORDS, NUMBERS, max_size=2), WORDS, NUMBERS
)
ESTIMATES = st.builds(
    Estimate,
    step_s=NUMBERS,
    breakdown=st.dictionaries(WORDS, NUMBERS, max_size=3),
    memory_bytes=st.lists(SIZES, max_size=3).map(tuple),
    memory_kinds=st.dictionaries(WORDS, SIZES, max_size=3),
    samples_per_s=NUMBERS,
    fits=st.booleans(),
    reason=WORDS,
    error=NUMBERS,
    tokens_per_s=st.none() | NUMBERS,
    mfu=st.none() | NUMBERS,
    traffic_bytes=NUMBERS,
    notes=st.lists(WORDS, max_size=2).map(tuple),
)


# JSON there and back


@pytest.mark.parametrize("values", [plans(), CLUSTERS, CALIBRATIONS, ESTIMATES], ids=["Plan", "Cluster", "Calibration", "Estimate"])
def test_a_value_survives_json(values: st.SearchStrategy[Any]) -> None:
    @given(values)
    def check(value: Any) -> None:
        text = json.dumps(to_data(value))
        back = from_data(type(value), json.loads(text), "file")
        assert back == value
        assert json.dumps(to_data(back)) == text

    check()


@given(meshes())
def test_a_mesh_survives_json_with_all_its_dimensions(mesh: Mesh) -> None:
    assert from_data(Mesh, json.loads(json.dumps(to_data(mesh))), "mesh") == mesh


def test_a_plan_survives_a_file_and_a_file_shows_every_field(tmp_path: Path) -> None:
    plan = Plan("vae", 64, Mesh(shard=2), memory=MemoryPolicy(2, ("encoder",)), placements={"a": "column"})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    written = json.loads((tmp_path / "plan.json").read_text())
    assert set(written) == {f.name for f in dataclasses.fields(Plan)}
    assert set(written["sync"]) == {f.name for f in dataclasses.fields(SyncPolicy)}
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], "a partial file was left behind"


def test_fields_left_out_take_their_defaults() -> None:
    assert from_data(Plan, {"model": "vae", "global_batch": 8, "mesh": {"dp": 2}}, "p") == Plan("vae", 8, Mesh(dp=2))


def test_whole_numbers_are_good_where_a_number_is_wanted() -> None:
    found = from_data(SyncPolicy, {"timeout_s": 30}, "sync").timeout_s
    assert found == 30.0
    assert isinstance(found, float)


def whole_plan() -> dict[str, Any]:
    return to_data(Plan("vae", 64, Mesh(dp=2), stages=(Stage(("a",)),), balance=BalancePolicy((32, 32))))


def nested_keys() -> list[tuple[str, ...]]:
    """Paths to every key of a plan; words of two letters are left out, a misspelling of them is not recognisable."""

    def walk(data: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [(*path, k) for k in data] + [p for k, v in data.items() if isinstance(v, dict) for p in walk(v, (*path, k))]

    return [path for path in walk(whole_plan(), ()) if len(path[-1]) > 2]


@pytest.mark.parametrize("path", nested_keys(), ids=".".join)
@pytest.mark.parametrize("spoil", [lambda w: w[:-1], lambda w: w + "s", lambda w: w[1] + w[0] + w[2:]], ids=["short", "plural", "swapped"])
def test_a_misspelt_key_names_the_right_one_and_where(path: tuple[str, ...], spoil: Any) -> None:
    data = inner = whole_plan()
    for key in path[:-1]:
        inner = inner[key]
    wrong = spoil(path[-1])
    inner[wrong] = inner.pop(path[-1])
    with pytest.raises(RequestError) as error:
        from_data(Plan, data, "plan.json")
    where = ".".join(["plan.json", *path[:-1]])
    assert str(error.value) == f"unknown key '{wrong}' in {where}; did you mean '{path[-1]}'?"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("global_batch",), "64", 'p.json.global_batch: expected int, found "64"'),
        (("global_batch",), True, "p.json.global_batch: expected int, found true"),
        (("global_batch",), 64.0, "p.json.global_batch: expected int, found 64.0"),
        (("model",), None, "p.json.model: expected str, found null"),
        (("mesh",), 3, "p.json.mesh: expected an object, found 3"),
        (("mesh", "dp"), [2], "p.json.mesh.dp: expected int, found [2]"),
        (("mesh", "tp"), 2, "p.json.mesh.tp: expected a list, found 2"),
        (("mesh", "tp"), [2, "1"], 'p.json.mesh.tp[1]: expected int, found "1"'),
        (("stages",), [{"layers": ["a", 1]}], "p.json.stages[0].layers[1]: expected str, found 1"),
        (("stages",), [["a"]], 'p.json.stages[0]: expected an object, found ["a"]'),
        (("placements",), [], "p.json.placements: expected an object, found []"),
        (("placements",), {"a": 1}, "p.json.placements.a: expected str, found 1"),
        (("sync", "overlap"), 1, "p.json.sync.overlap: expected a list, found 1"),
        (("sync", "timeout_s"), True, "p.json.sync.timeout_s: expected a number, found true"),
        (("sync", "timeout_s"), "long", 'p.json.sync.timeout_s: expected a number, found "long"'),
        (("memory", "zero"), 4, "unknown value for p.json.memory.zero: '4'; one of: 0, 1, 2, 3"),
        (("memory", "recompute"), "ful", "unknown value for p.json.memory.recompute: 'ful'; did you mean 'full'?"),
        (("memory", "zero"), [1], "unknown value for p.json.memory.zero"),
        (("device",), "gpu", "unknown value for p.json.device"),
    ],
)
def test_a_wrong_type_says_where(path: tuple[str, ...], value: Any, says: str) -> None:
    data = inner = whole_plan()
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(RequestError, match=re.escape(says)):
        from_data(Plan, data, "p.json")


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(RequestError) as error:
        from_data(Plan, {"model": ["x"] * 1000, "global_batch": 1}, "p.json")
    assert len(str(error.value)) < 120


@pytest.mark.parametrize("key", ["model", "global_batch"])
def test_a_missing_key_is_named(key: str) -> None:
    data = whole_plan()
    del data[key]
    with pytest.raises(RequestError, match=f"p.json: the key '{key}' is missing"):
        from_data(Plan, data, "p.json")


@pytest.mark.parametrize("text", ["", "{", '{"a": 1,}', "[1, 2", "plan"])
def test_what_is_not_json_is_one_line_with_its_place(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("\n\n" + text)
    with pytest.raises(RequestError, match=r"x\.json:\d+: not JSON") as error:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no\.json: No such file"):
        read_json(tmp_path / "no.json")
    with pytest.raises(RequestError, match="is a folder"):
        read_json(tmp_path)


def test_a_file_that_is_not_text_is_a_request_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(RequestError, match=r"x\.json"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("value", [True, 1.0])
def test_a_choice_among_numbers_takes_no_look_alikes(value: Any) -> None:
    with pytest.raises(RequestError):
        from_data(MemoryPolicy, {"zero": value}, "memory")


def test_writing_replaces_a_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("x" * 10000)
    write_json(path, {"a": (1, 2), "b": Mesh()})
    assert read_json(path) == {"a": [1, 2], "b": to_data(Mesh())}


# Errors


def test_unknown_names_the_nearest() -> None:
    assert str(unknown_name_error("key", "steps", ["stpes", "seed"])) == "unknown key 'steps'; did you mean 'stpes'?"
    assert str(unknown_name_error("model", "GPT2", ["gpt2", "vae"])) == "unknown model 'GPT2'; did you mean 'gpt2'?"


def test_unknown_lists_what_there_is_when_nothing_is_near() -> None:
    assert str(unknown_name_error("axis", "zzz", ["dp", "shard"], "--mesh zzz=2")) == "unknown axis 'zzz' in --mesh zzz=2; one of: dp, shard"


def test_errors_carry_the_exit_code() -> None:
    assert unknown_name_error("a", "b", ["c"]).exit_code == 2
    assert RequestError("x").exit_code == 2
    assert RunError("x").exit_code == MeshwrightError("x").exit_code == 1


# Units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1.5, "1.50 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (99_950, "100.0 kB"),
        (999_449, "999.4 kB"),
        (999_960, "1.00 MB"),
        (-2e6, "-2.00 MB"),
        (31_200_000_000, "31.2 GB"),
        (2e18, "2.00 EB"),
        (5e22, "50000.0 EB"),
    ],
)  # fmt: skip
def test_bytes_as_people_write_them(value: float, text: str) -> None:
    assert show_bytes(value) == text


def test_counts_and_rates() -> None:
    assert show_count(124_439_808) == "124.4 M"
    assert show_count(405_853_388_800) == "405.9 B"
    assert show_count(12) == "12"
    assert show_rate(3.6e10, "FLOP/s") == "36.0 GFLOP/s"


@given(st.integers(0, 10**17))
def test_bytes_shown_can_be_read_back(value: int) -> None:
    """Two decimals below ten, one above: within half a percent."""
    assert parse_bytes(show_bytes(value)) == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GB", 24 * 10**9), ("16GiB", 16 * 2**30), ("1024", 1024), (" 1.5 kB ", 1500), ("2MiB", 2**21), ("3T", 3 * 10**12), ("0", 0), ("1KiB", 1024)],
)
def test_sizes_as_people_write_them(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "x", "12 XB", "-1GB", "1e9", "24 gigabytes"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(RequestError, match="24GB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1.2.3GB", ".", "..GB"])
def test_a_size_with_too_many_points(text: str) -> None:
    with pytest.raises(RequestError, match="24GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 µs"),
        (3e-8, "0.03 µs"),
        (4.2e-5, "42 µs"),
        (0.001, "1 ms"),
        (0.0123, "12.3 ms"),
        (1, "1 s"),
        (59.4, "59.4 s"),
        (75, "1 min 15 s"),
        (3600, "1 h 0 min"),
        (7384, "2 h 3 min"),
    ],
)  # fmt: skip
def test_seconds_as_people_write_them(value: float, text: str) -> None:
    assert show_seconds(value) == text


@given(st.floats(1e-6, 59.9))
def test_seconds_shown_are_near(value: float) -> None:
    number, unit = show_seconds(value).split()
    assert float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(("value", "text"), [(0.9996, "1 s"), (0.0009999, "1 ms")])
def test_seconds_just_below_a_unit(value: float, text: str) -> None:
    assert show_seconds(value) == text


# Meshes


@given(meshes())
def test_a_mesh_survives_its_text(mesh: Mesh) -> None:
    back = Mesh.parse(str(mesh))
    assert back.size == mesh.size
    assert back == mesh or (mesh.degree("tp") == 1 and back == dataclasses.replace(mesh, tp=(1,)))


@given(meshes())
def test_groups_of_an_axis_part_the_ranks(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert len(group) == mesh.degree(axis)
            assert [mesh.coordinate(rank, axis) for rank in group] == list(range(mesh.degree(axis)))
            for other in AXES:
                assert other == axis or len({mesh.coordinate(rank, other) for rank in group}) == 1


@given(meshes())
def test_coordinates_name_one_rank(mesh: Mesh) -> None:
    seen = {tuple(mesh.coordinate(rank, axis) for axis in AXES) for rank in range(mesh.size)}
    assert len(seen) == mesh.size == math.prod(mesh.degree(axis) for axis in AXES)
    assert {mesh.data_rank(rank) for rank in range(mesh.size)} == set(range(mesh.data_parallel_size))


def test_neighbouring_ranks_share_the_last_axis() -> None:
    mesh = Mesh(pp=2, dp=2, tp=(2,))
    assert mesh.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_grid_has_groups_along_each_of_its_dimensions() -> None:
    mesh = Mesh(dp=2, tp=(2, 2))
    assert mesh.groups("tpx") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("tpy") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("given", "flat"),
    [
        (Mesh(tp=(2, 2, 1)), Mesh(tp=(2, 2))),
        (Mesh(tp=(1, 2, 1)), Mesh(tp=(2,))),
        (Mesh(dp=2, tp=(2, 1, 3)), Mesh(dp=2, shard=3, tp=(2,))),
        (Mesh(shard=2, tp=(1, 1, 2)), Mesh(shard=4)),
    ],
)
def test_the_depth_of_a_grid_is_the_shard_axis(given: Mesh, flat: Mesh) -> None:
    assert given.canonical() == flat == flat.canonical() and given.size == flat.size


@pytest.mark.parametrize(
    ("text", "mesh"),
    [("dp=2,shard=2", Mesh(dp=2, shard=2)), ("tp=2x2x1", Mesh(tp=(2, 2, 1))), (" dp = 4 , ", Mesh(dp=4)), ("dp=1", Mesh()), ("ep=3", Mesh(ep=3))],
)
def test_a_mesh_is_read(text: str, mesh: Mesh) -> None:
    assert Mesh.parse(text) == mesh


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dq=2", "unknown mesh axis 'dq' in --mesh dq=2; did you mean 'dp'?"),
        ("DP=2", "did you mean 'dp'?"),
        ("sharding=2", "did you mean 'shard'?"),
        ("dp", "'dp' needs a whole number, like dp=2"),
        ("dp=", "'dp=' needs a whole number, like dp=2"),
        ("dp=two", "'dp=two' needs a whole number, like dp=2"),
        ("dp=2.0", "'dp=2.0' needs a whole number, like dp=2"),
        ("tp=2x", "'tp=2x' needs a whole number, like tp=2"),
        ("dp=2x3", "only tp has several dimensions; write dp=6"),
        ("dp=0", "mesh axis dp: a degree is at least 1"),
        ("dp=-2", "mesh axis dp: a degree is at least 1"),
        ("tp=2x0", "mesh axis tp: a degree is at least 1"),
        ("tp=-1x-1", "mesh axis tp: a degree is at least 1"),
        ("tp=1x1x1x1", "mesh axis tp has 4 dimensions: write one to three"),
    ],
)
def test_a_wrong_mesh_says_what_to_write(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        Mesh.parse(text)


def test_an_axis_given_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="dp"):
        Mesh.parse("dp=2,dp=3")


def test_a_mesh_without_tp_dimensions_is_refused() -> None:
    with pytest.raises(RequestError, match="tp"):
        from_data(Mesh, {"tp": []}, "mesh")


# Plans


@given(batch=st.integers(-5, 5000), dp=st.integers(1, 9), micro=st.integers(1, 9))
def test_a_batch_that_does_not_divide_names_numbers_that_do(batch: int, dp: int, micro: int) -> None:
    try:
        plan = Plan("m", batch, Mesh(dp=dp), micro)
    except RequestError as error:
        assert batch < 1 or batch % (dp * micro)
        proposed = [int(n) for n in re.findall(r"\d+", str(error).rpartition("change --global-batch to ")[2])]
        assert 1 <= len(proposed) <= 2
        for other in proposed:
            assert Plan("m", other, Mesh(dp=dp), micro).global_batch == other
            assert abs(other - batch) <= max(dp * micro, dp * micro - batch), "a nearer one would do"
    else:
        assert plan.sample_range(0)[1] * dp == batch


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_shares_lie_end_to_end(shares: list[int], data: st.DataObject) -> None:
    micro = data.draw(st.integers(1, min(shares)))
    plan = Plan("m", sum(shares), Mesh(dp=len(shares)), micro, balance=BalancePolicy(tuple(shares)))
    found = [plan.sample_range(rank) for rank in range(len(shares))]
    assert [count for _, count in found] == shares
    assert [first for first, _ in found] == [sum(shares[:i]) for i in range(len(shares))]
    assert plan.max_micro_batch_size == max(-(-s // micro) for s in shares)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plan("m", 8, Mesh(dp=2), balance=BalancePolicy((8,))), "balance.shares has 1 entries for 2 data ranks: give 2"),
        (lambda: Plan("m", 8, Mesh(dp=2), balance=BalancePolicy((4, 5))), "balance.shares sum to 9, not to global_batch=8"),
        (lambda: Plan("m", 8, Mesh(dp=2), 4, balance=BalancePolicy((5, 3))), "a share of 3 samples cannot make 4 micro-batches: set micro_batches=3"),
        (lambda: Plan("m", 8, Mesh(dp=2), memory=MemoryPolicy(2)), "zero=2 shards over the shard axis, and mesh dp=2 has none: use --mesh shard=2"),
        (lambda: Plan("m", 8, Mesh(shard=2)), "mesh shard=2 has a shard axis but zero=0: set zero=1, 2 or 3, or use --mesh dp=2"),
        (lambda: Plan("m", 8, micro_batches=0), "micro_batches=0 must be from 1 to"),
        (lambda: Plan("m", 8, version=3), "plan version 3"),
    ],
)
def test_an_illegal_plan_says_what_to_change(make: Any, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        make()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_device_may_have_any_stage(zero: int) -> None:
    assert Plan("m", 8, memory=MemoryPolicy(zero)).strategy == "single device"  # type: ignore[arg-type]


def test_a_plan_has_the_name_people_know_it_by() -> None:
    assert Plan("m", 8, Mesh(dp=2)).strategy == "data parallel"
    assert Plan("m", 8, Mesh(shard=2), memory=MemoryPolicy(1)).strategy == "ZeRO-1"
    assert Plan("m", 8, Mesh(dp=2, shard=2), memory=MemoryPolicy(3)).strategy == "ZeRO-3 hybrid"
    text = Plan("m", 8, Mesh(dp=2), 4, memory=MemoryPolicy(recompute="full", precision="bf16"), compile="blocks", threads=3).summary()
    assert text == "data parallel on 2 × cpu, 4 micro-batches, 3 threads, bf16, recompute, compile blocks"


def test_the_mesh_proposed_instead_has_as_many_ranks() -> None:
    with pytest.raises(RequestError, match="--mesh dp=4"):
        Plan("m", 8, Mesh(dp=2, shard=2))


@pytest.mark.parametrize("shares", [(8, 0), (9, -1)])
def test_an_empty_share_is_what_must_change(shares: tuple[int, ...]) -> None:
    with pytest.raises(RequestError) as error:
        Plan("m", 8, Mesh(dp=2), balance=BalancePolicy(shares))
    assert "micro_batches=1" not in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plan("m", 8, memory=MemoryPolicy(zero=7)),  # type: ignore[arg-type]
        lambda: Plan("m", 8, memory=MemoryPolicy(recompute="some")),  # type: ignore[arg-type]
        lambda: Plan("m", 8, threads=-3),
        lambda: Plan("m", 8, sync=SyncPolicy(bucket_bytes=-1)),
        lambda: Plan("m", 8, sync=SyncPolicy(timeout_s=-5.0)),
        lambda: Plan("m", 8, sync=SyncPolicy(timeout_s=math.nan)),
    ],
    ids=["zero", "recompute", "threads", "bucket", "timeout", "nan"],
)
def test_a_plan_validates_all_of_itself(make: Any) -> None:
    with pytest.raises(RequestError):
        make()


# Clusters


def two_nodes() -> Cluster:
    def node(name: str, count: int) -> Node:
        return Node(name, tuple(Device("cuda", name, i, 10) for i in range(count)), 4, 40, link=Link(f"inside {name}", 1e-6, 1e11))

    return Cluster("two", (node("a", 2), node("b", 3)), Link("between", 1e-5, 1e9))


def test_ranks_are_numbered_through_the_nodes() -> None:
    cluster = two_nodes()
    assert [cluster.node_of(rank).name for rank in range(5)] == ["a", "a", "b", "b", "b"]
    with pytest.raises(IndexError):
        cluster.node_of(5)


def test_a_collective_crosses_the_slowest_link() -> None:
    cluster = two_nodes()
    assert cluster.link_between((0, 1)).name == "inside a"
    assert cluster.link_between((2, 4)).name == "inside b"
    assert cluster.link_between((1, 2)).name == "between"


def test_equal_nodes_are_still_two() -> None:
    node = two_nodes().nodes[0]
    assert Cluster("twins", (node, node), Link("between", 1e-5, 1e9)).link_between((1, 2)).name == "between"


@given(st.integers(1, 5))
def test_taking_some_devices_keeps_the_first(count: int) -> None:
    taken = two_nodes().first_devices(count)
    assert taken.devices == two_nodes().devices[:count]
    assert len(taken.nodes) == (1 if count <= 2 else 2)


@pytest.mark.parametrize("count", [0, -1, 6])
def test_taking_too_many_says_how_many_there_are(count: int) -> None:
    with pytest.raises(RequestError, match=r"--nproc 1\.\.5"):
        two_nodes().first_devices(count)


# Traffic


@given(st.integers(1, 64))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(group: int) -> None:
    assert wire_factor("all_reduce", group) == pytest.approx(wire_factor("reduce_scatter", group) + wire_factor("all_gather", group))
    assert wire_factor("all_gather", group) == pytest.approx((group - 1) / group)
    assert wire_factor("broadcast", group) == (1.0 if group > 1 else 0.0)
