"""Builds HTML and SVG from functions, safe by default: a plain string is escaped, only `Html` is inserted as markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_VOID_TAGS = frozenset({"meta", "br", "hr", "input"})


class Html(str):
    """Text that is already markup and is not escaped."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Html:
    """An element, like tag('td', text, class_='number'). An underscore in an attribute's name becomes '-'; None omits the attribute."""
    texts = {key.strip("_").replace("_", "-"): escape(_attribute_text(value)) for key, value in attributes.items() if value is not None}
    start = name + "".join(f' {key}="{text}"' for key, text in texts.items())
    return Html(f"<{start}>" if name in _VOID_TAGS else f"<{start}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Html:
    return Html("".join(child if isinstance(child, Html) else escape(child, quote=False) for child in children))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric_columns: Iterable[int] = (), highlighted_row: int | None = None) -> Html:
    """A table; the columns in `numeric_columns` are right-aligned, the row `highlighted_row` is highlighted."""
    right = frozenset(numeric_columns)

    def cells(kind: str, row: Sequence[str]) -> Html:
        return join(tag(kind, cell, class_="number" if i in right else None) for i, cell in enumerate(row))

    body = join(tag("tr", cells("td", row), class_="marked" if i == highlighted_row else None) for i, row in enumerate(rows))
    top = tag("thead", tag("tr", cells("th", head))) if any(head) else Html()
    return tag("div", tag("table", top, tag("tbody", body)), class_="scroll")


def section(title: str, *children: str, note: str = "", anchor: str = "") -> Html:
    return tag("section", tag("h2", title), tag("p", note, class_="note") if note else Html(), *children, id=anchor or None)


def _attribute_text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
