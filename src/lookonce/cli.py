"""The command line: the group of all commands, and how errors become messages and exit codes.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by a signal, 130
interrupted by Ctrl-C. Commands and what they need are imported when they run, so that help needs no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from lookonce import environment
from lookonce.commands.options import with_run_file
from lookonce.errors import LookonceError, Stopped, UsageError, explain_system_error, has_lost_rank
from lookonce.signals import exit_on_signal
from lookonce.text import printable
from lookonce.version import __version__

MODULES = {
    "adapter": ("adapter",),
    "cache": ("cache",),
    "compare": ("compare", "report"),
    "data": ("data",),
    "evaluate": ("ask", "export", "predict"),
    "prepare": ("check", "fetch", "init", "sample"),
    "study": ("study",),
    "train": ("bench", "selftest", "status", "train"),
}
COMMANDS = {name: (module, name) for module, names in MODULES.items() for name in names}
COMMANDS["eval"] = ("evaluate", "evaluate")
"""The module and the name of each command in it."""
DOCUMENTATION = Path(sys.prefix, "share", "lookonce", "docs", "index.md")
"""Where a wheel puts the pages; in a clone they are in docs/."""
AGAIN = "run the same command again"
WITH_OPTION = "run the same command with --resume to continue"


class Commands(click.Group):
    """The group of all commands. It turns errors into messages and exit codes; tracebacks are shown with --debug.

    Commands are imported lazily (https://click.palletsprojects.com/en/stable/complex/#lazily-loading-subcommands).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"lookonce.commands.{module}"), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with exit_on_signal(_advice):
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise  # handled by click
        except click.Abort as error:
            if not isinstance(error.__context__, KeyboardInterrupt):
                raise  # the input of a prompt has ended
            click.echo(err=True)
            _say(str(error.__context__))
            ctx.exit(130)
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            code, message = _explain(_signal_behind(error))
            _say(f"{_rank()}{with_run_file(message)}")
            ctx.exit(code)


def _say(message: str) -> None:
    """Print the message of an error; a terminal that is closed gets none, and the exit code stays."""
    with contextlib.suppress(OSError):
        click.echo(f"{click.style('Error:', fg='red')} {printable(message)}", err=True)


def _advice() -> str:
    """What to do after the command that runs now, or has just failed, was stopped."""
    context = click.get_current_context(silent=True)
    names = (context.info_name, context.invoked_subcommand) if context else ()
    return WITH_OPTION if "train" in names else AGAIN


def _rank() -> str:
    """The number of this rank, unless it is the first or the only one."""
    try:
        return f"rank {environment.rank()}: " if environment.num_ranks() > 1 and environment.rank() else ""
    except UsageError:
        return ""  # the variable is not a number


def _signal_behind(error: BaseException) -> BaseException:
    """The stop by a signal that an error is due to, or the error; Python 3.11 wraps one that comes in __set_name__."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, KeyboardInterrupt | Stopped):
        cause = cause.__cause__
    return cause or error


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit code and message of an error that stopped a command."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, LookonceError | Stopped):
        return error.exit_code, "; ".join([str(error), *notes])
    if isinstance(error, KeyboardInterrupt):
        return 130, "; ".join([str(error) or f"interrupted; {AGAIN}", *notes])
    if message := explain_system_error(error):
        return 1, message
    if has_lost_rank(error):
        lost = "another process of this command has ended or does not answer"
        return 1, f"{lost}; its message or the launcher's says why; then {_advice()}"
    return 1, f"unexpected {type(error).__name__}: {error} (`lookonce --debug ...` shows where)"


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=f"\b\nDocumentation: {DOCUMENTATION if DOCUMENTATION.exists() else 'docs/index.md'}",
)
@click.version_option(__version__, message="%(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks and the libraries' warnings.")
def main(debug: bool) -> None:
    """Look at each image once, train on it many times.

    Phase 1, `cache`, runs the frozen vision tower once over every distinct image. Phase 2, `train`, trains a LoRA
    adapter of the language model from the cached features.

    \b
    Examples:
      lookonce sample data/sample
      lookonce cache build data/sample/run.yaml
      lookonce train data/sample/run.yaml
      lookonce eval runs/sample --split test
    """
    if not debug:
        _hush_libraries()


def _hush_libraries() -> None:
    """Turn off the libraries' progress bars and deprecation warnings, which would bury our own messages."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which PEFT imports, and which misses optional kernels
    warnings.filterwarnings("ignore", module="PIL")  # on palettes and on large images, both of which we handle


if __name__ == "__main__":
    main()
