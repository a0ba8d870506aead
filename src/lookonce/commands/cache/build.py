"""`lookonce cache plan|build|status`: build a cache. The work is done in `lookonce.cache.build`."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lookonce.commands.cache.group import cache
from lookonce.commands.options import IMAGES, JSON, RUN, SECONDS, SET, emit, notify, open_inputs, open_records, say
from lookonce.settings import MAX_COUNT
from lookonce.text import count, duration, json_text, shell


class WorkerNumber(click.ParamType[tuple[int, int]]):
    """I/N: the number of a worker and the number of all."""

    name = "I/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(value))
        number, total = map(int, match.groups()) if match else (1, 0)
        if not number <= total or total < 1:
            form = "I/N with 0 <= I <= N and N >= 1, for example 3/8"
            self.fail(f"{value!r} is not of the form {form}; N has at most six digits", param, ctx)
        return number, total


@cache.command("plan")
@RUN
@SET
@click.option(
    "--pilot",
    "num_pilot",
    default=8,
    show_default=True,
    type=click.IntRange(0, IMAGES),
    help="Number of images to encode and write, to estimate the time; 0 for no estimate of the time.",
)
@click.option("--write", is_flag=True, help="Write the plan to disk, so that workers need not hash the images.")
@JSON
def cache_plan(run_file: Path, assignments: tuple[str, ...], num_pilot: int, write: bool, as_json: bool) -> None:
    """Estimate what a build will cost.

    Prints images, tokens, bytes, shards and time. The time is measured: a few images are encoded and written, and
    removed again.

    \b
    Examples:
      lookonce cache plan data/sample/run.yaml
      lookonce cache plan run.yaml --pilot 0 --set cache.max_pixels=432000 --json
      lookonce cache plan run.yaml --write
    """
    inputs = open_inputs(run_file, assignments)
    report = inputs.estimate(num_pilot)
    if write:
        inputs.write_plan()
        build = shell("lookonce", "cache", "build", run_file, "--worker", "I/N")
        notify(f"the plan is in {inputs.cache_folder}; build its shards with: {build}")
    emit(asdict(report), report.text(), as_json)


@cache.command("build")
@RUN
@SET
@click.option(
    "--worker",
    type=WorkerNumber(),
    help="Number of this worker and of all workers, e.g. 3/8; decides with which shard it starts. Any number of "
    "workers may run, and may start or stop at any time. Trusts the plan, if there is one, instead of hashing all "
    "images.",
)
@click.option(
    "--no-wait", is_flag=True, help="Exit while other workers build the last shards, instead of waiting for them."
)
@click.option("--retry-quarantined", is_flag=True, help="Try again to encode images that could not be decoded.")
@click.option(
    "--max-quarantined",
    default=0,
    show_default=True,
    type=click.IntRange(0, MAX_COUNT),
    help="Exit 0 if at most this many images could not be encoded.",
)
@JSON
def cache_build(
    run_file: Path,
    assignments: tuple[str, ...],
    worker: tuple[int, int] | None,
    no_wait: bool,
    retry_quarantined: bool,
    max_quarantined: int,
    as_json: bool,
) -> None:
    """Encode the images that the cache lacks.

    If interrupted, run the same command again to resume. On SIGUSR1 it finishes the current shard and stops; on
    SIGTERM or SIGHUP it stops at once.

    Exits 1 if more than --max-quarantined images could not be encoded (all others are), and 75 if a signal stopped it.

    \b
    Examples:
      lookonce cache build data/sample/run.yaml
      lookonce cache build run.yaml --set cache.dir=/scratch/caches --max-quarantined 10
      lookonce cache build run.yaml --worker 3/8 --no-wait
    """
    inputs = open_inputs(run_file, assignments, trust_plan=worker is not None)
    report = inputs.build(worker, wait=not no_wait, retry_quarantined=retry_quarantined)
    if worker:
        notify("image keys were taken from the plan; a build without --worker hashes every file again")
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if len(report.quarantined) > max_quarantined else 0)


@cache.command("status")
@RUN
@SET
@click.option(
    "--watch",
    "interval_s",
    type=SECONDS,
    metavar="SECONDS",
    help="Print again every SECONDS, until complete.",
)
@JSON
def cache_status(run_file: Path, assignments: tuple[str, ...], interval_s: float | None, as_json: bool) -> None:
    """Show how many images of a run are encoded, and its workers.

    \b
    Examples:
      lookonce cache status data/sample/run.yaml
      lookonce cache status run.yaml --watch 10
      lookonce cache status run.yaml --json
    """
    content = open_records(run_file, assignments)
    report = content.status()
    if interval_s is None:
        return emit(asdict(report), report.text(), as_json)
    while True:
        _show_progress(report, as_json)
        if not report.num_missing:
            return None
        time.sleep(interval_s)
        report = content.status()


def _show_progress(report: Any, as_json: bool) -> None:
    """The whole report on a terminal, one line in a log."""
    if as_json:
        say(json_text(asdict(report)))
    elif sys.stdout.isatty():
        click.clear()
        say(report.text())
    else:
        parts = [
            f"{report.num_done:,} of {count(report.num_images, 'image')}",
            f"{report.num_quarantined:,} quarantined",
            f"{count(sum(worker.alive for worker in report.workers), 'worker')} alive",
        ]
        if report.eta_s is not None:
            parts += [f"{report.images_per_second:.1f} images/s", f"done in {duration(report.eta_s)}"]
        say(", ".join(parts))
