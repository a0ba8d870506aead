"""`lookonce data tar`: put images into tar shards. What the command does is in `datasets.tar_images`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.data.group import IMAGE_ROOT, RECORDS, data
from lookonce.commands.options import JSON, PATH, emit


@data.command("tar")
@RECORDS
@click.argument("folder", metavar="DIR", type=PATH)
@IMAGE_ROOT
@click.option(
    "--tar-mb",
    default=256,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Megabytes of images per tar shard.",
)
@click.option("--skip-missing", is_flag=True, help="Leave out records whose images are missing or broken.")
@click.option("--questions", "with_questions", is_flag=True, help="Add a JSON file with its questions to each image.")
@JSON
def tar(
    records: tuple[Path, ...],
    folder: Path,
    image_root: Path | None,
    tar_mb: int,
    skip_missing: bool,
    with_questions: bool,
    as_json: bool,
) -> None:
    """Write images into WebDataset tar shards, and records that point into them.

    Each distinct image is written once, its bytes unchanged, in the order in which a cache reads them; all records
    files share the tar shards. The records in DIR have the names of those given. A cache built from them is the same.

    If interrupted, run the same command again to resume.

    \b
    Examples:
      lookonce data tar data/sample/train.jsonl data/sample/val.jsonl data/sample/tars
      lookonce data tar train.jsonl /scratch/tars --image-root images --tar-mb 500 --skip-missing
    """
    from lookonce.datasets.tar_images import write_tar_shards

    report = write_tar_shards(
        records,
        folder,
        image_root,
        tar_bytes=tar_mb * 1_000_000,
        skip_missing=skip_missing,
        with_questions=with_questions,
    )
    emit(report.to_json(), report.text(), as_json)
