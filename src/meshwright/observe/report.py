"""report.html: the story of a run in one file that needs nothing else — no network, no server, no package."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from meshwright.core.errors import RequestError
from meshwright.observe import sections
from meshwright.observe.folder import RunFolder
from meshwright.observe.markup import Html, join, tag
from meshwright.observe.story import Story, read_story
from meshwright.observe.words import devices_in_words

# In the order of reading; a part that has nothing to say is left out, here and in the navigation.
PARTS: tuple[tuple[str, str, Callable[[Story], Html]], ...] = (
    ("plan", "Plan", sections.plan),
    ("why", "Why", sections.why),
    ("prediction", "Predicted and measured", sections.prediction),
    ("curves", "Curves", sections.curves),
    ("breakdown", "Time and memory", sections.breakdown),
    ("trace", "Timeline", sections.trace),
    ("cluster", "Cluster", sections.cluster),
    ("configuration", "Configuration", sections.configuration),
    ("events", "Events", sections.events),
)


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run's folder and return its path. It can be written at any time, also while the run goes on."""
    page = render(read_story(folder))
    path = folder.path / "report.html"
    partial = path.with_suffix(".html.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)  # whole or not at all: a browser may be reloading it
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; make the folder writable, or copy the run elsewhere") from None
    return path


def render(story: Story) -> str:
    """The whole page."""
    parts = [(anchor, name, html) for anchor, name, part in PARTS if (html := part(story))]
    nav = tag("nav", *(tag("a", name, href=f"#{anchor}") for anchor, name, _ in parts))
    alarm = sections.faults(story)
    first = alarm if story.status.over and story.status.state != "done" else Html()
    main = tag("main", first, sections.unread(story), sections.cards(story), Html() if first else alarm, *(html for _, _, html in parts))
    foot = tag("footer", f"Written by Meshwright on {time.strftime('%Y-%m-%d at %H:%M:%S')} from the folder {story.name}.")
    body = tag("body", _header(story, nav), main, foot, tag("div", id="tip", role="status"), tag("script", Html(_asset("report.js"))))
    return "<!doctype html>\n" + tag("html", _head(story), body, lang="en") + "\n"


def _head(story: Story) -> Html:
    title = tag("title", f"{story.model} · {story.status.state} · Meshwright")
    view = tag("meta", name="viewport", content="width=device-width, initial-scale=1")
    return tag("head", tag("meta", charset="utf-8"), view, title, tag("style", Html(_asset("report.css"))))


def _header(story: Story, nav: Html) -> Html:
    state = story.status.state
    badge = tag("span", state, class_=f"badge {state}")
    switch = tag("button", "◐", id="theme", type="button", title="Light or dark", aria_label="Light or dark")
    began = story.events[0].time if story.events else None
    facts = [story.name]
    facts += [time.strftime("%Y-%m-%d %H:%M", time.localtime(began))] if began else []
    facts += [devices_in_words(story.cluster, story.plan.world if story.plan else None)] if story.cluster else []
    plan = tag("p", story.plan.summary(), class_="summary") if story.plan else Html()
    reason = tag("p", f"Stopped: {story.status.detail}", class_="reason") if state == "stopped" and story.status.detail else Html()
    top = tag("div", tag("h1", story.model), badge, switch, class_="top")
    return tag("header", top, plan, reason, tag("p", join(tag("span", fact) for fact in facts), class_="facts"), nav)


def _asset(name: str) -> str:
    return files("meshwright.observe").joinpath(name).read_text(encoding="utf-8")
