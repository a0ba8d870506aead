"""`lookonce sample`: write the sample dataset and model. The work is done in `datasets.sample`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lookonce.commands.options import IMAGES, JSON, PATH, emit, notify
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.text import shell

NEXT = """next:
  lookonce cache build {run}
  lookonce train {run}
  lookonce eval {output} --split test"""
"""What to run after it."""


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--family",
    default=DEFAULT.model_type,
    show_default=True,
    type=click.Choice([*FAMILIES]),
    help="Family of the model.",
)
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    type=click.Choice([*dict.fromkeys(size for family in FAMILIES.values() for size in family.sizes)]),
    help="Size of the model, one that the family has. Real sizes have random weights and serve to measure speed.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True),
    help="Folder of a tokenizer for the model; by default the sample's own.",
)
@click.option(
    "--images", "num_images", type=click.IntRange(8, IMAGES), help="Number of images; by default 64, with --stages 128."
)
@click.option(
    "--sizes",
    type=PATH,
    help="CSV file with columns width and height: image sizes, in the proportions of its rows; or kvasir for "
    "Kvasir-VQA's sizes.",
)
@click.option("--tower-only", is_flag=True, help="Leave out the language model: enough to build and measure caches.")
@click.option("--stages", is_flag=True, help="Ask in three stages: later answers follow from earlier ones.")
@JSON
def sample(folder: Path, as_json: bool, **options: Any) -> None:
    """Write a small sample dataset, a model to try everything on, and a run file for both, DIR/run.yaml.

    Paths in the run file begin in the folder where this command runs. A model of a real size has no run file: it serves
    to measure speed.

    \b
    Examples:
      lookonce sample data/sample
      lookonce sample data/stages --stages
      lookonce sample data/qwen2.5 --family qwen2_5_vl
      lookonce sample data/speed --model 2b
      lookonce sample data/cache-speed --model 8b --tower-only --images 1200 --sizes sizes.csv
    """
    from lookonce.datasets.sample.write import write_sample

    report = write_sample(folder, **options)
    emit(asdict(report), report.text(), as_json)
    if report.run_file:
        notify(NEXT.format(run=shell(report.run_file), output=shell(f"runs/{folder.absolute().name}")))
