"""README and docs say what works: every command in them exists, those that need no ranks are run, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from click import Command, Context, Group

from meshwright.cli.main import app, main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|…|\[|\||PATH|FILE")


def commands(page: Path) -> list[str]:
    """Lines of code blocks and inline code that start with `meshwright`, without comments and launchers in front of it."""
    text = page.read_text()
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if "import" not in line]
    lines += re.findall(r"^    (meshwright .*)$", text, re.M)
    lines += re.findall(r"`(meshwright [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    found = (re.search(r"(?:^|\s)(meshwright [a-z].*)$", line.split("   #")[0].split("  # ")[0].replace("\\|", "|")) for line in lines)
    return sorted({match.group(1).strip() for match in found if match})


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]
QUICK = {"plan", "describe", "proxy"}
LOCAL_FILES = re.compile(r"lab\.toml|two\.json|plan\.json|job\.json|alpaca\.json|-o |--probe")


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: value.name if isinstance(value, Path) else value)
def test_a_command_of_the_docs_is_one_that_exists(page: Path, command: str) -> None:
    """The verb, and every flag of it."""
    words = command.split(" -- ")[0].split()[1:]  # what follows is the script's own
    current: Command = typer.main.get_command(app)  # type: ignore[assignment]
    while isinstance(current, Group) or hasattr(current, "commands"):
        verb = words.pop(0) if words else ""
        assert verb in current.commands, f"{page.name}: {command}: no verb {verb!r}"  # type: ignore[attr-defined]
        current = current.commands[verb]  # type: ignore[attr-defined]
    flags = {name for parameter in current.get_params(Context(current)) for name in (*parameter.opts, *parameter.secondary_opts)}
    used = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*|-[a-z])(?![\w-])", " ".join(words)))
    assert used <= flags, f"{page.name}: {command}: no flag {', '.join(sorted(used - flags))}"


RUN = sorted({c for _, c in COMMANDS if c.split()[1] in QUICK and "--cluster" in c and not PLACEHOLDER.search(c) and not LOCAL_FILES.search(c)})


@pytest.mark.parametrize("command", RUN)
def test_a_quick_command_of_the_docs_works(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    _, err = capsys.readouterr()
    assert not ended.value.code, err


def test_some_commands_are_run() -> None:
    assert len(COMMANDS) > 40 and len(RUN) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_demo_installs_what_the_commands_of_readme_need() -> None:
    """Every optional dependency but those of developers and of Ray clusters: no command of README ends with "pip install"."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]) - {"dev", "bench", "ray"}
    rule = (ROOT / "Makefile").read_text().split("$(VENV)/.core:")[1].split("\n\n")[0]
    installed = re.search(r"-e '\.\[(.*?)\]'", rule)
    assert installed
    assert set(installed.group(1).split(",")) == extras
