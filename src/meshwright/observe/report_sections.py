"""The sections of a report: each is a function from the RunSummary to HTML, empty if there is nothing to show."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from meshwright.core.cluster import Node
from meshwright.core.event import Event, Fault
from meshwright.observe import formatting
from meshwright.observe.charts import Chart, ReferenceLine, Series, difference_chip, line_chart, paired_bars, stacked_bar
from meshwright.observe.markup import Html, join, section, table, tag
from meshwright.observe.run_folder import PlanCandidate
from meshwright.observe.run_status import root_cause
from meshwright.observe.run_summary import RunSummary
from meshwright.observe.wording import describe_event, describe_plan, plan_setting_rows

MAX_RANKS = 16
MAX_NODES = 32
MAX_EVENTS = 200
EMPTY = Html()


def faults(summary: RunSummary) -> Html:
    """The faults of a run: as its failure if they ended it, otherwise as faults that it survived."""
    state, every = summary.status.state, list(summary.faults)
    if state == "interrupted" and not every:
        return tag("div", tag("h2", "Interrupted"), tag("p", summary.status.detail), class_="alarm")
    first = summary.status.fault if state == "failed" else root_cause(every)
    if first is None:
        return EMPTY
    if state != "failed":
        count = f"{len(every)} fault{'s' * (len(every) > 1)} on the way"
        return tag("div", tag("h2", count), *(_fault_box(f, f"{_rank_name(f.rank)}: {f.kind}") for f in every), class_="alarm mild")
    others = [_fault_box(f, f"{_rank_name(f.rank)}: {f.kind}") for f in every if f != first]
    more = [tag("details", tag("summary", f"{len(others)} other fault{'s' * (len(others) > 1)}"), *others)] if others else []
    after = f"after step {summary.steps[-1]['step']}" if summary.steps else "before the first step"
    return tag("div", tag("h2", f"{_rank_name(first.rank).capitalize()} failed: {first.kind}"), _fault_box(first, after), *more, class_="alarm")


def unreadable_files(summary: RunSummary) -> Html:
    if not summary.unreadable:
        return EMPTY
    return tag("div", tag("h2", "Could not be read"), tag("ul", *(tag("li", text) for text in summary.unreadable)), class_="alarm mild")


def metric_cards(summary: RunSummary) -> Html:
    """Cards with the run's main numbers: loss, step time, throughput, peak memory, MFU and duration."""
    estimate, tolerance = summary.estimate, summary.tolerance
    step_s = summary.measured_metric("step_s")
    peak, expected = _max_known(summary.measured_memory()), _max_known(summary.predicted_memory())
    losses = summary.curve("loss")
    made = [_loss_card(losses, summary.validation_curve())] if losses else []
    if step_s is not None:
        made.append(
            _card(
                "Step time",
                formatting.format_seconds(step_s),
                *_prediction_note(step_s, estimate.step_s if estimate else None, formatting.format_seconds, tolerance),
            )
        )
    if (speed := summary.measured_metric("samples_per_s")) is not None:
        tokens = summary.measured_metric("tokens_per_s")
        made.append(
            _card("Throughput", formatting.format_rate(speed, "samples/s"), formatting.format_rate(tokens, "tokens/s") if tokens is not None else "")
        )
    if peak is not None:
        made.append(_card("Peak memory", formatting.format_bytes(peak), *_prediction_note(peak, expected, formatting.format_bytes, tolerance)))
    if (mfu := summary.measured_metric("mfu")) is not None:
        expected_mfu = estimate.mfu if estimate else None
        made.append(
            _card(
                "MFU",
                formatting.format_percent(mfu, 1),
                f"predicted {formatting.format_percent(expected_mfu, 1)}" if expected_mfu is not None else "",
            )
        )
    if (seconds := summary.duration_s()) is not None:
        made.append(_card("Duration", formatting.format_seconds(seconds), f"{len(summary.steps):,} step{'s' * (len(summary.steps) != 1)}"))
    return tag("div", *made, class_="cards") if made else EMPTY


def plan(summary: RunSummary) -> Html:
    if summary.plan is None:
        return EMPTY
    words = tag("p", " ".join(describe_plan(summary.plan)), class_="lead")
    rows = [(join([choice, tag("br"), tag("small", meaning)]), tag("b", value)) for choice, value, meaning in plan_setting_rows(summary.plan)]
    half = -(-len(rows) // 2)
    halves = [tag("div", table(("", ""), part, numeric_columns=(1,))) for part in (rows[:half], rows[half:])]
    return section("The plan", words, tag("div", *halves, class_="columns choices"), anchor="plan")


def why(summary: RunSummary) -> Html:
    decision = summary.decision
    if decision is None or not (decision.why or decision.ranking):
        return EMPTY
    text = tag("div", decision.why.strip(), class_="why") if decision.why.strip() else EMPTY
    return section("Why this plan", text, _ranking_table(summary, decision.ranking) if decision.ranking else EMPTY, anchor="why")


def prediction(summary: RunSummary) -> Html:
    """Bars of predicted and measured time, and of each rank's memory."""
    estimate = summary.estimate
    if estimate is None:
        return EMPTY
    error = formatting.format_percent(estimate.error)
    note = f"The estimate was made before the run, with a stated error of ±{error} (one sigma). Measured step time is the median."
    grid = tag("div", tag("div", *_rate_bars(summary), _fits_note(summary)), tag("div", *_memory_bars(summary)), class_="columns")
    return section("Predicted against measured", grid, note=note, anchor="prediction")


def curves(summary: RunSummary) -> Html:
    if not summary.steps and not summary.validation:
        return section("Curves", tag("p", "No step was recorded.", class_="empty"), anchor="curves")
    return section("Curves", tag("div", *map(line_chart, _charts(summary)), class_="charts"), anchor="curves")


def breakdown(summary: RunSummary) -> Html:
    """The breakdown of the predicted step time and memory."""
    estimate = summary.estimate
    if estimate is None:
        return EMPTY
    measured = formatting.finite_or_none((summary.result.get("measured") or {}).get("exposed_communication_s"))
    exposed = f" Measured: {formatting.format_seconds(measured)} of communication was not hidden." if measured is not None else ""
    sent = f" A rank sends {formatting.format_bytes(estimate.traffic_bytes)} in a step." if estimate.traffic_bytes else ""
    time_part = tag(
        "div", tag("h3", f"A step of {formatting.format_seconds(estimate.step_s)}"), stacked_bar(estimate.breakdown, formatting.format_seconds)
    )
    largest = formatting.format_bytes(_max_known(summary.predicted_memory()))
    memory = tag("div", tag("h3", f"The largest rank, {largest}"), stacked_bar(estimate.memory_kinds, formatting.format_bytes))
    notes = tag("ul", *(tag("li", note) for note in estimate.notes), class_="notes") if estimate.notes else EMPTY
    note = f"As predicted.{sent}{exposed}"
    return section("Where time and memory go", tag("div", time_part, memory, class_="columns"), notes, note=note, anchor="breakdown")


def cluster(summary: RunSummary) -> Html:
    if summary.cluster is None:
        return EMPTY
    nodes = summary.cluster.nodes
    head = ("node", "devices", "cores", "memory", "joined by")
    body = table(head, map(_node_row, nodes[:MAX_NODES]), numeric_columns=(2, 3))
    more = tag("p", f"The first {MAX_NODES} of {len(nodes)} nodes.", class_="note") if len(nodes) > MAX_NODES else EMPTY
    link = summary.cluster.link
    joined = f"; nodes are joined by {link.name}, {formatting.format_rate(8 * link.bandwidth / 1e9, 'Gbit/s')}" if len(nodes) > 1 else ""
    started = f"; started by {summary.cluster.scheduler}" if summary.cluster.scheduler != "none" else ""
    count = len(summary.cluster.devices)
    note = f"{summary.cluster.name}: {count} device{'s' * (count != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}{joined}{started}."
    return section("The cluster", body, more, note=note, anchor="cluster")


def configuration(summary: RunSummary) -> Html:
    if not summary.job:
        return EMPTY
    rows = [tag("div", tag("dt", key), tag("dd", _format_value(value))) for key, value in summary.job.items()]
    digest = summary.result.get("state_digest")
    rows += [tag("div", tag("dt", "state digest"), tag("dd", tag("code", str(digest))))] if digest else []
    return section("Configuration", tag("dl", *rows, class_="config"), anchor="configuration")


def trace(summary: RunSummary) -> Html:
    if not summary.has_trace:
        return EMPTY
    link = tag("a", tag("code", "trace.json"), href="trace.json")
    steps = (
        join(["Open ", tag("b", "ui.perfetto.dev"), " in a browser (the file stays on your machine)."]),
        join(["Press ", tag("b", "Open trace file"), " and choose ", link, " in this run's folder."]),
        join(["Move with ", *(tag("kbd", key) for key in "WASD"), "; click a bar to see what it is and how long it took."]),
    )
    note = "trace.json has every operation of one step of rank 0, with its beginning and its end."
    return section("Timeline of one step", tag("ol", *(tag("li", step) for step in steps)), note=note, anchor="trace")


def events(summary: RunSummary) -> Html:
    every = summary.events
    if not every:
        return EMPTY
    half = MAX_EVENTS // 2
    shown = every if len(every) <= MAX_EVENTS else (*every[:half], *every[-half:])
    note = f"The first and last {half} of {len(every)}." if len(every) > len(shown) else ""
    body = table(("after", "rank", "event", "step", "what"), [_event_row(e, every[0].time) for e in shown], numeric_columns=(0, 1, 3))
    attribute = "" if len(shown) <= 40 else None
    return section("Events", tag("details", tag("summary", f"{len(every)} events"), body, open=attribute), note=note, anchor="events")


def _rate_bars(summary: RunSummary) -> list[Html]:
    """Bars of step time and metrics derived from it, each on its own scale; except step time, only what was both predicted and measured."""
    estimate = summary.estimate
    assert estimate is not None
    hidden = formatting.finite_or_none((summary.result.get("measured") or {}).get("exposed_communication_s"))
    rows: list[tuple[str, float | None, float | None, Callable[[Any], str]]] = [
        ("Samples a second", estimate.samples_per_s, summary.measured_metric("samples_per_s"), _format_bare_rate),
        ("Tokens a second", estimate.tokens_per_s, summary.measured_metric("tokens_per_s"), _format_bare_rate),
        ("MFU", estimate.mfu, summary.measured_metric("mfu"), lambda value: formatting.format_percent(value, 1)),
        ("Communication not hidden", estimate.breakdown.get("communication"), hidden, formatting.format_seconds),
    ]
    known = [row for row in rows if row[1] is not None and row[2] is not None]
    every = [("Step time", estimate.step_s, summary.measured_metric("step_s"), formatting.format_seconds), *known]
    return [paired_bars([(label, predicted, measured)], show, summary.tolerance) for label, predicted, measured, show in every]


def _memory_bars(summary: RunSummary) -> list[Html]:
    ranks = list(zip_longest(summary.predicted_memory(), summary.measured_memory()))
    rows = [(f"Peak memory, rank {rank}", predicted, measured) for rank, (predicted, measured) in enumerate(ranks[:MAX_RANKS])]
    more = tag("p", f"The first {MAX_RANKS} of {len(ranks)} ranks.", class_="note") if len(ranks) > MAX_RANKS else EMPTY
    return [paired_bars(rows, formatting.format_bytes, summary.tolerance), more]


def _charts(summary: RunSummary) -> list[Chart]:
    estimate = summary.estimate
    step_level = ReferenceLine("predicted", estimate.step_s, estimate.error) if estimate else None
    peak = _max_known(summary.predicted_memory()[:1])
    peak_level = ReferenceLine("predicted peak", peak) if peak else None
    loss = [Series("training", summary.curve("loss"), 1)]
    loss += [Series("validation", summary.validation_curve(), 2, dots=True)] if summary.validation else []
    charts = [
        Chart("Loss", loss, formatting.format_number),
        Chart("Step time", [Series("measured", summary.curve("step_s"), 3)], formatting.format_seconds, step_level, from_zero=True),
        Chart("Throughput", [Series("samples/s", summary.curve("samples_per_s"), 4)], _format_bare_rate, from_zero=True),
        Chart("Memory of rank 0", [Series("peak so far", summary.curve("memory_bytes"), 5)], formatting.format_bytes, peak_level, from_zero=True),
    ]
    for title, key, colour in (("Gradient norm", "grad_norm", 6), ("Learning rate", "learning_rate", 2)):
        points = summary.curve(key)
        charts += [Chart(title, [Series(title.lower(), points, colour)], formatting.format_number, from_zero=True)] if points else []
    return charts


def _fault_box(fault: Fault, title: str) -> Html:
    when = time.strftime(" at %H:%M:%S", time.localtime(fault.time)) if fault.time else ""
    follows = ". This only follows from another rank's failure." if fault.secondary else ""
    said = tag("p", fault.message, class_="message") if fault.message else EMPTY
    trail = tag("pre", fault.traceback.strip()) if fault.traceback.strip() else EMPTY
    return tag("div", tag("p", title, when, follows, class_="where"), said, trail, class_="fault")


def _ranking_table(summary: RunSummary, ranking: Sequence[PlanCandidate]) -> Html:
    chosen = next((i for i, c in enumerate(ranking) if summary.plan and c.summary == summary.plan.summary()), None)
    slowest = max((c.step_s for c in ranking if formatting.finite_or_none(c.step_s) is not None and c.step_s is not None), default=0.0) or 1.0
    rows = []
    for i, entry in enumerate(ranking):
        width = 100 * (formatting.finite_or_none(entry.step_s) or 0.0) / slowest
        name = tag("div", entry.summary, *([" ", tag("span", "chosen", class_="chip good")] if i == chosen else []), class_="wide")
        bar = tag("span", tag("i", style=f"width:{width:.1f}%"), class_="mini")
        fits = tag("span", "fits" if entry.fits else "too large", class_=f"chip {'good' if entry.fits else 'poor'}")
        rows.append((str(i + 1), name, bar, formatting.format_seconds(entry.step_s), formatting.format_bytes(entry.memory_bytes), fits, entry.reason))
    head = ("", "plan", "", "step time", "memory", "", "reason")
    return join(
        [tag("h3", f"{len(ranking)} plan{'s' * (len(ranking) != 1)} weighed"), table(head, rows, numeric_columns=(0, 3, 4), highlighted_row=chosen)]
    )


def _fits_note(summary: RunSummary) -> Html:
    estimate = summary.estimate
    assert estimate is not None
    return tag("p", tag("b", "It fits: " if estimate.fits else "It does not fit: "), estimate.reason, class_="note") if estimate.reason else EMPTY


def _loss_card(losses: list[tuple[float, float]], validation: list[tuple[float, float]]) -> Html:
    notes = [f"from {formatting.format_number(losses[0][1])}"] if len(losses) > 1 else []
    notes += [f"validation {formatting.format_number(validation[-1][1])}"] if validation else []
    return _card("Loss", formatting.format_number(losses[-1][1]), ", ".join(notes))


def _prediction_note(measured: float, predicted: float | None, format_value: Callable[[Any], str], tolerance: float) -> tuple[str, ...]:
    return () if predicted is None else (f"predicted {format_value(predicted)} ", difference_chip(measured, predicted, tolerance))


def _card(name: str, value: str, *notes: str) -> Html:
    number, _, unit = value.partition(" ")
    shown = tag("strong", number, tag("span", unit)) if unit else tag("strong", number)
    return tag("div", tag("span", name, class_="name"), shown, tag("small", *notes), class_="card")


def _node_row(node: Node) -> tuple[str, ...]:
    kinds = Counter((d.name, d.memory_bytes) for d in node.devices)
    devices = ", ".join(f"{count} × {name} ({formatting.format_bytes(memory)})" for (name, memory), count in kinds.items())
    link = f"{node.link.name}, {formatting.format_bytes(node.link.bandwidth)}/s"
    name = join([tag("b", node.name), tag("br"), tag("small", node.cpu)]) if node.cpu else tag("b", node.name)
    return (name, devices, str(node.cores), formatting.format_bytes(node.memory_bytes), link)


def _event_row(event: Event, start_time: float) -> tuple[str, ...]:
    kind = tag("span", event.kind, class_=f"chip {({'fault': 'poor', 'stop': 'fair', 'end': 'good'}).get(event.kind, '')}".strip())
    step = str(event.step) if event.step >= 0 else ""
    return (f"{event.time - start_time:.2f} s", str(event.rank) if event.rank >= 0 else "", kind, step, describe_event(event))


def _rank_name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "the supervisor"


def _max_known(values: Sequence[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _format_bare_rate(value: Any) -> str:
    return formatting.format_rate(value, "").rstrip()


def _format_value(value: Any) -> str:
    return formatting.DASH if value is None or value == "" else value if isinstance(value, str) else json.dumps(value)
