"""`lookonce data`: what is trained on. What the commands do is in `datasets`.

`convert` is in commands.records, `audit` and `pack` in commands.audit.
"""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, PATH, emit, notify


@click.group()
def data() -> None:
    """Make records, look into them, change their form."""


@data.command("prepare")
@click.argument("name", metavar="NAME|SET.yaml")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--source",
    metavar="PATH|OWNER/NAME",
    help="A folder or file that you have: parquet, metadata.csv and images, JSONL or JSON, WebDataset tars; or a set "
    "on the Hub. By default the definition's on the Hub.",
)
@click.option("--revision", metavar="COMMIT", help="Of a set on the Hub; by default the definition's, or what main is.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "parquet", "tar", "csv", "json"]),
    help="Which files to read, where a folder holds several kinds.",
)
@click.option("--image-root", type=PATH, help="Where image files are, if not beside the rows.")
@click.option(
    "--split",
    metavar="image|official|FILE",
    help="By image, drawn by the seed; the set's own; or a JSON file of image names: "
    '{"train": [...], "val": [...], "test": [...]}. By default what the definition says.',
)
@click.option("--seed", type=int, help="Of the split by image; by default the definition's, 42.")
@click.option(
    "--duplicates",
    type=click.Choice(["merge", "keep", "drop"]),
    help="Rows that ask the same of the same image with other answers: one record with all answers as references, a "
    "record each, or none. By default what the definition says.",
)
@click.option(
    "--variants",
    "num_variants",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Ask each question of so many transformed variants of its image, too.",
)
@JSON
def data_prepare(
    name: str,
    folder: Path,
    source: str | None,
    revision: str | None,
    form: str | None,
    image_root: Path | None,
    split: str | None,
    seed: int | None,
    duplicates: str | None,
    num_variants: int,
    as_json: bool,
) -> None:
    """Make records and images of a known set, cleaned and split.

    NAME is kvasir-vqa, kvasir-vqa-x1, endovis18-vqa, vqa-rad, slake or path-vqa, or a YAML file of your own
    (datasets/README.md says how it is written). Writes train.jsonl, val.jsonl, test.jsonl, images/ and report.json into
    DIR. Embedded images are written byte for byte, each once.

    Nothing is changed silently: the table and report.json count what every rule did, and a record that was changed
    keeps its original text. Interrupted, the same command goes on; on a finished DIR it does nothing.

    \b
    Examples:
      lookonce data prepare kvasir-vqa data/kvasir
      lookonce data prepare kvasir-vqa data/kvasir --source downloads/Kvasir-VQA --json
      lookonce data prepare kvasir-vqa-x1 data/x1-official --split official
      lookonce data prepare my-set.yaml data/mine --source rows.jsonl --image-root frames
    """
    from lookonce.datasets.prepare.report import next_steps, report_text
    from lookonce.datasets.prepare.run import Options, prepare

    options = Options(source, revision, form, image_root, split, seed, duplicates, num_variants)  # type: ignore[arg-type]
    prepared = prepare(name, folder, options, notify)
    if not prepared.fresh:
        notify(f"{folder} is prepared already, from the same source with the same settings; nothing was done")
    emit(prepared.report, report_text(prepared.report), as_json)
    notify(next_steps(folder, prepared.report))
