"""Draw the packages of the source tree by level, with their sizes and the imports between them: one SVG, and one table.

    python bench/packages.py [FOLDER] [--output docs/packages.svg] [--json]

A box is a package: its width is its lines of code. An arrow is an import; its width is the number of import statements.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import typer

LEVELS = (
    ("cli", "api"),
    ("orchestrate", "proxies"),
    ("plan", "simulate", "execute"),
    ("cost",),
    ("describe", "schedule", "comm", "observe", "launch", "data", "zoo"),
    ("core",),
)
WIDTH, ROW, BOX, GAP, MARGIN = 1160, 104, 46, 14, 20
LINES_PER_PIXEL = 22


@dataclass(frozen=True)
class Package:
    """One package, or one module at the top."""

    name: str
    files: int
    lines: int


def read(folder: Path) -> tuple[dict[str, Package], Counter[tuple[str, str]]]:
    """Packages by name, and how many statements of one import from another."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    imports: Counter[tuple[str, str]] = Counter()
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        name = parts[0].removesuffix(".py")
        text = path.read_text(encoding="utf-8")
        files[name] += 1
        lines[name] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
            target = module.removeprefix(f"{folder.name}.").split(".")[0] if module.startswith(f"{folder.name}.") else ""
            if target and target != name:
                imports[name, target] += 1
    return {name: Package(name, files[name], lines[name]) for name in files}, imports


def draw(packages: dict[str, Package], imports: Counter[tuple[str, str]]) -> str:
    places: dict[str, tuple[float, float, float]] = {}  # left, top, width
    for level, names in enumerate(LEVELS):
        row = [packages[name] for name in names if name in packages]
        widths = [max(p.lines / LINES_PER_PIXEL, 92.0) for p in row]
        left = (WIDTH - sum(widths) - GAP * (len(row) - 1)) / 2
        for package, width in zip(row, widths, strict=True):
            places[package.name] = (left, MARGIN + level * ROW, width)
            left += width + GAP
    height = MARGIN * 2 + ROW * (len(LEVELS) - 1) + BOX
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for (source, target), count in imports.most_common():
        if source in places and target in places:
            (x, y, width), (to_x, to_y, to_width) = places[source], places[target]
            start, end = (x + width / 2, y + BOX), (to_x + to_width / 2, to_y)
            middle = (start[1] + end[1]) / 2
            path = f"M{start[0]:.0f},{start[1]:.0f} C{start[0]:.0f},{middle:.0f} {end[0]:.0f},{middle:.0f} {end[0]:.0f},{end[1]:.0f}"
            out.append(f'<path d="{path}" fill="none" stroke="#5b7a99" stroke-opacity="0.35" stroke-width="{min(0.8 + count / 12, 9):.1f}"/>')
    for name, (x, y, width) in places.items():
        package = packages[name]
        out += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="5" fill="#eef3f8" stroke="#5b7a99"/>',
            f'<text x="{x + width / 2:.0f}" y="{y + 19:.0f}" text-anchor="middle" font-weight="bold">{escape(name)}</text>',
            f'<text x="{x + width / 2:.0f}" y="{y + 36:.0f}" text-anchor="middle" fill="#555">{package.lines:,} lines</text>',
        ]
    return "\n".join([*out, "</svg>", ""])


def main(
    folder: Annotated[Path, typer.Argument(help="The package's folder.", exists=True, file_okay=False)] = Path("src/meshwright"),
    output: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("docs/packages.svg"),
    as_json: Annotated[bool, typer.Option("--json", help="Print packages and imports as JSON.")] = False,
) -> None:
    """Draw the packages. Example: python bench/packages.py"""
    packages, imports = read(folder)
    output.write_text(draw(packages, imports), encoding="utf-8")
    if as_json:
        edges = [{"from": a, "to": b, "imports": n} for (a, b), n in sorted(imports.items())]
        print(json.dumps({"packages": [asdict(p) for p in packages.values()], "imports": edges}))
        return
    for package in sorted(packages.values(), key=lambda p: -p.lines):
        print(f"{package.name:14} {package.files:4} files {package.lines:7,} lines")
    total = sum(p.lines for p in packages.values())
    print(f"{'all':14} {sum(p.files for p in packages.values()):4} files {total:7,} lines; {len(imports)} pairs of packages import; {output}")


if __name__ == "__main__":
    typer.run(main)
