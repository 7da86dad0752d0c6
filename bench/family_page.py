"""What the sweep of `families.py` found, as a table for the terminal and as a page of the docs: results in, text out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from rich.table import Table

PLANS = {"dp": "data parallel, dp=2", "zero3": "ZeRO-3, shard=2", "tp": "tensor parallel, tp=2", "pp": "pipeline, pp=2"}
GOALS = {"dp": 0.98, "zero3": 0.98, "tp": 0.80, "pp": 0.85}
WELL_CUT = 0.9  # of the parameters inside blocks
FAILURES = ("wrong", "traceback", "hang")
Result = dict[str, Any]


def cells_of(results: Iterable[Result], plan: str) -> list[Result]:
    """The cells of all models under a plan."""
    return [result["cells"][plan] for result in results if plan in result["cells"]]


def summary_table(results: list[Result]) -> Table:
    built = [r for r in results if r["built"]]
    table = Table(title=f"{len(built)} models built of {len(results)}")
    for column in ("plan", "equal", "share", "goal", "refused", "inexact", *FAILURES, "block parameters cut"):
        table.add_column(column)
    for plan in PLANS:
        table.add_row(plan, *_summary(cells_of(built, plan), plan))
    return table


def _summary(cells: list[Result], plan: str) -> list[str]:
    """Equal, share, goal, refused, inexact, failures, and how many of the equal ones are well cut."""
    counts = Counter(cell["status"] for cell in cells)
    equal = [cell for cell in cells if cell["status"] == "equal"]
    well_cut = sum(cell["cut"] >= WELL_CUT for cell in equal)
    cut = f"≥ {WELL_CUT:.0%} in {well_cut} of {len(equal)} ({_share(well_cut, len(equal))})" if plan == "tp" else ""
    others = [str(counts[status]) for status in ("refused", "inexact", *FAILURES)]
    return [str(counts["equal"]), _share(counts["equal"], len(cells)), f"{GOALS[plan]:.0%}", *others, cut]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def markdown(results: list[Result]) -> str:
    """The page of the docs: counts and goals, a table by library, reasons, models that are not in the sweep, and a row for each model."""
    results = sorted(results, key=lambda result: result["model"])
    built = [r for r in results if r["built"]]
    sections = [
        "# Other people's models\n\n"
        "Every model type of transformers, one model of each module of timm and torchvision, the models of diffusers and torch's own layers,\n"
        "built small from their own configurations and trained for four AdamW steps on two ranks, beside the same steps in a plain loop\n"
        "(`python bench/families.py`).\n\n"
        "- **equal**: losses and gradient norms are those of one device, within what rounding alone changes\n"
        "- **refused**: a line says what cannot be done and what to change\n"
        "- **inexact**: it runs, and says before it does that samples meet, so that the result is not one device's\n"
        "- **wrong**, **traceback**, **hang**: failures",
        f"{len(built)} of {len(results)} models could be built and run on one device.",
        _goals(built),
        "## By library\n\n" + _libraries(results),
        *_failures(built),
        "## Why plans are refused or inexact\n\n" + _reasons(built),
        "## Models that are not in the sweep\n\n" + _not_built([r for r in results if not r["built"]]),
        "## All models\n\n" + _folded(f"{len(built)} models", _models(built)),
    ]
    return "\n\n".join(sections) + "\n"


def _goals(built: list[Result]) -> str:
    rows = []
    for plan, name in PLANS.items():
        cells = cells_of(built, plan)
        share = sum(cell["status"] == "equal" for cell in cells) / max(len(cells), 1)
        rows.append(
            [name, *_summary(cells, plan)[:3], "" if not cells else "reached" if share >= GOALS[plan] else "missed", *_summary(cells, plan)[3:]]
        )
    return _table(["plan", "equal", "share", "goal", "", "refused", "inexact", *FAILURES, "block parameters cut"], rows)


def _libraries(results: list[Result]) -> str:
    """For each library: how many models are in the sweep, and of those how many are equal under each plan."""
    by_library: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_library[_library(result)].append(result)
    rows = []
    for library, mine in sorted(by_library.items()):
        built = [r for r in mine if r["built"]]
        equal = [[cell["status"] == "equal" for cell in cells_of(built, plan)] for plan in PLANS]
        rows.append([library, f"{len(built)} of {len(mine)}", *(f"{sum(each)} ({_share(sum(each), len(each))})" for each in equal)])
    return _table(["library", "models built", *(f"equal under {plan}" for plan in PLANS)], rows)


def _failures(built: list[Result]) -> list[str]:
    """A section with every failed cell, where there is one."""
    rows = [
        [f"`{result['model']}`", plan, f"**{cell['status']}**", _last_line(cell)]
        for result in built
        for plan, cell in result["cells"].items()
        if cell["status"] in FAILURES
    ]
    return ["## Failures\n\n" + _table(["model", "plan", "", "what was seen"], rows)] if rows else []


def _last_line(cell: Result) -> str:
    if cell["status"] == "wrong":
        return f"differs by {cell['difference']:.1e}"
    return _in_a_cell(cell["why"].strip().splitlines()[-1])


def _reasons(built: list[Result]) -> str:
    """Each reason once, with the models and plans that it holds for; the most frequent first."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for result in built:
        for plan, cell in result["cells"].items():
            if cell["status"] in ("refused", "inexact"):
                groups[cell["status"], general_reason(cell["why"])][result["model"]].append(plan)
    if not groups:
        return "None is."
    rows = []
    for (status, reason), models in sorted(groups.items(), key=lambda group: -sum(map(len, group[1].values()))):
        count = sum(map(len, models.values()))
        named = ", ".join(f"{_short(model)} ({', '.join(plans)})" for model, plans in models.items())
        rows.append([str(count), status, _in_a_cell(reason), named])
    return _table(["cells", "", "reason", "models (plans)"], rows)


def general_reason(why: str) -> str:
    """The first line of a reason without what differs from model to model: names of classes and modules, lines of source and where they are."""
    line = why.strip().splitlines()[0]
    line = re.sub(r"\bmodel _?[A-Z]\w*\b", "the model", line)
    line = re.sub(r" ?\((?:/|\w:\\)[^()]*:\d+\)", "", line)  # a file and its line
    line = re.sub(r"`[^`]*`", "`…`", line)
    line = re.sub(r"\b\w+(?:\.\w+)+\b(?!\.default)", "…", line)  # a module's path
    return re.sub(r"\d{2,}", "N", line)


def _not_built(left_out: list[Result]) -> str:
    """Reasons with the models that have them; folded, because it is long."""
    groups: dict[str, list[str]] = defaultdict(list)
    for result in left_out:
        groups[_why_not_built(result["why"])].append(_short(result["model"]))
    if not groups:
        return "None."
    lines = [f"- {reason}: {', '.join(models)}" for reason, models in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))]
    return _folded(f"{len(left_out)} models, by reason", "\n".join(lines))


# What the error says, and what it means for the sweep; the first that matches counts.
_NOT_BUILT = (
    (r"ImportError|requires the", "need a library that is not installed"),
    (r"not trainable|not implement|does not support training|Training is not", "cannot be trained, says their own code"),
    (r"too large", "too large after shrinking"),
    (r"inference_session", "are called with a session of frames, not with a batch"),
    (r"draws random numbers", "draw random numbers in each step"),
    (r"nothing to train|does not depend on a parameter", "have nothing to train in what they return"),
    (r"nobody knows what|missing \d+ required|must specify|have to specify|cannot be None|_forward_unimplemented|must be provided|NoneType",
     "take inputs that no rule here makes"),
    (r"", "do not fit together after shrinking"),
)  # fmt: skip


def _why_not_built(why: str) -> str:
    return next(reason for pattern, reason in _NOT_BUILT if re.search(pattern, why))


def _models(built: list[Result]) -> str:
    rows = []
    for result in built:
        marks = [_mark(result["cells"][plan]) if plan in result["cells"] else "" for plan in PLANS]
        rows.append([f"`{result['model']}`", result["class"], f"{result['parameters']:,}", *marks])
    return _table(["model", "class", "parameters", *PLANS], rows)


def _mark(cell: Result) -> str:
    return "=" if cell["status"] == "equal" else f"**{cell['status']}**" if cell["status"] in FAILURES else str(cell["status"])


def _library(result: Result) -> str:
    return str(result["model"]).partition("/")[0]


def _short(model: str) -> str:
    """The name without its library where that is transformers, which most are."""
    return model.removeprefix("transformers/")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _in_a_cell(text: str) -> str:
    """Text that does not end a cell of a table, or opens a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")[:300]
