"""Writes report.html: the summary of a run in one self-contained file — no network, no server, no package."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from meshwright.core.errors import RequestError
from meshwright.core.text_files import write_text
from meshwright.observe import report_sections
from meshwright.observe.markup import Html, join, tag
from meshwright.observe.run_folder import RunFolder
from meshwright.observe.run_summary import RunSummary, read_run_summary
from meshwright.observe.wording import describe_devices

# In the order of the page; an empty section is left out of the page and of the navigation.
SECTIONS: tuple[tuple[str, str, Callable[[RunSummary], Html]], ...] = (
    ("plan", "Plan", report_sections.plan),
    ("why", "Why", report_sections.why),
    ("prediction", "Predicted and measured", report_sections.prediction),
    ("curves", "Curves", report_sections.curves),
    ("breakdown", "Time and memory", report_sections.breakdown),
    ("trace", "Timeline", report_sections.trace),
    ("cluster", "Cluster", report_sections.cluster),
    ("configuration", "Configuration", report_sections.configuration),
    ("events", "Events", report_sections.events),
)


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run's folder and return its path. It can be called at any time, also while the run is live."""
    page = render(read_run_summary(folder))
    path = folder.path / "report.html"
    try:
        write_text(path, page)  # atomic: a browser may be reloading it
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; make the folder writable, or copy the run elsewhere") from None
    return path


def render(summary: RunSummary) -> str:
    """The HTML text of the whole page."""
    sections = [(anchor, name, html) for anchor, name, render_section in SECTIONS if (html := render_section(summary))]
    nav = tag("nav", *(tag("a", name, href=f"#{anchor}") for anchor, name, _ in sections))
    overview = [report_sections.unreadable_files(summary), report_sections.metric_cards(summary)]
    is_first = summary.status.is_over and summary.status.state != "done"  # faults that ended the run come first, survived ones after the numbers
    overview.insert(0 if is_first else 2, report_sections.faults(summary))
    main = tag("main", *overview, *(html for _, _, html in sections))
    foot = tag("footer", f"Written by Meshwright on {time.strftime('%Y-%m-%d at %H:%M:%S')} from the folder {summary.name}.")
    body = tag("body", _header(summary, nav), main, foot, tag("div", id="tip", role="status"), tag("script", Html(_asset("report.js"))))
    return "<!doctype html>\n" + tag("html", _head(summary), body, lang="en") + "\n"


def _head(summary: RunSummary) -> Html:
    title = tag("title", f"{summary.model} · {summary.status.state} · Meshwright")
    view = tag("meta", name="viewport", content="width=device-width, initial-scale=1")
    return tag("head", tag("meta", charset="utf-8"), view, title, tag("style", Html(_asset("report.css"))))


def _header(summary: RunSummary, nav: Html) -> Html:
    state = summary.status.state
    badge = tag("span", state, class_=f"badge {state}")
    switch = tag("button", "◐", id="theme", type="button", title="Light or dark", aria_label="Light or dark")
    facts = [summary.name]
    facts += [time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.events[0].time))] if summary.events else []
    facts += [describe_devices(summary.cluster, summary.plan.world if summary.plan else None)] if summary.cluster else []
    plan = tag("p", summary.plan.summary(), class_="summary") if summary.plan else Html()
    reason = tag("p", f"Stopped: {summary.status.detail}", class_="reason") if state == "stopped" and summary.status.detail else Html()
    top = tag("div", tag("h1", summary.model), badge, switch, class_="top")
    return tag("header", top, plan, reason, tag("p", join(tag("span", fact) for fact in facts), class_="facts"), nav)


def _asset(name: str) -> str:
    return files("meshwright.observe").joinpath(name).read_text(encoding="utf-8")
