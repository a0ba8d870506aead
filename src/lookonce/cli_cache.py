"""`lookonce cache`: make a cache, look after it, move it. What the commands do is in `cache`."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from lookonce.cache.make.stop import stopping_early
from lookonce.cli_options import (
    EXISTING,
    JSON,
    PLACE,
    RUN,
    SET,
    cache_folder,
    emit,
    nothing_to_set,
    open_inputs,
    say,
)
from lookonce.errors import UsageError
from lookonce.text import count, duration


class WorkerNumber(click.ParamType[tuple[int, int]]):
    """I/N: which of how many workers this is."""

    name = "I/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(\d+)/(\d+)", str(value))
        number, total = map(int, match.groups()) if match else (1, 0)
        if not number <= total or total < 1:
            self.fail(f"{value!r} is not of the form I/N with 0 <= I <= N and N >= 1, for example 3/8", param, ctx)
        return number, total


@click.group()
def cache() -> None:
    """Phase 1: make the cache of a run, look after it, move it."""


@cache.command("plan")
@RUN
@SET
@click.option(
    "--pilot",
    "num_pilot",
    default=8,
    show_default=True,
    type=click.IntRange(0),
    help="Images to encode and write for real, to tell the time; 0 for none.",
)
@click.option("--write", is_flag=True, help="Fix the plan on disk, so that workers need not hash the images.")
@JSON
def cache_plan(run_file: Path, assignments: tuple[str, ...], num_pilot: int, write: bool, as_json: bool) -> None:
    """Show what building would cost.

    Images, tokens, bytes, shards and time; a few images are encoded and written to measure.

    \b
    Examples:
      lookonce cache plan experiments/sample.yaml
      lookonce cache plan run.yaml --pilot 0 --set cache.max_pixels=432000 --json
      lookonce cache plan run.yaml --write
    """
    inputs = open_inputs(run_file, assignments)
    report = inputs.estimate(num_pilot)
    if write:
        inputs.write_plan()
        say(f"the plan is in {inputs.cache_folder}; make its shards with: lookonce cache build {run_file} --worker I/N")
    emit(asdict(report), report.text(), as_json)


@cache.command("build")
@RUN
@SET
@click.option(
    "--worker",
    type=WorkerNumber(),
    help="Which of how many workers this is, e.g. 3/8: where it begins. Any number may run at once, come and go. "
    "Takes image keys from the plan if one is written.",
)
@click.option("--no-wait", is_flag=True, help="End when others have the last shards in work, instead of waiting.")
@click.option("--retry-quarantined", is_flag=True, help="Try images again that could not be decoded.")
@click.option(
    "--max-quarantined",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Images without features that are not a failure.",
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
    """Encode what the cache lacks.

    Interrupted, it goes on where it stopped. SIGUSR1 finishes the shard in work and stops, SIGTERM stops at once.

    Exits 1 if more than --max-quarantined images could not be encoded (all others are done nevertheless), 75 if it was
    stopped by a signal: run it again.

    \b
    Examples:
      lookonce cache build experiments/sample.yaml
      lookonce cache build run.yaml --set cache.dir=/scratch/caches --max-quarantined 10
      lookonce cache build run.yaml --worker 3/8 --no-wait
    """
    with stopping_early():
        inputs = open_inputs(run_file, assignments, trust_plan=worker is not None)
        report = inputs.build(worker, wait=not no_wait, retry_quarantined=retry_quarantined)
    if worker:
        say("images are known by the plan; a build without --worker looks at every file again")
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if len(report.quarantined) > max_quarantined else 0)


@cache.command("status")
@RUN
@SET
@click.option("--watch", "interval_s", type=click.FloatRange(0.1), metavar="SECONDS", help="Again until complete.")
@JSON
def cache_status(run_file: Path, assignments: tuple[str, ...], interval_s: float | None, as_json: bool) -> None:
    """Show how much of a run's cache is there, and who is at work.

    \b
    Examples:
      lookonce cache status experiments/sample.yaml
      lookonce cache status run.yaml --watch 10
      lookonce cache status run.yaml --json
    """
    inputs = open_inputs(run_file, assignments, trust_plan=True)
    report = inputs.status()
    if interval_s is None:
        return emit(asdict(report), report.text(), as_json)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            _show_progress(report, as_json)
            if not report.num_missing:
                return None
            time.sleep(interval_s)
            report = inputs.status()


def _show_progress(report: Any, as_json: bool) -> None:
    """All of it on a screen, a line in a log."""
    if as_json:
        click.echo(json.dumps(asdict(report), default=str))
    elif sys.stdout.isatty():
        click.clear()
        click.echo(report.text())
    else:
        parts = [
            f"{report.num_done:,} of {count(report.num_images, 'image')}",
            f"{report.num_quarantined:,} quarantined",
            f"{count(sum(worker.alive for worker in report.workers), 'worker')} alive",
        ]
        if report.eta_s is not None:
            parts += [f"{report.images_per_second:.1f} images/s", f"done in {duration(report.eta_s)}"]
        click.echo(", ".join(parts))


@cache.command("verify")
@PLACE
@SET
@click.option(
    "--level",
    default="full",
    show_default=True,
    type=click.Choice(["quick", "full", "recompute"]),
    help="Receipts, headers and sizes; or every byte; or encode some images again and compare.",
)
@click.option("--images", default=16, show_default=True, type=click.IntRange(1), help="How many to encode again.")
@click.option("--seed", default=0, show_default=True, help="Which images are drawn.")
@JSON
def cache_verify(place: Path, assignments: tuple[str, ...], level: str, images: int, seed: int, as_json: bool) -> None:
    """Find whatever in a cache is not as it was written.

    `recompute` needs the run file, its images and the model. Exits 1 if there are problems; `lookonce cache repair
    RUN.yaml` mends them.

    \b
    Examples:
      lookonce cache verify experiments/sample.yaml
      lookonce cache verify caches/1f2e3d4c5b6a7980 --level quick
      lookonce cache verify run.yaml --level recompute --images 32
    """
    report: Any
    if level == "recompute":
        report = _recompute(place, assignments, images, seed)
    else:
        folder = cache_folder(place, assignments)
        from lookonce.cache.care.verify import verify

        report = verify(folder, "quick" if level == "quick" else "full")
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if report.problems or (level == "recompute" and not report.num_compared) else 0)


def _recompute(place: Path, assignments: tuple[str, ...], num_images: int, seed: int) -> Any:
    if place.is_dir():
        raise UsageError(f"--level recompute needs the images and the model; name the run file instead of {place}")
    inputs = open_inputs(place, assignments, trust_plan=True)
    from lookonce.cache.care.recompute import recompute

    files, tower = inputs.images.path_of, inputs.load_tower()
    return recompute(inputs.cache_folder, inputs.fingerprint, files, inputs.processor, tower, num_images, seed)


@cache.command("repair")
@RUN
@SET
@click.option(
    "--level", default="full", show_default=True, type=click.Choice(["quick", "full"]), help="How to look for damage."
)
@click.option("--drop", is_flag=True, help="Remove damaged shards even if some of their images can not be had again.")
@JSON
def cache_repair(run_file: Path, assignments: tuple[str, ...], level: str, drop: bool, as_json: bool) -> None:
    """Find damage and mend it.

    What can not be put together from what is there is encoded again. Removes nothing before all of its images have
    been found again, in the files of the run or of the plan. Exits 1 if something stays damaged.

    \b
    Examples:
      lookonce cache repair experiments/sample.yaml
      lookonce cache repair run.yaml --level quick
      lookonce cache repair run.yaml --drop
    """
    inputs = open_inputs(run_file, assignments)
    from lookonce.cache.care.repair import repair

    report, images = repair(
        inputs.cache_folder,
        inputs.fingerprint,
        inputs.images,
        level="quick" if level == "quick" else "full",
        drop=drop,
        provenance={"model": inputs.run.model.path, "revision": inputs.run.model.revision},
        expiry_s=inputs.run.cache.claim_s,
    )
    if not as_json:
        click.echo(report.text())
    built = replace(inputs, images=images).build() if images.path_of else None
    if as_json or built:
        value = {"repair": asdict(report), "build": asdict(built) if built else None}
        emit(value, built.text() if built else "", as_json)
    sys.exit(1 if report.left else 0)


@cache.command("show")
@PLACE
@click.argument("image", metavar="IMAGE")
@SET
@JSON
def cache_show(place: Path, image: str, assignments: tuple[str, ...], as_json: bool) -> None:
    """Show all that a cache knows of an image.

    IMAGE is a file, an image key, or the first digits of one.

    \b
    Examples:
      lookonce cache show experiments/sample.yaml data/sample/images/frame-0026.jpg
      lookonce cache show caches/1f2e3d4c5b6a7980 020e99a7
    """
    folder = cache_folder(place, assignments)
    from lookonce.cache.care.show import show as show_image
    from lookonce.cache.store.read import VisionCache

    report = show_image(VisionCache.open(folder), image)
    emit(asdict(report), report.text(), as_json)


@cache.command("gc")
@click.argument("place", metavar="RUN.yaml|ROOT|CACHE", type=EXISTING)
@SET
@click.option("--delete", is_flag=True, help="Delete leftovers of killed processes, or with --cache a whole cache.")
@click.option("--cache", "cache_id", metavar="ID", help="The cache to delete: at least 8 digits of its name.")
@JSON
def cache_gc(place: Path, assignments: tuple[str, ...], delete: bool, cache_id: str | None, as_json: bool) -> None:
    """List caches, who uses them, and what may go.

    Deletes nothing without --delete; never what is in use, and never a file that lookonce did not write.

    \b
    Examples:
      lookonce cache gc experiments/sample.yaml
      lookonce cache gc /scratch/caches --delete
      lookonce cache gc /scratch/caches --delete --cache 1f2e3d4c
    """
    root, expiry = place, {}
    if not place.is_dir():
        from lookonce.train.run_file import read_run_file

        run = read_run_file(place, assignments)
        root, expiry = run.cache.dir, {"expiry_s": run.cache.claim_s}
    elif assignments:
        raise nothing_to_set(place)
    from lookonce.cache.care.collect import collect

    report = collect(root, delete=delete, cache_id=cache_id, **expiry)
    emit(asdict(report), report.text(), as_json)


@cache.command("stage")
@PLACE
@click.argument("target", metavar="DIR", type=EXISTING)
@SET
@click.option("--verify", is_flag=True, help="Read again what is staged already.")
@JSON
def cache_stage(place: Path, target: Path, assignments: tuple[str, ...], verify: bool, as_json: bool) -> None:
    """Copy a cache to a disk nearer by, all bytes checked.

    With a run file only the shards that it reads. Goes on where it stopped, and several may stage to the same place at
    once. Exits 1 if the source is damaged.

    \b
    Examples:
      lookonce cache stage experiments/sample.yaml /tmp/lookonce
      lookonce cache stage run.yaml "$SLURM_TMPDIR"
      lookonce cache stage /shared/caches/1f2e3d4c5b6a7980 /local --verify
    """
    if target == Path():
        raise UsageError("DIR is empty; is the variable in it set? Name a folder, for example /tmp/lookonce")
    keys = None
    if place.is_dir():
        folder = cache_folder(place, assignments)
    else:
        inputs = open_inputs(place, assignments, trust_plan=True)
        folder, keys = inputs.cache_folder, inputs.images.path_of
    from lookonce.cache.care.stage import stage

    report = stage(folder, target, keys, verify=verify)
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if report.problems else 0)
