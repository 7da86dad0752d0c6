"""The report: its numbers are the run's, it stands alone, it escapes what users wrote, and it survives a run that lacks parts."""

from __future__ import annotations

import io
import json
import math
import random
import re
import tracemalloc
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.cluster import Cluster, Device, Link, Node
from meshwright.core.estimate import Estimate
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import to_data, write_json
from meshwright.observe import RunFolder, write_report
from meshwright.observe.charts import Chart, ReferenceLine, Series, downsample, line_chart, ticks
from meshwright.observe.formatting import MEASURED_RELATIVE, format_bytes, format_rate, format_signed_percent
from meshwright.observe.markup import Html, join, tag
from meshwright.observe.run_folder import Decision, PlanCandidate
from meshwright.observe.step_columns import StepColumns

BEGAN = 1_763_172_900.0
STEPS = 150
VOID = {"meta", "br", "hr", "input"}

PLAN = Plan("gpt-mini", 32, Mesh(shard=4), 2, memory=MemoryPolicy(zero=2), threads=2)
ESTIMATE = Estimate(
    step_s=0.118,
    breakdown={"forward": 0.034, "backward": 0.061, "optimizer": 0.006, "communication": 0.013, "overhead": 0.004},
    memory_bytes=(612_000_000, 604_000_000, 604_000_000, 604_000_000),
    memory_kinds={"parameters": 41_000_000, "gradients": 10_300_000, "optimizer": 20_500_000, "activations": 211_000_000, "runtime": 329_200_000},
    samples_per_s=271.0,
    fits=True,
    reason="612 MB of 4.0 GB on rank 0, 15 %",
    error=0.12,
    tokens_per_s=69_400.0,
    mfu=0.31,
    traffic_bytes=61_400_000,
    notes=("collective lines from the probe of 2025-11-14",),
)
WHY = """ZeRO-2 on 4 × cpu is the fastest of 11 plans that fit: 118 ms a step.
Second is data parallel at 124 ms: its all-reduce moves 82 MB where ZeRO-2's reduce-scatter moves 61 MB.
What binds is backward (52 %). With half the cores a rank, a single device would win from 6 MB of parameters down."""
RANKING = (
    PlanCandidate(PLAN.summary(), 0.118, 612_000_000, True, "fastest"),
    PlanCandidate("data parallel on 4 × cpu, 2 micro-batches, 2 threads, fp32", 0.124, 704_000_000, True, "more to send in one piece"),
    PlanCandidate("ZeRO-3 on 4 × cpu, 2 threads, fp32", 0.149, 570_000_000, True, "gathers parameters twice"),
    PlanCandidate("single cpu, 8 threads, fp32", 0.311, 1_210_000_000, True, "one rank computes all"),
    PlanCandidate("data parallel on 4 × cpu, bf16", None, 4_600_000_000, False, "4.6 GB of 4.0 GB on rank 0"),
)
CLUSTER = Cluster(
    "here",
    (Node("atlas", tuple(Device("cpu", "Neoverse-V2 share", i, 4_000_000_000) for i in range(4)), 8, 16_000_000_000, "ARM Neoverse-V2"),),
    Link("network", 2e-5, 1.25e9),
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "train_command.py", line 41, in step\n    loss.backward()\nRuntimeError: out of luck & memory <here>'
)


def fake_run(path: Path, steps: int = STEPS, finish: str = "done", **job: Any) -> RunFolder:
    """A run's folder as a real run leaves it; `finish` is done, stopped, failed or live."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "job.json", {"model": "gpt-mini", "steps": STEPS, "global_batch": 32, "seq": 256, "seed": 7, "learning_rate": 3e-4, **job})
    write_json(path / "plan.json", PLAN)
    write_json(path / "cluster.json", CLUSTER)
    write_json(path / "estimate.json", Decision(ESTIMATE, WHY, RANKING))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in fake_metrics(steps)))
    for rank in range(4):
        (path / f"events-{rank}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in fake_events(rank, steps, finish)))
    if finish == "done":
        write_json(path / "result.json", fake_result(path, steps))
        (path / "trace.json").write_text('{"traceEvents": []}')
    return RunFolder(path)


def fake_metrics(steps: int) -> Iterator[dict[str, Any]]:
    chance, now = random.Random(3), BEGAN + 2.0
    for step in range(1, steps + 1):
        took = 0.121 + chance.uniform(-0.008, 0.012) + (0.9 if step == 1 else 0.03 * (chance.random() < 0.03))
        now += took
        loss = 2.1 + 8.7 * math.exp(-step / 24) + chance.uniform(-0.12, 0.12)
        yield {
            "step": step, "time": now, "loss": loss, "step_s": took, "samples_per_s": 32 / took, "tokens_per_s": 8192 / took, "mfu": 0.0363 / took,
            "memory_bytes": int(598e6 + min(step, 3) * 7e6), "grad_norm": 1.1 + 4 * math.exp(-step / 15) + chance.uniform(0, 0.3),
            "learning_rate": 3e-4 * min(step / 20, 1) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS)),
        }  # fmt: skip
        if step % 25 == 0:
            yield {"step": step, "time": now, "validation_loss": loss + 0.18}


def fake_events(rank: int, steps: int, finish: str) -> Iterator[dict[str, Any]]:
    def event(after: float, kind: str, /, step: int = -1, **data: Any) -> dict[str, Any]:
        return {"time": BEGAN + after + rank / 1000, "rank": rank, "kind": kind, "step": step, "data": data}

    held = {"parameters": 41_000_000, "gradients": 10_300_000, "optimizer": 20_500_000}
    yield event(0.0, "start", pid=4_100_000 + rank, host="atlas.example", device="cpu")
    yield event(1.2, "applied", seconds=0.4, held=held)
    if rank == 0 and steps >= 25:
        yield event(5.1, "validation", 25, loss=5.2)
    if finish == "failed":
        secondary = rank != 2
        message = "connection closed by peer" if secondary else "out of luck & memory <here>"
        yield event(9.0 + secondary, "fault", steps, time=BEGAN + 9.0 + secondary, rank=rank, kind="RuntimeError", message=message,
                    traceback="" if secondary else TRACEBACK, secondary=secondary)  # fmt: skip
    if finish == "stopped":
        yield event(9.0, "stop", steps, reason="asked to stop by SIGTERM")
    if finish in ("done", "stopped"):
        yield event(21.4, "end", steps, memory_bytes=619_000_000 - 5_000_000 * (rank > 0), seconds=21.4)


def fake_result(path: Path, steps: int) -> dict[str, Any]:
    rows = [r for r in fake_metrics(steps) if "loss" in r]
    return {
        "run": str(path), "plan": to_data(PLAN), "losses": [r["loss"] for r in rows], "validation": [{"step": 25, "loss": 5.2}],
        "predicted": {"step_s": ESTIMATE.step_s, "memory_bytes": list(ESTIMATE.memory_bytes)},
        "measured": {"step_s": 0.1234, "p95_step_s": 0.141, "memory_bytes": [619_000_000, 614_000_000, 733_000_000, 614_000_000],
                     "samples_per_s": 259.3, "tokens_per_s": 66_381.0, "mfu": 0.296, "exposed_communication_s": 0.0149},
        "state_digest": "9f2c41d07e", "faults": [], "seconds": 21.4,
    }  # fmt: skip


class Page(HTMLParser):
    """The page as a browser would see it: visible text, attributes, and whether tags match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.attributes, self.tags, self._open = "", [], [], []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self._open and "style" not in self._open:
            self.text += data + " "

    def charts(self) -> list[dict[str, Any]]:
        return [json.loads(value, parse_constant=_refuse) for _, name, value in self.attributes if name == "data-chart"]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON: the page's script would stop")


def page_of(folder: RunFolder) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture
def done(tmp_path: Path) -> RunFolder:
    return fake_run(tmp_path / "gpt-mini-20251115-021500")


def test_the_numbers_of_the_run_are_in_the_report(done: RunFolder) -> None:
    page = page_of(done)
    words = " ".join(page.text.split())
    for number in ("118 ms", "123 ms", "+4.6 %", "612 MB", "619 MB", "733 MB", "+21 %", "66,381", "29.6 %", "61.4 MB", "14.9 ms", "4.60 GB"):
        assert number in words, number
    for phrase in ("state are sharded over 4 ranks", "Second is data parallel at 124 ms", "ARM Neoverse-V2", "ui.perfetto.dev", "9f2c41d07e", "done"):
        assert phrase in words, phrase
    losses = [r["loss"] for r in fake_metrics(STEPS) if "loss" in r]
    loss, step_time = page.charts()[:2]
    assert loss["step"] == list(range(1, STEPS + 1))
    assert loss["rows"][0]["text"] == [f"{v:.4g}" for v in losses]
    assert [t for t in loss["rows"][1]["text"] if t] == [f"{losses[s - 1] + 0.18:.4g}" for s in range(25, 151, 25)]
    assert step_time["rows"][1] == {"name": "predicted", "colour": 0, "text": "118 ms"}


def test_it_stands_alone(done: RunFolder) -> None:
    html = write_report(done).read_text()
    page = Page(html)
    assert not re.search(r"(https?:)?//[a-z0-9]", re.sub(r"^\s*//.*$", "", html, flags=re.M)), "an address in the page"
    assert "@import" not in html and "url(" not in html
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    links = {value for _, name, value in page.attributes if name in ("href", "src")}
    anchors = {f"#{value}" for _, name, value in page.attributes if name == "id"}
    assert links - {"trace.json"} <= anchors
    assert len(links) > 5


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style><b>", "a & b"])
def test_what_users_wrote_is_escaped(tmp_path: Path, text: str) -> None:
    run = fake_run(tmp_path / "x", 30, "failed", model=text, note=text)
    with (run.path / "events-0.jsonl").open("a") as file:
        file.write(json.dumps({"time": BEGAN + 20, "rank": 0, "kind": text, "step": 1, "data": {text: text}}) + "\n")
    plain, page = page_of(fake_run(tmp_path / "y", 30, "failed", note="note")), page_of(run)
    assert page.text.count(text) >= 4
    assert sorted(set(page.tags)) == sorted(set(plain.tags)), "text became markup"
    assert page.tags.count("script") == 1


def test_a_failure_comes_first_with_its_traceback(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path / "x", 60, "failed"))
    words = page.text
    assert "Rank 2 failed: RuntimeError" in words
    assert words.index("Rank 2 failed") < words.index("loss.backward()") < words.index("connection closed") < words.index("The plan")
    assert "after step 60" in words
    assert ("span", "class", "badge failed") in page.attributes


def test_a_survived_fault_is_told_but_does_not_lead(done: RunFolder) -> None:
    result = json.loads((done.path / "result.json").read_text())
    result["faults"] = [{"time": BEGAN + 8, "rank": 3, "kind": "killed by SIGKILL", "message": "", "traceback": "", "secondary": False}]
    write_json(done.path / "result.json", result)
    page = page_of(done)
    assert ("span", "class", "badge done") in page.attributes
    assert "1 fault during the run" in page.text and "rank 3: killed by SIGKILL" in page.text


def test_a_stop_says_why(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path / "x", 60, "stopped"))
    assert ("span", "class", "badge stopped") in page.attributes
    assert "Stopped: asked to stop by SIGTERM" in page.text


@pytest.mark.parametrize("losses", [[float("nan")] * 5, [3.0, float("nan"), 2.0, float("inf"), 1.0], [None] * 5, [2.5], []])
def test_losses_that_are_not_numbers(tmp_path: Path, losses: list[float | None]) -> None:
    run = fake_run(tmp_path / "x", 0, "live")
    (run.path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "time": BEGAN + i, "loss": v}) + "\n" for i, v in enumerate(losses)))
    html = write_report(run).read_text()
    page = Page(html)
    for points in re.findall(r'points="([^"]*)"', html):
        assert "nan" not in points and "inf" not in points
    finite = [v for v in losses if v is not None and math.isfinite(v)]
    drawn = [row["text"] for chart in page.charts() for row in chart["rows"] if row["name"] == "training"]
    assert ([t for t in drawn[0] if t not in ("nan", "inf")] if drawn else []) == [f"{v:.4g}" for v in finite]
    if len(finite) < len(losses) and None not in losses:
        assert "not finite" in page.text or "No finite value" in page.text


FILES = ["job.json", "plan.json", "cluster.json", "estimate.json", "result.json", "metrics.jsonl", "events-0.jsonl", "trace.json"]


@pytest.mark.parametrize("missing", [*FILES, "*"])
def test_any_file_may_be_missing(done: RunFolder, missing: str) -> None:
    for path in done.path.glob(missing):
        path.unlink()
    page = page_of(done)
    assert page.tags.count("section") >= 1
    assert ("trace.json" in page.text) == (missing not in ("trace.json", "*"))


BROKEN = [("plan.json", '{"model": "x", "globl_batch": 3}'), ("estimate.json", "[]"), ("result.json", "{"), ("job.json", "3")]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_broken_file_is_named_and_the_rest_is_told(done: RunFolder, name: str, text: str) -> None:
    (done.path / name).write_text(text)
    page = page_of(done)
    assert "Files that could not be read" in page.text and name in page.text
    assert "2.044" in page.text
    assert ("span", "class", "badge done") in page.attributes


def test_a_resumed_run_counts_a_step_as_it_was_done_last(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "x", 0, "live")
    steps = [*range(10), *range(6, 12)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "time": BEGAN + i, "loss": float(i)}) + "\n" for i, s in enumerate(steps)))
    page = page_of(run)
    chart = page.charts()[0]
    curve = next(value for name, attribute, value in page.attributes if (name, attribute) == ("polyline", "points"))
    assert [float(p.split(",")[0]) for p in curve.split()] == chart["x"], "the curve goes back"
    assert chart["step"] == list(range(12))
    assert chart["rows"][0]["text"] == ["0", "1", "2", "3", "4", "5", "10", "11", "12", "13", "14", "15"]


def test_a_long_run_stays_small_and_keeps_its_spike(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "x", 0, "live")
    with (run.path / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "time": BEGAN + step, "loss": 1.9 if step == 12_345 else 1.0 + step % 7 / 100}) + "\n")
    path = write_report(run)
    assert path.stat().st_size < 150_000
    assert 12_345 in Page(path.read_text()).charts()[0]["step"]


def test_a_chart_draws_where_the_values_are() -> None:
    html = line_chart(Chart("t", [Series("s", [(0, 0.0), (1, 10.0), (2, 5.0)])], str, ReferenceLine("p", 5.0), from_zero=True))
    xs, ys = zip(*(map(float, p.split(",")) for p in re.findall(r'points="([^"]*)"', html)[0].split()), strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] > ys[2] > ys[1], "up is more"
    assert ys[2] == pytest.approx((ys[0] + ys[1]) / 2, abs=0.2)
    level = re.search(r'class="level"[^>]* y1="([0-9.]+)"', html)
    assert level is not None and float(level[1]) == pytest.approx(ys[2], abs=0.2)


def test_one_outlier_does_not_flatten_the_rest() -> None:
    points = [(float(i), 1.0 + 0.1 * (i % 2)) for i in range(40)]
    html = line_chart(Chart("t", [Series("s", [(-1.0, 50.0), *points])], lambda v: f"{v:g} s"))
    ys = [float(p.split(",")[1]) for p in re.findall(r'points="([^"]*)"', html)[0].split()]
    assert max(ys[1:]) - min(ys[1:]) > 20, "the curve is pressed flat"
    assert "Off the scale: 50 s at step -1." in html


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 10.0, 5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert ticks(0.5, 1.5, 6, integers_only=True) == [1.0]
    assert ticks(0.0012, 0.0049, 4) == pytest.approx([0.002, 0.003, 0.004])


def test_thinning_keeps_ends_of_range_in_order() -> None:
    points = [(float(i), float((i * 7919) % 1000)) for i in range(10_000)]
    kept = downsample(points, 100)
    assert len(kept) <= 100
    assert kept == sorted(kept)
    assert {min(v for _, v in kept), max(v for _, v in kept)} == {0.0, 999.0}


def test_markup_escapes_unless_told() -> None:
    assert tag("p", "<b>", class_='a"b') == '<p class="a&quot;b">&lt;b&gt;</p>'
    assert tag("p", tag("b", "x & y"), Html("<i>")) == "<p><b>x &amp; y</b><i></p>"
    assert isinstance(join(["<"]), Html)


def test_the_terminal_and_the_report_give_a_difference_the_same_sign(tmp_path: Path) -> None:
    """Measured relative to predicted, in both; both say so."""
    from rich.console import Console

    from meshwright.cli.train_command import _comparison_table

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(_comparison_table(fake_result(tmp_path, STEPS)))
    text, page = console.export_text(), Page(write_report(fake_run(tmp_path / "run")).read_text()).text
    for shown in ("+4.6 %", "+20 %", MEASURED_RELATIVE):  # 123.4 ms where 118 were predicted, 733 MB where 612 were
        assert shown in " ".join(text.split())
        assert shown in page


def test_the_order_of_the_ranking_is_explained(tmp_path: Path) -> None:
    """A slower plan may come first: its penalty is beside its time."""
    run = fake_run(tmp_path)
    slower = [PlanCandidate(PLAN.summary(), 0.118, 1, True, "simple"), PlanCandidate("pipeline 2", 0.116, 1, True, "", 0.03)]
    write_json(tmp_path / "estimate.json", Decision(ESTIMATE, WHY, tuple(slower)))
    page = Page(write_report(run).read_text())
    assert "in order of step time with a penalty for each mechanism" in page.text
    assert "+3.0 %" in page.text


def test_long_figures_and_names_stay_in_their_cards(tmp_path: Path) -> None:
    """Numbers beyond the last prefix are short, and what is long wraps."""
    assert (format_bytes(9.9e27), format_rate(1.2e25, "samples/s")) == ("9.9e+09 EB", "1.2e+13 T samples/s")
    assert format_signed_percent(1.6e13) == "+1.6e+15 %"
    html = write_report(fake_run(tmp_path, model="long" * 60)).read_text()
    rules = dict(reversed(re.findall(r"^([^{}\n]+?) \{ ([^{}\n]+) \}$", html, re.MULTILINE)))  # the first of each selector: for wide screens
    for selector in (".card strong", ".card small", ".card .chip"):
        assert "overflow-wrap: anywhere" in rules[selector], selector
        assert "nowrap" not in rules[selector], selector


def test_a_state_digest_is_shown_only_where_there_is_one(tmp_path: Path) -> None:
    run = fake_run(tmp_path)
    assert "state digest" in write_report(run).read_text()
    write_json(tmp_path / "result.json", {**fake_result(tmp_path, STEPS), "state_digest": None})
    assert "state digest" not in write_report(run).read_text()


def test_steps_are_read_as_columns() -> None:
    """Of a step done twice the later counts; null is NaN; a metric that a run does not have is empty; few points are kept of many."""
    rows: list[dict[str, Any]] = [{"step": i, "loss": float(i), "step_s": 1.0} for i in range(4000)]
    rows[2500] = {"step": 2500, "loss": None, "step_s": "odd"}
    rows += [
        {"step": 3000, "loss": -1.0, "step_s": 2.0},
        {"step": "x", "loss": 0.0},
        {"step": 10**400, "loss": 0.0},
        {"step": 3000, "validation_loss": 7},
    ]
    columns = StepColumns(rows)
    assert (len(columns), columns.last_step, len(columns.finite("loss"))) == (3001, 3000, 3000)
    points = columns.points("loss", 100)
    assert len(points) <= 100
    assert (points[0], points[-1]) == ((0.0, 0.0), (3000.0, -1.0))
    assert (columns.points("grad_norm", 100), columns.validation_points()) == ([], [(3000.0, 7.0)])


def test_columns_added_in_chunks_are_those_added_one_by_one() -> None:
    rows = [r for r in fake_metrics(2500) if "loss" in r]
    one_by_one = StepColumns()
    for row in rows:
        one_by_one._add(row)
    assert all(list(StepColumns(rows).finite(key)) == list(one_by_one.finite(key)) for key in ("loss", "time", "mfu"))


def test_a_report_of_many_steps_needs_little_memory(tmp_path: Path) -> None:
    """Records are not kept: 10,000 of them would take more than 10 MB."""
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(r) + "\n" for r in fake_metrics(10_000))
    tracemalloc.start()
    write_report(RunFolder(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6
    assert "10,000 steps" in (tmp_path / "report.html").read_text()
