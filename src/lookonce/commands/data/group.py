"""The group `lookonce data`, and the arguments that its commands share."""

from __future__ import annotations

import click

from lookonce.commands.options import PATH

RECORDS = click.argument("records", metavar="RECORDS...", type=PATH, nargs=-1, required=True)
IMAGE_ROOT = click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths are relative to; by default the folder of each records file.",
)

COERCE = click.option(
    "--coerce-answers",
    is_flag=True,
    help="Read answers that are numbers or booleans as text, like data.coerce_answers in the run file.",
)


@click.group()
def data() -> None:
    """Prepare, convert, check and clean records, and put their images into tar shards.

    \b
    Examples:
      lookonce data prepare kvasir-vqa data/kvasir
      lookonce data audit data/kvasir/train.jsonl data/kvasir/val.jsonl
      lookonce data clean train.jsonl train-clean.jsonl
      lookonce data convert llava.json train.jsonl
    """
