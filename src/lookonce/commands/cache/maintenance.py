"""`lookonce cache verify|repair|show|gc|stage`: maintain a cache. The work is done in `lookonce.cache.maintenance`."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lookonce.commands.cache.group import cache
from lookonce.commands.options import (
    IMAGES,
    JSON,
    PATH,
    PLACE,
    RUN,
    RUN_OR_CACHE,
    SEED,
    SET,
    cache_folder,
    emit,
    nothing_to_set,
    open_inputs,
    open_records,
    read_run,
    say,
)
from lookonce.errors import UsageError


@cache.command("verify")
@PLACE
@SET
@click.option(
    "--level",
    default="full",
    show_default=True,
    type=click.Choice(["quick", "full", "recompute"]),
    help="quick: receipts, headers and file sizes. full: every byte. recompute: encode some images again and compare.",
)
@click.option(
    "--images",
    default=16,
    show_default=True,
    type=click.IntRange(1, IMAGES),
    help="Number of images that recompute encodes.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed with which recompute draws images.")
@JSON
def cache_verify(place: Path, assignments: tuple[str, ...], level: str, images: int, seed: int, as_json: bool) -> None:
    """Find damage in a cache.

    `recompute` needs the run file, its images and the model. Exits 1 if there are problems, which `lookonce cache
    repair RUN.yaml` can repair, or if recompute could not compare any image.

    \b
    Examples:
      lookonce cache verify data/sample/run.yaml
      lookonce cache verify caches/1f2e3d4c5b6a7980 --level quick
      lookonce cache verify run.yaml --level recompute --images 32
    """
    report: Any
    if level == "recompute":
        report = _recompute(place, assignments, images, seed)
    else:
        _refuse_given("images", "seed")
        folder = cache_folder(place, assignments)
        from lookonce.cache.maintenance.verify import verify

        report = verify(folder, "quick" if level == "quick" else "full")
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if report.problems or (level == "recompute" and not report.num_compared) else 0)


def _refuse_given(*names: str) -> None:
    """Refuse options of `recompute` with other levels, where they would be ignored."""
    context = click.get_current_context()
    given = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if given:
        raise UsageError(f"--{given[0]} is for --level recompute; leave it out or choose that level")


def _recompute(place: Path, assignments: tuple[str, ...], num_images: int, seed: int) -> Any:
    if place.is_dir():
        raise UsageError(f"--level recompute needs the images and the model; name the run file instead of {place}")
    inputs = open_inputs(place, assignments, trust_plan=True)
    from lookonce.cache.maintenance.recompute import recompute

    files, tower = inputs.images.path_of, inputs.load_tower()
    return recompute(inputs.cache_folder, inputs.fingerprint, files, inputs.processor, tower, num_images, seed)


@cache.command("repair")
@RUN
@SET
@click.option(
    "--level",
    default="full",
    show_default=True,
    type=click.Choice(["quick", "full"]),
    help="How to look for damage, as in `verify`.",
)
@click.option("--drop", is_flag=True, help="Remove damaged shards even if the files of some of their images are gone.")
@JSON
def cache_repair(run_file: Path, assignments: tuple[str, ...], level: str, drop: bool, as_json: bool) -> None:
    """Find damage in a cache and repair it.

    Restores what can be restored and encodes the rest again. A damaged shard is removed only if all of its images are
    found in the files of the run or of the plan. Exits 1 if something stays damaged.

    \b
    Examples:
      lookonce cache repair data/sample/run.yaml
      lookonce cache repair run.yaml --level quick
      lookonce cache repair run.yaml --drop
    """
    inputs = open_inputs(run_file, assignments)
    from lookonce.cache.maintenance.repair import repair

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
        say(report.text())
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
    """Show everything that a cache knows about an image.

    IMAGE is a file, an image key, or the first digits of one.

    \b
    Examples:
      lookonce cache show data/sample/run.yaml data/sample/images/frame-0026.jpg
      lookonce cache show caches/1f2e3d4c5b6a7980 020e99a7
    """
    folder = cache_folder(place, assignments)
    from lookonce.cache.maintenance.show import show as show_image
    from lookonce.cache.store.reader import VisionCache

    report = show_image(VisionCache.open(folder), image)
    emit(asdict(report), report.text(), as_json)


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
    Several processes may stage into the same folder at once. Exits 1 if the source is damaged.

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
        content = open_records(place, assignments, RUN_OR_CACHE)
        folder, keys = content.cache_folder, content.images.path_of
    from lookonce.cache.maintenance.staging import stage

    report = stage(folder, target, keys, verify=verify)
    emit(asdict(report), report.text(), as_json)
    sys.exit(1 if report.problems else 0)
