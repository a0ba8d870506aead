"""Arguments and options that commands share, reading of run files, and printing."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookonce.environment import launch_note, num_ranks
from lookonce.errors import UsageError
from lookonce.settings import MAX_SEED
from lookonce.text import json_text, printable, shell

if TYPE_CHECKING:
    from lookonce.run.config import RunFile

SEED = click.IntRange(0, MAX_SEED)
IMAGES = 1_000_000
"""The most images of a sample or a measurement."""


class Decimal(click.FloatRange):
    """A number in a range; "nan" is in none, though it is not below or above any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return self.fail(f"{value} is not a number", param, ctx) if math.isnan(number) else number


GIGABYTES = Decimal(0, 10_000, min_open=True)
PATH = click.Path(path_type=Path, readable=False)  # what may not be read is reported where it is read, with advice
RUN_FILE = "a run file (YAML), which names model and records, such as data/sample/run.yaml of `lookonce sample`"
RUN_OR_CACHE = "a run file (YAML) or the folder of a cache"
RUN = click.argument("run_file", metavar="RUN.yaml", type=PATH)
PLACE = click.argument("place", metavar="RUN.yaml|CACHE", type=PATH)
SET = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a key of the run file, e.g. train.epochs=5.",
)
VERIFY_IMAGES = click.option(
    "--verify-images", is_flag=True, help="Read all image files and compare them with the cache, which takes a while."
)
SPLIT = click.option(
    "--split",
    type=click.Choice(["train", "val", "test", "held_out"]),
    help="Split of the records; by default `eval.split` of the run file.",
)
META = "lookonce.run_file"
"""The key of click's context under which a command notes its run file, with the keys that it replaces."""
PLACEHOLDER = re.compile(r"(?<= )RUN\.yaml\b")
PDF = click.option("--pdf", "has_pdf", is_flag=True, help="Write the plots as PDF too, beside the page.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout instead of text.")


def read_run(path: Path, assignments: tuple[str, ...], allowed: str = RUN_FILE) -> RunFile:
    """Read a run file; `allowed` names in messages what the argument may be.

    Raises:
        UsageError: the path is something else, or the run file has mistakes.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist; name {allowed}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name {allowed}")
    from lookonce.run.config import read_run_file

    remember_run_file(path, assignments)
    try:
        return read_run_file(path, assignments)
    except UsageError as error:
        if path.suffix in (".yaml", ".yml"):
            raise
        raise UsageError(f"{error}\n{path} is not a folder, so it was read as a run file; name {allowed}") from None


def read_existing(path: Path, assignments: tuple[str, ...]) -> RunFile:
    """Read a run file and check that its records and model exist, before slow imports: mistakes are reported at once.

    Raises:
        LookonceError: the run file has mistakes, or names files that do not exist.
    """
    run = read_run(path, assignments)
    from lookonce.run.records import check_paths

    check_paths(run)
    return run


def remember_run_file(path: Path, assignments: tuple[str, ...] = ()) -> None:
    """Note the run file of this command, if the path is one, and the keys that it replaces, for `with_run_file`."""
    if path.is_file() and (context := click.get_current_context(silent=True)):
        context.meta[META] = shell(path, *(word for assignment in assignments for word in ("--set", assignment)))


def with_run_file(message: str) -> str:
    """Name the run file of this command, with its --set, in advice such as "lookonce cache build RUN.yaml"."""
    context = click.get_current_context(silent=True)
    return PLACEHOLDER.sub(lambda match: context.meta.get(META, match[0]) if context else match[0], message)


def cache_folder(path: Path, assignments: tuple[str, ...]) -> Path:
    """The cache folder itself, or that of a run file, which need not exist. Hashes no image."""
    if path.is_dir():
        if assignments:
            raise nothing_to_set(path)
        return path
    run = read_run(path, assignments, RUN_OR_CACHE)
    from lookonce.run.open import Needs, open_run

    return open_run(run, Needs("lookonce cache", model="fingerprint")).cache_folder


def nothing_to_set(path: Path) -> UsageError:
    return UsageError(f"--set replaces keys of a run file, and {path} is a folder; leave it out or name a run file")


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Send to stderr what libraries print within the block, such as transformers under WANDB_MODE=offline."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def emit(value: Any, text: str, as_json: bool) -> None:
    """Print a result to stdout, as JSON or as text whose advice names the run file of this command."""
    say(json_text(value, indent=2) if as_json else with_run_file(text))


def check_launch() -> None:
    """Check what is left of torchrun in the environment, and print a note if there is anything to know.

    Raises:
        UsageError: libraries would take this process for one of several that nothing has started.
    """
    if note := launch_note():
        notify(note)


def check_alone(command: str) -> None:
    """The same, for a command that torchrun must not start several times.

    Raises:
        UsageError: this is one of several processes.
    """
    if (number := num_ranks()) > 1:
        raise UsageError(
            f"{command} runs in one process; start it without torchrun, or, if nothing has set WORLD_SIZE={number} in "
            "the environment on purpose: unset WORLD_SIZE"
        )
    check_launch()


def notify(note: str) -> None:
    say(with_run_file(note), err=True)


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text. All commands print here, so that no name or text from data can control a terminal."""
    click.echo(printable(text), err=err, nl=nl)
