"""`lookonce data convert`: convert records from one format into another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lookonce.commands.data.group import COERCE, data
from lookonce.commands.options import JSON, PATH, SEED, emit, notify
from lookonce.datasets.formats.registry import FORMAT_NAMES, FormatName

FORMAT = click.Choice(FORMAT_NAMES)


@data.command("convert")
@click.argument("source", metavar="RECORDS", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--to", "target_format", type=FORMAT, help="Format to write; by default canonical, in CSV flat.")
@click.option(
    "--format", "source_format", type=FORMAT, help="Format to read; by default recognised from the first record."
)
@click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths in RECORDS are relative to and may not leave; by default the folder of RECORDS, and "
    "absolute paths may be anywhere.",
)
@click.option(
    "--out-image-root",
    "target_root",
    type=PATH,
    help="Folder that image paths in OUT are relative to; by default the folder of OUT, and images elsewhere get "
    "absolute paths.",
)
@click.option(
    "--split",
    "shares",
    metavar="val=0.1,test=0.1",
    help="Divide the records by image: write OUT.train.jsonl and OUT.val.jsonl, OUT.test.jsonl in place of OUT.jsonl. "
    "Shares are of the images; train has the rest.",
)
@click.option("--seed", type=SEED, default=42, show_default=True, help="Seed that draws the images of --split.")
@click.option(
    "--together",
    multiple=True,
    metavar="KEY",
    help="With --split: records with the same value of this metadata key, such as a patient, stay in one part.",
)
@COERCE
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@JSON
def convert(
    source: Path,
    target: Path,
    target_format: FormatName | None,
    source_format: FormatName | None,
    image_root: Path | None,
    target_root: Path | None,
    shares: str | None,
    seed: int,
    together: tuple[str, ...],
    coerce_answers: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write records in another format, or divide them into train, val and test.

    The suffix of OUT decides the kind of file: .jsonl, .json (an array), .csv, .tsv or .parquet. Images stay where they
    are; images embedded as data: URLs, base64 or lists of bytes are written to images/ beside OUT, byte for byte. If
    the format cannot hold a record, the command fails and OUT is not written. In CSV, a text that a spreadsheet would
    run as a formula has an apostrophe before it, which is removed when the file is read.

    With --split no image is in two of the files: images are known by their content, and those that a record shows
    together stay together.

    \b
    Formats:
      canonical  images, turns, system, metadata: can hold every record
      flat       image_filename, question, answer: one question about one image; the format of CSV
      llava      image, conversations (LLaVA)
      sharegpt   images, conversations (ShareGPT, as LLaMA-Factory writes it)
      alpaca     images, instruction, input, output (Alpaca, as LLaMA-Factory writes it)
      messages   images, messages with <image> (ms-swift, LLaMA-Factory)
      parts      messages with content parts (Hugging Face, TRL, Axolotl)
      openai     messages with image_url content parts

    \b
    Examples:
      lookonce data convert llava.json train.jsonl
      lookonce data convert train.jsonl swift.jsonl --to messages
      lookonce data convert train.jsonl train.csv
      lookonce data convert chats.jsonl out/train.parquet --to parts --image-root /data/frames
      lookonce data convert own.jsonl data/own.jsonl --split val=0.1,test=0.1 --together patient
    """
    from lookonce.datasets.convert import convert as convert_records
    from lookonce.datasets.divide import Division, parse_shares
    from lookonce.errors import UsageError

    if together and shares is None:
        raise UsageError("--together keeps records in one part of --split; name the shares with --split val=0.1")

    report = convert_records(
        source,
        target,
        source_format=source_format,
        target_format=target_format,
        image_root=image_root,
        target_root=target_root,
        coerce_answers=coerce_answers,
        overwrite=overwrite,
        notify=notify,
        division=None if shares is None else Division(parse_shares(shares), seed, together),
    )
    emit(asdict(report), report.text(), as_json)
