"""The command line's entry: collects the verbs, and turns every mistake into one line and the right exit code."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said here because nothing below would even parse everywhere
    sys.exit(f"meshwright: Python {sys.version_info[0]}.{sys.version_info[1]} is too old: use Python 3.11 or newer")

import click
import typer

from meshwright.cli import describe, doctor, plan, report, train, watch
from meshwright.cli.shared import fail
from meshwright.core.errors import MeshwrightError, unknown

app = typer.Typer(
    name="meshwright",
    help="Plan, run and explain the training of any PyTorch model on whatever machines there are.\n\nStart with: meshwright train",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(describe.app, name="describe")
app.command("plan")(plan.plan)
app.command("train", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": True})(train.train)
app.command("report")(report.report)
app.command("watch")(watch.watch)
app.command("doctor")(doctor.doctor)


def main(arguments: list[str] | None = None) -> None:
    """Run one command line and exit: 0 done, 1 the run failed, 2 the request was wrong, 130 interrupted."""
    command = typer.main.get_command(app)
    try:
        command.main(args=arguments, prog_name="meshwright", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(0)
    except click.exceptions.NoSuchOption as error:
        fail(f"unknown flag {error.option_name}" + _nearest(error.possibilities), 2)
    except click.exceptions.UsageError as error:
        fail(_one_line(error), 2)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        fail("interrupted", 130)
    except MeshwrightError as error:
        fault = getattr(error, "fault", None)
        if fault is not None and fault.traceback:
            print(f"meshwright: rank {fault.rank} failed:\n{fault.traceback.rstrip()}", file=sys.stderr)
        fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "pydantic"):
            raise
        wanted = "'torch>=2.11,<2.15'" if error.name == "torch" else error.name
        fail(f"{error.name} is not installed: pip install {wanted}", 2)
    except PermissionError as error:
        fail(f"{error.filename}: permission denied: choose another folder with --run-dir", 2)
    except BrokenPipeError:
        sys.exit(0)


def _nearest(possibilities: object) -> str:
    found = list(possibilities) if isinstance(possibilities, (list, tuple, set)) else []
    return f"; did you mean '{sorted(found)[0]}'?" if found else "; --help lists the flags"


def _one_line(error: click.exceptions.UsageError) -> str:
    text = " ".join(error.format_message().split())
    if isinstance(error, click.exceptions.UsageError) and text.startswith("No such command"):
        word = text.split("'")[1]
        group = error.ctx.command if error.ctx is not None else None
        names = list(group.commands) if isinstance(group, click.Group) else []
        return str(unknown("verb", word, names))
    return text[0].lower() + text[1:]


if __name__ == "__main__":
    main()
