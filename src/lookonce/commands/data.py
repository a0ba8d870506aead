"""`lookonce data prepare|tar`: records and images. What the commands do is in `datasets`.

`convert` is in commands.records, `audit` in commands.audit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lookonce.commands.options import JSON, PATH, emit, notify

RECORDS = click.argument("records", metavar="RECORDS...", type=PATH, nargs=-1, required=True)
IMAGE_ROOT = click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths are relative to; by default the folder of each records file.",
)


@click.group()
def data() -> None:
    """Prepare, convert and check records, and put their images into tar shards.

    \b
    Examples:
      lookonce data prepare kvasir-vqa data/kvasir
      lookonce data audit data/kvasir/train.jsonl data/kvasir/val.jsonl
      lookonce data convert llava.json train.jsonl
    """


@data.command("prepare")
@click.argument("name", metavar="NAME|FILE.yaml")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--source",
    metavar="PATH|OWNER/NAME",
    help="Local folder or file (parquet, metadata.csv and images, JSONL, JSON, or WebDataset tars), or a dataset on "
    "the Hub. By default the definition's dataset on the Hub.",
)
@click.option("--revision", metavar="COMMIT", help="Commit on the Hub; by default the definition's, else that of main.")
@click.option(
    "--format",
    type=click.Choice(["text", "parquet", "tar", "csv", "json"]),
    help="File format to read, if the source has several.",
)
@click.option("--image-root", type=PATH, help="Folder of the image files, if they are not beside the rows.")
@click.option(
    "--split",
    metavar="image|official|FILE",
    help="By image, drawn with the seed; the dataset's own; or a JSON file of image names: "
    '{"train": [...], "val": [...], "test": [...]}. By default the definition decides.',
)
@click.option("--seed", type=int, help="Seed of the split by image; by default the definition's, 42.")
@click.option(
    "--duplicates",
    type=click.Choice(["merge", "keep", "drop"]),
    help="Rows with the same image and question but different answers: one record with all answers as references "
    "(merge), one record each (keep), or none (drop). By default the definition decides.",
)
@click.option(
    "--variants",
    "num_variants",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Add each question for this many augmented variants of its image.",
)
@JSON
def data_prepare(
    name: str,
    folder: Path,
    source: str | None,
    revision: str | None,
    format: str | None,
    image_root: Path | None,
    split: str | None,
    seed: int | None,
    duplicates: str | None,
    num_variants: int,
    as_json: bool,
) -> None:
    """Make records and images of a dataset, cleaned and split.

    NAME is kvasir-vqa, kvasir-vqa-x1, endovis18-vqa, vqa-rad, slake or path-vqa, or a YAML file of your own
    (datasets/README.md says how to write one). Writes train.jsonl, val.jsonl, test.jsonl, images/ and report.json into
    DIR. Embedded images are written byte for byte, each once.

    Every change is reported: the table and report.json count what each rule did, and a changed record keeps its
    original texts. If interrupted, run the same command again to resume; on a complete DIR it does nothing.

    \b
    Examples:
      lookonce data prepare kvasir-vqa data/kvasir
      lookonce data prepare kvasir-vqa data/kvasir --source downloads/Kvasir-VQA --json
      lookonce data prepare kvasir-vqa-x1 data/x1-official --split official
      lookonce data prepare my-set.yaml data/mine --source rows.jsonl --image-root frames
    """
    from lookonce.datasets.prepare.report import next_steps, report_text
    from lookonce.datasets.prepare.run import Options, prepare

    options = Options(source, revision, format, image_root, split, seed, duplicates, num_variants)  # type: ignore[arg-type]
    prepared = prepare(name, folder, options, notify)
    if not prepared.is_new:
        notify(f"{folder} is already prepared from the same source with the same settings; nothing was done")
    emit(prepared.report, report_text(prepared.report), as_json)
    notify(next_steps(folder, prepared.report))


@data.command("tar")
@RECORDS
@click.argument("folder", metavar="DIR", type=PATH)
@IMAGE_ROOT
@click.option(
    "--tar-mb", default=256, show_default=True, type=click.IntRange(1), help="Megabytes of images per tar shard."
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


@data.command("pack", hidden=True, params=tar.params)
@click.pass_context
def pack(context: click.Context, /, **options: Any) -> None:
    """The former name of `lookonce data tar`."""
    notify("`lookonce data pack` is now called `lookonce data tar`")
    context.invoke(tar, **options)
