"""The sections of a report: each is a function from the RunSummary to HTML, empty if there is nothing to show."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from meshwright.core.cluster import Node
from meshwright.core.estimate import Estimate
from meshwright.core.event import Event, Fault
from meshwright.observe.charts import MAX_POINTS, Chart, ReferenceLine, Series, difference_chip, line_chart, paired_bars, stacked_bar
from meshwright.observe.formatting import (
    DASH,
    MEASURED_RELATIVE,
    finite_or_none,
    format_bytes,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
)
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
    state = summary.status.state
    if state == "interrupted" and not summary.faults:
        return tag("div", tag("h2", "Interrupted"), tag("p", summary.status.detail), class_="alarm")
    cause = summary.status.fault if state == "failed" else root_cause(summary.faults)
    if cause is None:
        return EMPTY
    restarts = [event for event in summary.events if event.kind == "restart"]
    others = [_fault_box(f, f"{_rank_name(f.rank)}: {f.kind}", _outcome(f, restarts)) for f in summary.faults if state != "failed" or f != cause]
    count = f"{len(others)} {'other ' * (state == 'failed')}fault{'s' * (len(others) > 1)}"
    if state != "failed":
        went_on = f", {len(restarts)} restart{'s' * (len(restarts) > 1)}" if restarts else ""
        return tag("div", tag("h2", f"{count} during the run{went_on}"), *others, class_="alarm mild")
    more = [tag("details", tag("summary", count), *others)] if others else []
    when = f"after step {summary.steps.last_step}" if summary.steps else "before the first step"
    return tag("div", tag("h2", f"{_rank_name(cause.rank).capitalize()} failed: {cause.kind}"), _fault_box(cause, when), *more, class_="alarm")


def unreadable_files(summary: RunSummary) -> Html:
    if not summary.unreadable:
        return EMPTY
    return tag("div", tag("h2", "Files that could not be read"), tag("ul", *(tag("li", text) for text in summary.unreadable)), class_="alarm mild")


def metric_cards(summary: RunSummary) -> Html:
    """Cards with the run's main numbers: loss, step time, throughput, peak memory, MFU and duration."""
    estimate = summary.estimate
    losses, validation = summary.steps.points("loss", MAX_POINTS), summary.steps.validation_points()
    step_s, peak = summary.measured_metric("step_s"), _max_known(summary.measured_memory())
    cards = []

    def prediction_note(measured: float, predicted: float | None, format_value: Callable[[Any], str]) -> tuple[str, ...]:
        return () if predicted is None else (f"predicted {format_value(predicted)} ", difference_chip(measured, predicted, summary.tolerance))

    if losses:
        notes = [f"from {format_number(losses[0][1])}"] if len(losses) > 1 else []
        notes += [f"validation {format_number(validation[-1][1])}"] if validation else []
        cards.append(_card("Loss", format_number(losses[-1][1]), ", ".join(notes)))
    if step_s is not None:
        cards.append(_card("Step time", format_seconds(step_s), *prediction_note(step_s, estimate.step_s if estimate else None, format_seconds)))
    if (rate := summary.measured_metric("samples_per_s")) is not None:
        tokens = summary.measured_metric("tokens_per_s")
        cards.append(_card("Throughput", format_rate(rate, "samples/s"), format_rate(tokens, "tokens/s") if tokens is not None else ""))
    if peak is not None:
        cards.append(_card("Peak memory", format_bytes(peak), *prediction_note(peak, _max_known(summary.predicted_memory()), format_bytes)))
    if (mfu := summary.measured_metric("mfu")) is not None:
        predicted = f"predicted {format_percent(estimate.mfu, 1)}" if estimate and estimate.mfu is not None else ""
        cards.append(_card("MFU", format_percent(mfu, 1), predicted))
    if (seconds := summary.duration_s()) is not None:
        cards.append(_card("Duration", format_seconds(seconds), f"{len(summary.steps):,} step{'s' * (len(summary.steps) != 1)}"))
    return tag("div", *cards, class_="cards") if cards else EMPTY


def plan(summary: RunSummary) -> Html:
    if summary.plan is None:
        return EMPTY
    text = tag("p", " ".join(describe_plan(summary.plan)), class_="lead")
    rows = [(join([setting, tag("br"), tag("small", meaning)]), tag("b", value)) for setting, value, meaning in plan_setting_rows(summary.plan)]
    middle = (len(rows) + 1) // 2
    columns = [tag("div", table(("", ""), half, numeric_columns=(1,))) for half in (rows[:middle], rows[middle:])]
    return section("The plan", text, tag("div", *columns, class_="columns choices"), anchor="plan")


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
    error = format_percent(estimate.error)
    note = f"The estimate was made before the run, with a stated error of ±{error} (one sigma). Measured step time is the median. {MEASURED_RELATIVE}"
    verdict = tag("b", "It fits: " if estimate.fits else "It does not fit: ")
    fits = tag("p", verdict, estimate.reason, class_="note") if estimate.reason else EMPTY
    columns = tag("div", tag("div", *_rate_bars(summary, estimate), fits), tag("div", *_memory_bars(summary)), class_="columns")
    return section("Predicted and measured", columns, note=note, anchor="prediction")


def curves(summary: RunSummary) -> Html:
    if not summary.steps and not summary.steps.validation:
        return section("Curves", tag("p", "No step was recorded.", class_="empty"), anchor="curves")
    return section("Curves", tag("div", *map(line_chart, _charts(summary)), class_="charts"), anchor="curves")


def breakdown(summary: RunSummary) -> Html:
    """The breakdown of the predicted step time and memory."""
    estimate = summary.estimate
    if estimate is None:
        return EMPTY
    exposed_s = _exposed_communication(summary)
    exposed = f" Measured: {format_seconds(exposed_s)} of exposed communication." if exposed_s is not None else ""
    sent = f" A rank sends {format_bytes(estimate.traffic_bytes)} in a step." if estimate.traffic_bytes else ""
    seconds = tag("div", tag("h3", f"A step of {format_seconds(estimate.step_s)}"), stacked_bar(estimate.breakdown, format_seconds))
    peak = format_bytes(_max_known(summary.predicted_memory()))
    memory = tag("div", tag("h3", f"The largest rank, {peak}"), stacked_bar(estimate.memory_kinds, format_bytes))
    phases = {str(name): finite_or_none(seconds) or 0.0 for name, seconds in dict(summary.result.get("phases") or {}).items()}
    whole_run = (
        tag("div", tag("h3", f"The run, {format_seconds(sum(phases.values()))} (measured)"), stacked_bar(phases, format_seconds)) if phases else EMPTY
    )
    notes = tag("ul", *(tag("li", note) for note in estimate.notes), class_="notes") if estimate.notes else EMPTY
    note = f"As predicted.{sent}{exposed}"
    return section("Where time and memory go", tag("div", seconds, memory, class_="columns"), whole_run, notes, note=note, anchor="breakdown")


def cluster(summary: RunSummary) -> Html:
    if summary.cluster is None:
        return EMPTY
    nodes = summary.cluster.nodes
    body = table(("node", "devices", "cores", "memory", "link"), map(_node_row, nodes[:MAX_NODES]), numeric_columns=(2, 3))
    more = tag("p", f"The first {MAX_NODES} of {len(nodes)} nodes.", class_="note") if len(nodes) > MAX_NODES else EMPTY
    link = summary.cluster.link
    network = f"; nodes are connected by {link.name}, {format_rate(8 * link.bandwidth / 1e9, 'Gbit/s')}" if len(nodes) > 1 else ""
    scheduler = f"; started by {summary.cluster.scheduler}" if summary.cluster.scheduler != "none" else ""
    count = len(summary.cluster.devices)
    note = f"{summary.cluster.name}: {count} device{'s' * (count != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}{network}{scheduler}."
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
    note = "trace.json holds every operation of one step of rank 0, with its start and end."
    return section("Timeline of one step", tag("ol", *(tag("li", step) for step in steps)), note=note, anchor="trace")


def events(summary: RunSummary) -> Html:
    events, half = summary.events, MAX_EVENTS // 2
    if not events:
        return EMPTY
    shown = events if len(events) <= MAX_EVENTS else (*events[:half], *events[-half:])
    note = f"The first and last {half} of {len(events)}." if len(events) > len(shown) else ""
    body = table(("after", "rank", "event", "step", "details"), [_event_row(e, events[0].time) for e in shown], numeric_columns=(0, 1, 3))
    is_open = "" if len(shown) <= 40 else None
    return section("Events", tag("details", tag("summary", f"{len(events)} events"), body, open=is_open), note=note, anchor="events")


def _rate_bars(summary: RunSummary, estimate: Estimate) -> list[Html]:
    """Bars of step time and metrics derived from it, each on its own scale; except step time, only what was both predicted and measured."""
    rows: list[tuple[str, float | None, float | None, Callable[[Any], str]]] = [
        ("Step time", estimate.step_s, summary.measured_metric("step_s"), format_seconds),
        ("Samples a second", estimate.samples_per_s, summary.measured_metric("samples_per_s"), _format_bare_rate),
        ("Tokens a second", estimate.tokens_per_s, summary.measured_metric("tokens_per_s"), _format_bare_rate),
        ("MFU", estimate.mfu, summary.measured_metric("mfu"), lambda value: format_percent(value, 1)),
        ("Exposed communication", estimate.breakdown.get("communication"), _exposed_communication(summary), format_seconds),
    ]
    shown = [row for i, row in enumerate(rows) if i == 0 or None not in row]
    return [paired_bars([(label, predicted, measured)], show, summary.tolerance) for label, predicted, measured, show in shown]


def _memory_bars(summary: RunSummary) -> list[Html]:
    ranks = list(zip_longest(summary.predicted_memory(), summary.measured_memory()))
    rows = [(f"Peak memory, rank {rank}", predicted, measured) for rank, (predicted, measured) in enumerate(ranks[:MAX_RANKS])]
    more = tag("p", f"The first {MAX_RANKS} of {len(ranks)} ranks.", class_="note") if len(ranks) > MAX_RANKS else EMPTY
    return [paired_bars(rows, format_bytes, summary.tolerance), more]


def _charts(summary: RunSummary) -> list[Chart]:
    estimate, steps = summary.estimate, summary.steps
    step_level = ReferenceLine("predicted", estimate.step_s, estimate.error) if estimate else None
    peak = _max_known(summary.predicted_memory()[:1])
    peak_level = ReferenceLine("predicted peak", peak) if peak else None

    def series(name: str, key: str, colour: int) -> Series:
        return Series(name, steps.points(key, MAX_POINTS), colour, num_nonfinite=len(steps) - len(steps.finite(key)))

    loss = [series("training", "loss", 1)]
    loss += [Series("validation", steps.validation_points(), 2, dots=True)] if steps.validation else []
    charts = [
        Chart("Loss", loss, format_number),
        Chart("Step time", [series("measured", "step_s", 3)], format_seconds, step_level, from_zero=True),
        Chart("Throughput", [series("samples/s", "samples_per_s", 4)], _format_bare_rate, from_zero=True),
        Chart("Memory of rank 0", [series("peak so far", "memory_bytes", 5)], format_bytes, peak_level, from_zero=True),
    ]
    for title, key, colour in (("Gradient norm", "grad_norm", 6), ("Learning rate", "learning_rate", 2)):
        curve = series(title.lower(), key, colour)
        charts += [Chart(title, [curve], format_number, from_zero=True)] if curve.points else []
    return charts


def _outcome(fault: Fault, restarts: Sequence[Event]) -> str:
    """What the run did after a fault that it survived."""
    restart = next((event for event in restarts if event.data.get("fault_time") == fault.time), None)
    return f"The run went on: {describe_event(restart)}." if restart is not None else ""


def _fault_box(fault: Fault, title: str, outcome: str = "") -> Html:
    when = time.strftime(" at %H:%M:%S", time.localtime(fault.time)) if fault.time else ""
    follows = ". A consequence of another rank's failure." if fault.secondary else ""
    message = tag("p", fault.message, class_="message") if fault.message else EMPTY
    traceback = tag("pre", fault.traceback.strip()) if fault.traceback.strip() else EMPTY
    went_on = tag("p", outcome, class_="message") if outcome else EMPTY
    return tag("div", tag("p", title, when, follows, class_="where"), message, traceback, went_on, class_="fault")


def _ranking_table(summary: RunSummary, ranking: Sequence[PlanCandidate]) -> Html:
    chosen = next((i for i, c in enumerate(ranking) if summary.plan and c.summary == summary.plan.summary()), None)
    slowest = max((finite_or_none(c.step_s) or 0.0 for c in ranking), default=0.0) or 1.0
    rows = []
    for i, entry in enumerate(ranking):
        width = 100 * (finite_or_none(entry.step_s) or 0.0) / slowest
        name = tag("div", entry.summary, *([" ", tag("span", "chosen", class_="chip good")] if i == chosen else []), class_="wide")
        bar = tag("span", tag("i", style=f"width:{width:.1f}%"), class_="mini")
        fits = tag("span", "fits" if entry.fits else "too large", class_=f"chip {'good' if entry.fits else 'poor'}")
        penalty = f"+{100 * entry.penalty:.1f} %" if entry.penalty else DASH
        rows.append((str(i + 1), name, bar, format_seconds(entry.step_s), penalty, format_bytes(entry.memory_bytes), fits, entry.reason))
    head = ("", "plan", "", "step time", "penalty", "memory", "", "reason")
    title = tag("h3", f"{len(ranking)} plan{'s' * (len(ranking) != 1)} compared")
    order = tag("p", _ranking_order(str(summary.job.get("objective", "time"))), class_="note")
    return join([title, order, table(head, rows, numeric_columns=(0, 3, 4, 5), highlighted_row=chosen)])


def _ranking_order(objective: str) -> str:
    """The order of the ranking in words, since it is not that of the step times alone."""
    if objective == "memory":
        return "Plans that fit come first, in order of memory; the others by how near they are to fitting."
    cost = {"time": "step time", "throughput": "device-seconds a step", "money": "money a step", "energy": "energy a step"}.get(objective, objective)
    return (
        f"Plans that fit come first, in order of {cost} with a penalty for each mechanism that a plan adds: "
        "it must gain more than that, since predictions are not finer. The others are in order of memory."
    )


def _card(name: str, value: str, *notes: str) -> Html:
    number, _, unit = value.partition(" ")
    shown = tag("strong", number, *([tag("span", unit)] if unit else []))
    return tag("div", tag("span", name, class_="name"), shown, tag("small", *notes), class_="card")


def _node_row(node: Node) -> tuple[str, ...]:
    kinds = Counter((d.name, d.memory_bytes) for d in node.devices)
    devices = ", ".join(f"{count} × {name} ({format_bytes(memory)})" for (name, memory), count in kinds.items())
    link = f"{node.link.name}, {format_bytes(node.link.bandwidth)}/s"
    name = join([tag("b", node.name), tag("br"), tag("small", node.cpu)]) if node.cpu else tag("b", node.name)
    return (name, devices, str(node.cores), format_bytes(node.memory_bytes), link)


def _event_row(event: Event, start_time: float) -> tuple[str, ...]:
    kind = tag("span", event.kind, class_=f"chip {({'fault': 'poor', 'stop': 'fair', 'restart': 'fair', 'end': 'good'}).get(event.kind, '')}".strip())
    step = str(event.step) if event.step >= 0 else ""
    return (f"{event.time - start_time:.2f} s", str(event.rank) if event.rank >= 0 else "", kind, step, describe_event(event))


def _rank_name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "the supervisor"


def _exposed_communication(summary: RunSummary) -> float | None:
    """Measured seconds a step."""
    return finite_or_none((summary.result.get("measured") or {}).get("exposed_communication_s"))


def _max_known(values: Sequence[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _format_bare_rate(value: Any) -> str:
    return format_rate(value, "").rstrip()


def _format_value(value: Any) -> str:
    return DASH if value is None or value == "" else value if isinstance(value, str) else json.dumps(value)
