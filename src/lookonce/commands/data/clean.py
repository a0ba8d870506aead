"""`lookonce data clean`: leave out records that a training cannot use. The work is done in `datasets.clean`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.data.group import COERCE, data
from lookonce.commands.options import JSON, PATH, emit


@data.command("clean")
@click.argument("source", metavar="RECORDS", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths are relative to and may not leave, in both files; by default the folder of RECORDS.",
)
@COERCE
@click.option(
    "--headers-only", is_flag=True, help="Decode only the headers of images: faster, and misses truncated ones."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@JSON
def clean(
    source: Path,
    target: Path,
    image_root: Path | None,
    coerce_answers: bool,
    headers_only: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the records without malformed ones and without those of broken images.

    Leaves out what `lookonce data audit` reports as malformed records, and the records of images that are missing or
    cannot be decoded. Lines of JSONL that are kept have the same bytes; other files are written in the canonical
    format, CSV in the flat one. If nothing is left, the command fails and OUT is not written.

    \b
    --json has these keys:
      source, target, num_records, num_kept, num_malformed, num_with_unusable_images, num_coerced,
      left_out_columns
      malformed    by kind: kind, reason (of the first), places
      images       path, reason, places

    \b
    Examples:
      lookonce data clean train.jsonl train-clean.jsonl
      lookonce data clean train.jsonl train-clean.jsonl --image-root images --json
    """
    from lookonce.datasets.clean import clean as clean_records

    report = clean_records(
        source,
        target,
        image_root,
        decode=not headers_only,
        coerce_answers=coerce_answers,
        overwrite=overwrite,
    )
    emit(report.to_json(), report.text(), as_json)
