"""What the commands have in common: arguments, options, and how they print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookonce.errors import UsageError

if TYPE_CHECKING:
    from lookonce.run.config import RunFile

PATH = click.Path(path_type=Path)
RUN_FILE = "a run file (YAML), which says where images and model are; for example experiments/sample.yaml"
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
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout instead of text.")


def read_run(path: Path, assignments: tuple[str, ...], allowed: str = RUN_FILE) -> RunFile:
    """A run file where `allowed` may stand.

    Raises:
        UsageError: what is there is none of that, or a run file with mistakes.
    """
    if not path.exists():
        raise UsageError(f"there is nothing at {path}; name {allowed}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name {allowed}")
    from lookonce.run.config import read_run_file

    try:
        return read_run_file(path, assignments)
    except UsageError as error:
        if path.suffix in (".yaml", ".yml"):
            raise
        raise UsageError(f"{error}\n{path} is no folder, so it was read as a run file; name {allowed}") from None


def open_inputs(
    run_file: Path, assignments: tuple[str, ...], allowed: str = RUN_FILE, *, trust_plan: bool = False
) -> Any:
    """The inputs of a run, opened and checked."""
    run = read_run(run_file, assignments, allowed)  # before the slow imports, so that a typo is told at once
    from lookonce.run.inputs import Inputs

    return Inputs.open(run, trust_plan=trust_plan)


def find_content(run_file: Path, assignments: tuple[str, ...], allowed: str = RUN_FILE) -> Any:
    """A run's records and images, for who only looks: images are known by the plan, and the model by its fingerprint.

    It is opened only while that is not noted.
    """
    run = read_run(run_file, assignments, allowed)
    from lookonce.run.records import find_content as find

    return find(run)


def cache_folder(place: Path, assignments: tuple[str, ...]) -> Path:
    """The cache folder itself, or that of a run file; it need not exist. Hashes no image."""
    if place.is_dir():
        if assignments:
            raise nothing_to_set(place)
        return place
    run = read_run(place, assignments, RUN_OR_CACHE)
    from lookonce.run.model_ref import find_fingerprint

    return run.cache.dir / find_fingerprint(run).folder_name


def nothing_to_set(place: Path) -> UsageError:
    """The error for --set where no run file is."""
    return UsageError(f"--set replaces keys of a run file, and {place} is a folder; leave it out or name a run file")


def emit(value: Any, text: str, as_json: bool) -> None:
    """Print a result to stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str) if as_json else text)


def notify(note: str) -> None:
    """Print a note to stderr."""
    click.echo(note, err=True)


def is_first() -> bool:
    """Whether this process is the first of those that torchrun started, or alone."""
    return os.environ.get("RANK", "0") == "0"


def is_one_of_several() -> bool:
    """Whether torchrun has started other processes too."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
