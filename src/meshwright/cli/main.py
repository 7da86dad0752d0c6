"""The entry point of the command line: registers the commands, and turns every error into one line and an exit code."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - checked here because what follows may not even parse
    sys.exit(f"meshwright: Python {sys.version_info[0]}.{sys.version_info[1]} is too old: use Python 3.11 or newer")

import atexit
import difflib
import errno
import gc
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from meshwright.cli import bench_command, checkpoints_command, describe_command
from meshwright.cli.console import fail
from meshwright.cli.doctor_command import doctor
from meshwright.cli.generate_command import generate
from meshwright.cli.plan_command import plan
from meshwright.cli.proxy_command import proxy
from meshwright.cli.report_command import report
from meshwright.cli.serve_command import serve
from meshwright.cli.simulate_command import simulate
from meshwright.cli.stop_signals import StopSignals, ignore_stop_signals
from meshwright.cli.train_command import train
from meshwright.cli.verify_command import verify
from meshwright.cli.watch_command import watch
from meshwright.core.errors import MeshwrightError, RunStopped, unknown_name_error

app = typer.Typer(
    name="meshwright",
    help="Plan, run and explain the training of any PyTorch model on one machine or a cluster.\n\nStart with: meshwright train",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(describe_command.app, name="describe")
app.add_typer(bench_command.app, name="bench")
app.add_typer(checkpoints_command.app, name="checkpoints")
_VERBS: tuple[Callable[..., None], ...] = (plan, verify, train, generate, serve, proxy, simulate, report, watch, doctor)
for verb in _VERBS:
    app.command()(verb)


def main(arguments: list[str] | None = None) -> None:
    """Run one command line and exit: 0 done, 1 the run failed, 2 the request was wrong, 130 after SIGINT, 143 after SIGTERM."""
    atexit.register(gc.freeze)  # no garbage collection of all of torch's objects at exit
    stop = StopSignals()
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="meshwright", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _fail_stopped(stop.received or signal.SIGINT)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except RunStopped as error:
        _fail_stopped(stop.received or error.signal)
    except MeshwrightError as error:
        _show_traceback(error)
        fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "pydantic"):
            raise
        requirement = "'torch>=2.11,<2.15'" if error.name == "torch" else error.name
        fail(f"{error.name} is not installed: pip install {requirement}", 2)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if error.filename is None:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            fail(f"a file could not be written: {str(error.strerror).lower()}: free some space, or choose another folder", 1)
        fail(f"{error.filename}: {(error.strerror or 'cannot be used').lower()}: choose another path", 2)
    except Exception as error:
        # Typer's usage errors, by name: which module defines them depends on typer's version.
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "NoArgsIsHelpError" in kinds:
            sys.exit(0)  # the help is printed already
        if "UsageError" not in kinds:
            raise
        fail(_format_usage_error(error), 2)
    if stop.received is not None or code == 130:  # typer returns 130 for every KeyboardInterrupt
        _fail_stopped(stop.received or signal.SIGINT)
    sys.exit(code if isinstance(code, int) else 0)


def _fail_stopped(number: signal.Signals) -> NoReturn:
    ignore_stop_signals()  # the interpreter is about to exit
    fail("interrupted" if number == signal.SIGINT else f"stopped by {number.name}", 128 + (number if number == signal.SIGINT else signal.SIGTERM))


def _show_traceback(error: MeshwrightError) -> None:
    fault = getattr(error, "fault", None)
    if fault is not None and fault.traceback:
        head = "" if fault.kind in ("hang", "stopped") else f"meshwright: rank {fault.rank} failed:\n"
        print(f"{head}{fault.traceback.rstrip()}", file=sys.stderr)


def _format_usage_error(error: Any) -> str:
    """A usage error as one line, with the closest flag or command if one is misspelt."""
    text = " ".join(error.format_message().split())
    command = error.ctx.command if error.ctx is not None else None
    if type(error).__name__ == "NoSuchOption":
        known = [name for p in command.params for name in p.opts] if command is not None else []
        near = difflib.get_close_matches(error.option_name, known, n=1)
        return f"unknown flag {error.option_name}; " + (f"did you mean '{near[0]}'?" if near else "--help lists the flags")
    if text.startswith("No such command"):
        return str(unknown_name_error("verb", text.split("'")[1], getattr(command, "commands", {})))
    return (text[0].lower() + text[1:]).rstrip(".") + "; --help shows an example"


if __name__ == "__main__":
    main()
