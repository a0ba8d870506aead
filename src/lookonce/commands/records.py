"""`lookonce data convert`: records from one form into another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lookonce.commands.data import data
from lookonce.commands.options import JSON, PATH, emit
from lookonce.datasets.formats.registry import FORM_NAMES, FormName

FORM = click.Choice(FORM_NAMES)


@data.command("convert")
@click.argument("source", metavar="RECORDS", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--to", "target_form", type=FORM, help="Form to write; canonical by default, and flat in CSV.")
@click.option("--format", "source_form", type=FORM, help="Form that is read; by default known by the first record.")
@click.option(
    "--image-root",
    type=PATH,
    help="What image paths in RECORDS are relative to, and may not lead out of; by default its folder, and absolute "
    "paths are themselves.",
)
@click.option(
    "--out-image-root",
    "target_root",
    type=PATH,
    help="What image paths in OUT are relative to; by default its folder, and images elsewhere get absolute paths.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is there.")
@JSON
def convert(
    source: Path,
    target: Path,
    target_form: FormName | None,
    source_form: FormName | None,
    image_root: Path | None,
    target_root: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write records in another form.

    The suffix of OUT says what file it is: .jsonl, .json (an array), .csv, .tsv or .parquet. Images stay where they
    are; those embedded as data: URLs, base64 or lists of bytes are written to images/ beside OUT, byte for byte. What a
    form can not hold is refused, and OUT is not written.

    \b
    Forms:
      canonical  images, turns, system, metadata: all that a record is
      flat       image_filename, question, answer: one question about one image; the form of CSV
      llava      image, conversations (LLaVA)
      sharegpt   images, conversations (ShareGPT, as LLaMA-Factory has it)
      alpaca     images, instruction, input, output (Alpaca, as LLaMA-Factory has it)
      messages   images, messages with <image> (ms-swift, LLaMA-Factory)
      parts      messages with lists of parts (Hugging Face, TRL, Axolotl)
      openai     messages with image_url parts

    \b
    Examples:
      lookonce data convert llava.json train.jsonl
      lookonce data convert train.jsonl swift.jsonl --to messages
      lookonce data convert train.jsonl train.csv
      lookonce data convert chats.jsonl out/train.parquet --to parts --image-root /data/frames
    """
    from lookonce.datasets.convert import convert as convert_records

    report = convert_records(
        source,
        target,
        source_form=source_form,
        target_form=target_form,
        image_root=image_root,
        target_root=target_root,
        overwrite=overwrite,
    )
    emit(asdict(report), report.text(), as_json)
