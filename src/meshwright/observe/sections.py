"""The parts of a report, each a function from the story to HTML; a part with nothing to say is empty."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from meshwright.core.cluster import Node
from meshwright.core.event import Event, Fault
from meshwright.observe import figures
from meshwright.observe.charts import Chart, Level, Series, difference, line_chart, paired_bars, stacked_bar
from meshwright.observe.folder import Candidate
from meshwright.observe.markup import Html, join, section, table, tag
from meshwright.observe.status import cause
from meshwright.observe.story import Story
from meshwright.observe.words import event_in_words, plan_choices, plan_in_words

MOST_RANKS = 16
MOST_NODES = 32
MOST_EVENTS = 200
NOTHING = Html()


def faults(story: Story) -> Html:
    """What broke: shown first when it ended the run, otherwise as something that was survived."""
    state, every = story.status.state, list(story.faults)
    if state == "interrupted" and not every:
        return tag("div", tag("h2", "Interrupted"), tag("p", story.status.detail), class_="alarm")
    first = story.status.fault if state == "failed" else cause(every)
    if first is None:
        return NOTHING
    if state != "failed":
        count = f"{len(every)} fault{'s' * (len(every) > 1)} on the way"
        return tag("div", tag("h2", count), *(_fault(f, f"{_who(f.rank)}: {f.kind}") for f in every), class_="alarm mild")
    others = [_fault(f, f"{_who(f.rank)}: {f.kind}") for f in every if f != first]
    more = [tag("details", tag("summary", f"{len(others)} other fault{'s' * (len(others) > 1)}"), *others)] if others else []
    after = f"after step {story.steps[-1]['step']}" if story.steps else "before the first step"
    return tag("div", tag("h2", f"{_who(first.rank).capitalize()} failed: {first.kind}"), _fault(first, after), *more, class_="alarm")


def unread(story: Story) -> Html:
    if not story.unread:
        return NOTHING
    return tag("div", tag("h2", "Could not be read"), tag("ul", *(tag("li", text) for text in story.unread)), class_="alarm mild")


def cards(story: Story) -> Html:
    """The run in six numbers."""
    estimate, tolerance = story.estimate, story.tolerance
    step_s = story.measured("step_s")
    peak, expected = _most(story.measured_memory()), _most(story.predicted_memory())
    losses = story.curve("loss")
    made = [_loss_card(losses, story.validation_curve())] if losses else []
    if step_s is not None:
        made.append(_card("Step time", figures.seconds(step_s), *_versus(step_s, estimate.step_s if estimate else None, figures.seconds, tolerance)))
    if (speed := story.measured("samples_per_s")) is not None:
        tokens = story.measured("tokens_per_s")
        made.append(_card("Throughput", figures.rate(speed, "samples/s"), figures.rate(tokens, "tokens/s") if tokens is not None else ""))
    if peak is not None:
        made.append(_card("Peak memory", figures.size(peak), *_versus(peak, expected, figures.size, tolerance)))
    if (mfu := story.measured("mfu")) is not None:
        expected_mfu = estimate.mfu if estimate else None
        made.append(_card("MFU", figures.percent(mfu, 1), f"predicted {figures.percent(expected_mfu, 1)}" if expected_mfu is not None else ""))
    if (seconds := story.seconds()) is not None:
        made.append(_card("Duration", figures.seconds(seconds), f"{len(story.steps):,} step{'s' * (len(story.steps) != 1)}"))
    return tag("div", *made, class_="cards") if made else NOTHING


def plan(story: Story) -> Html:
    if story.plan is None:
        return NOTHING
    words = tag("p", " ".join(plan_in_words(story.plan)), class_="lead")
    rows = [(join([choice, tag("br"), tag("small", meaning)]), tag("b", value)) for choice, value, meaning in plan_choices(story.plan)]
    half = -(-len(rows) // 2)
    halves = [tag("div", table(("", ""), part, numbers=(1,))) for part in (rows[:half], rows[half:])]
    return section("The plan", words, tag("div", *halves, class_="columns choices"), anchor="plan")


def why(story: Story) -> Html:
    decision = story.decision
    if decision is None or not (decision.why or decision.ranking):
        return NOTHING
    text = tag("div", decision.why.strip(), class_="why") if decision.why.strip() else NOTHING
    return section("Why this plan", text, _ranking(story, decision.ranking) if decision.ranking else NOTHING, anchor="why")


def prediction(story: Story) -> Html:
    """Predicted against measured, for time and for each rank's memory."""
    estimate = story.estimate
    if estimate is None:
        return NOTHING
    error = figures.percent(estimate.error)
    note = f"The estimate was made before the run, with a stated error of ±{error} (one sigma). Measured step time is the median."
    grid = tag("div", tag("div", *_rates(story), _reason(story)), tag("div", *_memory(story)), class_="columns")
    return section("Predicted against measured", grid, note=note, anchor="prediction")


def curves(story: Story) -> Html:
    if not story.steps and not story.validation:
        return section("Curves", tag("p", "No step was recorded.", class_="empty"), anchor="curves")
    return section("Curves", tag("div", *map(line_chart, _charts(story)), class_="charts"), anchor="curves")


def breakdown(story: Story) -> Html:
    """Where the predicted time and memory go."""
    estimate = story.estimate
    if estimate is None:
        return NOTHING
    measured = figures.finite((story.result.get("measured") or {}).get("exposed_communication_s"))
    exposed = f" Measured: {figures.seconds(measured)} of communication was not hidden." if measured is not None else ""
    sent = f" A rank sends {figures.size(estimate.traffic_bytes)} in a step." if estimate.traffic_bytes else ""
    time_part = tag("div", tag("h3", f"A step of {figures.seconds(estimate.step_s)}"), stacked_bar(estimate.breakdown, figures.seconds))
    largest = figures.size(_most(story.predicted_memory()))
    memory = tag("div", tag("h3", f"The largest rank, {largest}"), stacked_bar(estimate.memory_kinds, figures.size))
    notes = tag("ul", *(tag("li", note) for note in estimate.notes), class_="notes") if estimate.notes else NOTHING
    note = f"As predicted.{sent}{exposed}"
    return section("Where time and memory go", tag("div", time_part, memory, class_="columns"), notes, note=note, anchor="breakdown")


def cluster(story: Story) -> Html:
    if story.cluster is None:
        return NOTHING
    nodes = story.cluster.nodes
    head = ("node", "devices", "cores", "memory", "joined by")
    body = table(head, map(_node, nodes[:MOST_NODES]), numbers=(2, 3))
    more = tag("p", f"The first {MOST_NODES} of {len(nodes)} nodes.", class_="note") if len(nodes) > MOST_NODES else NOTHING
    link = story.cluster.link
    joined = f"; nodes are joined by {link.name}, {figures.rate(8 * link.bandwidth / 1e9, 'Gbit/s')}" if len(nodes) > 1 else ""
    started = f"; started by {story.cluster.scheduler}" if story.cluster.scheduler != "none" else ""
    count = len(story.cluster.devices)
    note = f"{story.cluster.name}: {count} device{'s' * (count != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}{joined}{started}."
    return section("The cluster", body, more, note=note, anchor="cluster")


def configuration(story: Story) -> Html:
    if not story.job:
        return NOTHING
    rows = [tag("div", tag("dt", key), tag("dd", _value(value))) for key, value in story.job.items()]
    digest = story.result.get("state_digest")
    rows += [tag("div", tag("dt", "state digest"), tag("dd", tag("code", str(digest))))] if digest else []
    return section("Configuration", tag("dl", *rows, class_="config"), anchor="configuration")


def trace(story: Story) -> Html:
    if not story.has_trace:
        return NOTHING
    link = tag("a", tag("code", "trace.json"), href="trace.json")
    steps = (
        join(["Open ", tag("b", "ui.perfetto.dev"), " in a browser (the file stays on your machine)."]),
        join(["Press ", tag("b", "Open trace file"), " and choose ", link, " in this run's folder."]),
        join(["Move with ", *(tag("kbd", key) for key in "WASD"), "; click a bar to see what it is and how long it took."]),
    )
    note = "trace.json has every operation of one step of rank 0, with its beginning and its end."
    return section("Timeline of one step", tag("ol", *(tag("li", step) for step in steps)), note=note, anchor="trace")


def events(story: Story) -> Html:
    every = story.events
    if not every:
        return NOTHING
    half = MOST_EVENTS // 2
    shown = every if len(every) <= MOST_EVENTS else (*every[:half], *every[-half:])
    note = f"The first and last {half} of {len(every)}." if len(every) > len(shown) else ""
    body = table(("after", "rank", "event", "step", "what"), [_event(e, every[0].time) for e in shown], numbers=(0, 1, 3))
    attribute = "" if len(shown) <= 40 else None
    return section("Events", tag("details", tag("summary", f"{len(every)} events"), body, open=attribute), note=note, anchor="events")


def _rates(story: Story) -> list[Html]:
    """Step time and what follows from it, each on its own scale; what was not both predicted and measured is left out, but for step time."""
    estimate = story.estimate
    assert estimate is not None
    hidden = figures.finite((story.result.get("measured") or {}).get("exposed_communication_s"))
    rows: list[tuple[str, float | None, float | None, Callable[[Any], str]]] = [
        ("Samples a second", estimate.samples_per_s, story.measured("samples_per_s"), _plain_rate),
        ("Tokens a second", estimate.tokens_per_s, story.measured("tokens_per_s"), _plain_rate),
        ("MFU", estimate.mfu, story.measured("mfu"), lambda value: figures.percent(value, 1)),
        ("Communication not hidden", estimate.breakdown.get("communication"), hidden, figures.seconds),
    ]
    known = [row for row in rows if row[1] is not None and row[2] is not None]
    every = [("Step time", estimate.step_s, story.measured("step_s"), figures.seconds), *known]
    return [paired_bars([(label, predicted, measured)], show, story.tolerance) for label, predicted, measured, show in every]


def _memory(story: Story) -> list[Html]:
    ranks = list(zip_longest(story.predicted_memory(), story.measured_memory()))
    rows = [(f"Peak memory, rank {rank}", predicted, measured) for rank, (predicted, measured) in enumerate(ranks[:MOST_RANKS])]
    more = tag("p", f"The first {MOST_RANKS} of {len(ranks)} ranks.", class_="note") if len(ranks) > MOST_RANKS else NOTHING
    return [paired_bars(rows, figures.size, story.tolerance), more]


def _charts(story: Story) -> list[Chart]:
    estimate = story.estimate
    step_level = Level("predicted", estimate.step_s, estimate.error) if estimate else None
    peak = _most(story.predicted_memory()[:1])
    peak_level = Level("predicted peak", peak) if peak else None
    loss = [Series("training", story.curve("loss"), 1)]
    loss += [Series("validation", story.validation_curve(), 2, dots=True)] if story.validation else []
    charts = [
        Chart("Loss", loss, figures.quantity),
        Chart("Step time", [Series("measured", story.curve("step_s"), 3)], figures.seconds, step_level, from_zero=True),
        Chart("Throughput", [Series("samples/s", story.curve("samples_per_s"), 4)], _plain_rate, from_zero=True),
        Chart("Memory of rank 0", [Series("peak so far", story.curve("memory_bytes"), 5)], figures.size, peak_level, from_zero=True),
    ]
    for title, key, colour in (("Gradient norm", "grad_norm", 6), ("Learning rate", "learning_rate", 2)):
        points = story.curve(key)
        charts += [Chart(title, [Series(title.lower(), points, colour)], figures.quantity, from_zero=True)] if points else []
    return charts


def _fault(fault: Fault, title: str) -> Html:
    when = time.strftime(" at %H:%M:%S", time.localtime(fault.time)) if fault.time else ""
    follows = ". This only follows from another rank's failure." if fault.secondary else ""
    said = tag("p", fault.message, class_="message") if fault.message else NOTHING
    trail = tag("pre", fault.traceback.strip()) if fault.traceback.strip() else NOTHING
    return tag("div", tag("p", title, when, follows, class_="where"), said, trail, class_="fault")


def _ranking(story: Story, ranking: Sequence[Candidate]) -> Html:
    chosen = next((i for i, c in enumerate(ranking) if story.plan and c.summary == story.plan.summary()), None)
    slowest = max((c.step_s for c in ranking if figures.finite(c.step_s) is not None and c.step_s is not None), default=0.0) or 1.0
    rows = []
    for i, entry in enumerate(ranking):
        width = 100 * (figures.finite(entry.step_s) or 0.0) / slowest
        name = tag("div", entry.summary, *([" ", tag("span", "chosen", class_="chip good")] if i == chosen else []), class_="wide")
        bar = tag("span", tag("i", style=f"width:{width:.1f}%"), class_="mini")
        fits = tag("span", "fits" if entry.fits else "too large", class_=f"chip {'good' if entry.fits else 'poor'}")
        rows.append((str(i + 1), name, bar, figures.seconds(entry.step_s), figures.size(entry.memory_bytes), fits, entry.reason))
    head = ("", "plan", "", "step time", "memory", "", "reason")
    return join([tag("h3", f"{len(ranking)} plan{'s' * (len(ranking) != 1)} weighed"), table(head, rows, numbers=(0, 3, 4), marked=chosen)])


def _reason(story: Story) -> Html:
    estimate = story.estimate
    assert estimate is not None
    return tag("p", tag("b", "It fits: " if estimate.fits else "It does not fit: "), estimate.reason, class_="note") if estimate.reason else NOTHING


def _loss_card(losses: list[tuple[float, float]], validation: list[tuple[float, float]]) -> Html:
    notes = [f"from {figures.quantity(losses[0][1])}"] if len(losses) > 1 else []
    notes += [f"validation {figures.quantity(validation[-1][1])}"] if validation else []
    return _card("Loss", figures.quantity(losses[-1][1]), ", ".join(notes))


def _versus(measured: float, predicted: float | None, show: Callable[[Any], str], tolerance: float) -> tuple[str, ...]:
    return () if predicted is None else (f"predicted {show(predicted)} ", difference(measured, predicted, tolerance))


def _card(name: str, value: str, *notes: str) -> Html:
    number, _, unit = value.partition(" ")
    shown = tag("strong", number, tag("span", unit)) if unit else tag("strong", number)
    return tag("div", tag("span", name, class_="name"), shown, tag("small", *notes), class_="card")


def _node(node: Node) -> tuple[str, ...]:
    kinds = Counter((d.name, d.memory_bytes) for d in node.devices)
    devices = ", ".join(f"{count} × {name} ({figures.size(memory)})" for (name, memory), count in kinds.items())
    link = f"{node.link.name}, {figures.size(node.link.bandwidth)}/s"
    name = join([tag("b", node.name), tag("br"), tag("small", node.cpu)]) if node.cpu else tag("b", node.name)
    return (name, devices, str(node.cores), figures.size(node.memory_bytes), link)


def _event(event: Event, zero: float) -> tuple[str, ...]:
    kind = tag("span", event.kind, class_=f"chip {({'fault': 'poor', 'stop': 'fair', 'end': 'good'}).get(event.kind, '')}".strip())
    step = str(event.step) if event.step >= 0 else ""
    return (f"{event.time - zero:.2f} s", str(event.rank) if event.rank >= 0 else "", kind, step, event_in_words(event))


def _who(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "the supervisor"


def _most(values: Sequence[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _plain_rate(value: Any) -> str:
    return figures.rate(value, "").rstrip()


def _value(value: Any) -> str:
    return figures.DASH if value is None or value == "" else value if isinstance(value, str) else json.dumps(value)
