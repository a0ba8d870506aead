"""`lookonce data prepare`: records and images of a dataset. What the command does is in `datasets.prepare`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.data.group import data
from lookonce.commands.options import JSON, PATH, SEED, emit, notify


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
@click.option("--seed", type=SEED, help="Seed of the split by image; by default the definition's, 42.")
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
    type=click.IntRange(0, 100),
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
