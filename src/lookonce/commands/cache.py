"""The commands `lookonce cache ...`: build a cache and maintain it. The work is done in `cache`."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookonce.commands.options import (
    IMAGES,
    JSON,
    PATH,
    PLACE,
    RUN,
    RUN_OR_CACHE,
    SET,
    cache_folder,
    check_launch,
    emit,
    nothing_to_set,
    notify,
    read_existing,
    read_run,
    say,
)
from lookonce.environment import num_ranks
from lookonce.errors import UsageError
from lookonce.settings import MAX_COUNT
from lookonce.text import shell

if TYPE_CHECKING:
    from lookonce.cache.maintenance.verify import Level
    from lookonce.run.open import OpenRun


@click.group()
def cache() -> None:
    """Phase 1: build the cache of a run, and verify, repair or copy it.

    \b
    Examples:
      lookonce cache plan data/sample/run.yaml
      lookonce cache build data/sample/run.yaml
      lookonce cache verify data/sample/run.yaml
    """


LEVEL = click.option(
    "--level",
    default="full",
    show_default=True,
    type=click.Choice(["quick", "full"]),
    help="quick: receipts, headers and file sizes. full: every byte.",
)


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
    help="Number of images to encode as a trial, which estimates the time; 0 skips the estimate.",
)
@click.option("--write", is_flag=True, help="Write the plan to disk, so that workers need not hash the images.")
@JSON
def cache_plan(run_file: Path, assignments: tuple[str, ...], num_pilot: int, write: bool, as_json: bool) -> None:
    """Estimate what a build will cost.

    Prints images, tokens, bytes, shards and time. To measure the time, it encodes and writes a few images, and removes
    them again.

    \b
    Examples:
      lookonce cache plan data/sample/run.yaml
      lookonce cache plan run.yaml --pilot 0 --set cache.max_pixels=432000 --json
      lookonce cache plan run.yaml --write
    """
    run = read_existing(run_file, assignments)
    from lookonce.run.open import TO_BUILD, open_run

    opened = open_run(run, TO_BUILD)
    report = opened.estimate(num_pilot)
    if write:
        opened.write_plan()
        build = shell("lookonce", "cache", "build", run_file, "--worker", "I/N")
        notify(f"the plan is in {opened.cache_folder}; build its shards with: {build}")
    emit(asdict(report), report.text(), as_json)


@cache.command("build")
@RUN
@SET
@click.option(
    "--worker",
    type=WorkerNumber(),
    help="Number of this worker and of all workers, e.g. 3/8, which decides with which shard it starts. Any number of "
    "workers may run; each may start or stop at any time. If a plan is on disk, it is trusted, and images are not "
    "hashed.",
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

    If interrupted, run the same command again to resume. On SIGUSR1 it finishes the current shard (a file with
    the features of some images) and stops; on SIGTERM or SIGHUP it stops at once.

    Under torchrun each process is a worker on a GPU of its own: the first one hashes the images, and reports for all.

    Exits 1 if more than --max-quarantined images could not be encoded (all others are), and 75 if a signal stopped it.

    \b
    Examples:
      lookonce cache build data/sample/run.yaml
      torchrun --nproc-per-node 4 -m lookonce cache build run.yaml
      lookonce cache build run.yaml --set cache.dir=/scratch/caches --max-quarantined 10
      lookonce cache build run.yaml --worker 3/8 --no-wait
    """
    check_launch()
    run = read_existing(run_file, assignments)
    if worker and num_ranks() > 1:
        raise UsageError(f"{num_ranks()} processes of torchrun are workers by themselves; leave out --worker")
    from lookonce.run.open import TO_BUILD, TO_BUILD_BY_PLAN, open_run

    opened: OpenRun | None = None
    if num_ranks() > 1:
        from lookonce.train.loop.distributed import Ranks

        def plan() -> None:
            nonlocal opened
            opened = open_run(run, TO_BUILD)
            opened.write_plan()

        ranks = Ranks.join()
        ranks.first_decides(plan)
        ranks.disband()
        if not ranks.is_first:
            open_run(run, TO_BUILD_BY_PLAN).build((ranks.rank, ranks.num_ranks), wait=False)
            return
    opened = opened or open_run(run, TO_BUILD_BY_PLAN if worker else TO_BUILD)
    report = opened.build(worker, wait=not no_wait, retry_quarantined=retry_quarantined)
    if worker:
        notify("image keys (hashes of files) were taken from the plan; without --worker, every file is hashed")
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if len(report.quarantined) > max_quarantined else 0)


@cache.command("verify")
@PLACE
@SET
@LEVEL
@JSON
def cache_verify(place: Path, assignments: tuple[str, ...], level: Level, as_json: bool) -> None:
    """Find damage in a cache.

    Exits 1 if there are problems; `lookonce cache repair RUN.yaml` repairs them.

    \b
    Examples:
      lookonce cache verify data/sample/run.yaml
      lookonce cache verify caches/1f2e3d4c5b6a7980 --level quick
    """
    folder = cache_folder(place, assignments)
    from lookonce.cache.maintenance.verify import verify

    report = verify(folder, level)
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if report.problems else 0)


@cache.command("repair")
@RUN
@SET
@LEVEL
@click.option("--drop", is_flag=True, help="Remove damaged shards even if the files of some of their images are gone.")
@JSON
def cache_repair(run_file: Path, assignments: tuple[str, ...], level: Level, drop: bool, as_json: bool) -> None:
    """Find damage in a cache and repair it.

    Removes what is damaged, then encodes what the cache lacks, as `lookonce cache build` does. A shard is one file of
    the cache; a damaged one is removed only if the files of all its images are found, by the run or the plan. Exits 1
    if damage remains.

    \b
    Examples:
      lookonce cache repair data/sample/run.yaml
      lookonce cache repair run.yaml --level quick
      lookonce cache repair run.yaml --drop
    """
    run = read_existing(run_file, assignments)
    from lookonce.cache.maintenance.verify import repair
    from lookonce.run.open import TO_BUILD, open_run

    opened = open_run(run, TO_BUILD)
    report, images = repair(
        opened.cache_folder,
        opened.fingerprint,
        opened.images,
        level=level,
        drop=drop,
        provenance={"model": run.model.path, "revision": run.model.revision},
        expiry_s=run.cache.claim_s,
    )
    if not as_json:
        say(report.text())
    built = opened.build(images=images) if report.removed or report.rewritten else None
    if as_json or built:
        value = {"repair": asdict(report), "build": asdict(built) if built else None}
        emit(value, built.text() if built else "", as_json)
    sys.exit(1 if report.left else 0)


@cache.command("show")
@PLACE
@click.argument("image", metavar="IMAGE")
@SET
@click.option(
    "--sheet",
    type=PATH,
    metavar="FILE",
    help="Draw the variants that cache.augment of RUN.yaml makes of IMAGE, a file, side by side into FILE (PNG or "
    "JPEG). No cache is needed.",
)
@JSON
def cache_show(place: Path, image: str, assignments: tuple[str, ...], sheet: Path | None, as_json: bool) -> None:
    """Show everything that a cache has about an image, or its variants.

    IMAGE is a file, an image key, or the first digits of one.

    \b
    Examples:
      lookonce cache show data/sample/run.yaml data/sample/images/frame-0026.jpg
      lookonce cache show caches/1f2e3d4c5b6a7980 020e99a7
      lookonce cache show run.yaml a.jpg --set cache.augment.rotate=10 --sheet variants.png
    """
    if sheet:
        write_sheet(place, assignments, Path(image), sheet, as_json)
        return
    folder = cache_folder(place, assignments)
    from lookonce.cache.maintenance.show import show as show_image
    from lookonce.cache.store.reader import VisionCache

    report = show_image(VisionCache.open(folder), image)
    emit(asdict(report), report.text(), as_json)


def write_sheet(run_file: Path, assignments: tuple[str, ...], image: Path, sheet: Path, as_json: bool) -> None:
    """Draw the variants of an image by the recipe of a run file."""
    augment = read_run(run_file, assignments, "a run file (YAML)").cache.augment
    if augment is None:
        raise UsageError(f"{run_file} has no cache.augment; add it, for example with: --set cache.augment.rotate=10")
    from PIL import Image

    from lookonce.cache.maintenance.show import contact_sheet
    from lookonce.files import atomic_write

    if sheet.exists() or sheet.is_symlink():
        raise UsageError(f"--sheet {sheet} exists; name another file, or remove it")
    drawn = contact_sheet(image, augment)
    if (format := Image.registered_extensions().get(sheet.suffix.lower())) not in Image.SAVE:
        raise UsageError(f"--sheet {sheet}: the suffix names no format of images; use .png or .jpg")
    with atomic_write(sheet) as temporary:
        drawn.save(temporary, format)
    text = f"{sheet}: {augment.variants} variants of {image} by {augment.recipe}; the first is the image itself"
    emit({"sheet": str(sheet), "variants": augment.variants, "recipe": augment.recipe}, text, as_json)


@cache.command("gc")
@click.argument("place", metavar="RUN.yaml|ROOT|CACHE", type=PATH)
@SET
@click.option("--delete", is_flag=True, help="Delete leftovers of killed processes or, with --cache, a whole cache.")
@click.option("--cache", "cache_id", metavar="ID", help="Cache to delete: at least the first 8 digits of its name.")
@JSON
def cache_gc(place: Path, assignments: tuple[str, ...], delete: bool, cache_id: str | None, as_json: bool) -> None:
    """List caches and leftovers; delete leftovers or a cache.

    Lists caches, the runs that use them, and what killed processes left. Deletes nothing without --delete, and never
    what is in use or a file that lookonce did not write.

    \b
    Examples:
      lookonce cache gc data/sample/run.yaml
      lookonce cache gc /scratch/caches --delete
      lookonce cache gc /scratch/caches --delete --cache 1f2e3d4c
    """
    root, expiry = place, {}
    if not place.is_dir():
        run = read_run(place, assignments, "a run file (YAML), the folder of a cache, or of several")
        root, expiry = run.cache.dir, {"expiry_s": run.cache.claim_s}
    elif assignments:
        raise nothing_to_set(place)
    from lookonce.cache.maintenance.gc import collect_garbage

    report = collect_garbage(root, delete=delete, cache_id=cache_id, **expiry)
    emit(asdict(report), report.text(), as_json)


@cache.command("stage")
@PLACE
@click.argument("target", metavar="DIR", type=PATH)
@SET
@click.option("--verify", is_flag=True, help="Also check shards that are already staged.")
@JSON
def cache_stage(place: Path, target: Path, assignments: tuple[str, ...], verify: bool, as_json: bool) -> None:
    """Copy a cache to a nearer disk and check every byte.

    With a run file, copies only the shards that it reads. If interrupted, run the same command again to resume.
    While one process stages into a folder, others are refused. Exits 1 if the source is damaged.

    \b
    Examples:
      lookonce cache stage data/sample/run.yaml /tmp/lookonce
      lookonce cache stage run.yaml "$SLURM_TMPDIR"
      lookonce cache stage /shared/caches/1f2e3d4c5b6a7980 /local --verify
    """
    if target == Path():
        raise UsageError("DIR is empty; is the variable in it set? Name a folder, for example /tmp/lookonce")
    keys = None
    if place.is_dir():
        folder = cache_folder(place, assignments)
    else:
        run = read_run(place, assignments, RUN_OR_CACHE)
        from lookonce.run.open import TO_LOOK, open_run

        opened = open_run(run, TO_LOOK)
        folder, keys = opened.cache_folder, opened.images.path_of
    from lookonce.cache.maintenance.staging import stage

    report = stage(folder, target, keys, verify=verify)
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if report.problems else 0)
