"""`lookonce init`: write a first run file. The work is done in `lookonce.proposal`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from lookonce.commands.options import GIGABYTES, JSON, PATH, Decimal, emit, notify
from lookonce.errors import UsageError

MODEL, OUTPUT = "Qwen/Qwen3-VL-8B-Instruct", "runs/first"


@click.command()
@click.argument("run_file", metavar="RUN.yaml", type=PATH)
@click.option("--model", metavar="MODEL", help=f"A model folder, or a Hub name such as {MODEL}.")
@click.option("--train", multiple=True, metavar="RECORDS", help="Records file to train on; may be given several times.")
@click.option("--val", multiple=True, metavar="RECORDS", help="Records file for the validation loss.")
@click.option("--test", multiple=True, metavar="RECORDS", help="Records file for a final evaluation.")
@click.option("--image-root", metavar="DIR", help="Folder of the images; by default that of the records file.")
@click.option(
    "--gpu-memory",
    "gpu_gb",
    type=GIGABYTES,
    metavar="GB",
    help="Memory of the GPU that will train, in GB; by default that of this machine's.",
)
@click.option("--output", metavar="DIR", help=f"The run folder; by default {OUTPUT}.")
@click.option("--yes", "is_yes", is_flag=True, help="Ask nothing: use the defaults for what is not given.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@JSON
def init(run_file: Path, gpu_gb: float | None, is_yes: bool, force: bool, as_json: bool, **given: Any) -> None:
    """Write a run file, with a comment that says why each value was proposed.

    Reads the records, the sizes of their images and the model's tokenizer, and looks at this machine. Proposes
    batch.tokens_per_pack, batch.samples_per_step and cache.max_pixels, and keys that the model needs, such as
    data.enable_thinking. On a terminal, asks for what is not given.

    \b
    Examples:
      lookonce init run.yaml
      lookonce init run.yaml --model data/sample/model --train data/sample/train.jsonl --val data/sample/val.jsonl --yes
      lookonce init run.yaml --model Qwen/Qwen3-VL-8B-Instruct --train train.jsonl --gpu-memory 40 --force
    """
    from lookonce.proposal import NO_VAL, refuse_existing
    from lookonce.proposal import init as write_run_file

    refuse_existing(run_file, force)  # before anything is asked
    if not is_yes and is_terminal():
        gpu_gb = _ask(given, gpu_gb)
    missing = [f"--{name}" for name in ("model", "train") if not given[name]]
    if missing:
        raise UsageError(f"{' and '.join(missing)} must be given; on a terminal and without --yes, init asks for them")
    given["output"] = given["output"] or OUTPUT
    values = _by_key(given)
    written = write_run_file(run_file, values, gpu_gb, force=force)
    emit(written.to_json(), written.text(), as_json)
    if "data.val" not in values:
        notify(NO_VAL)


def is_terminal() -> bool:
    """Whether someone can answer questions."""
    return sys.stdin.isatty()


def _ask(given: dict[str, Any], gpu_gb: float | None) -> float | None:
    """Ask for what is not given; returns the memory of the GPU."""
    given["model"] = given["model"] or click.prompt("Model: a folder or a Hub name", default=MODEL, err=True)
    given["train"] = given["train"] or (click.prompt("Records to train on", err=True),)
    for split, use in (("val", "the validation loss"), ("test", "a final evaluation")):
        if not given[split]:
            answer = click.prompt(f"Records for {use} (empty: none)", default="", show_default=False, err=True)
            given[split] = (answer,) if answer else ()
    if gpu_gb is None:
        question = "Memory of the GPU that will train, in GB (0: that of this machine's)"
        gpu_gb = click.prompt(question, default=0.0, type=Decimal(0, 10_000), err=True) or None
    given["output"] = given["output"] or click.prompt("Run folder", default=OUTPUT, err=True)
    return gpu_gb


def _by_key(given: dict[str, Any]) -> dict[str, Any]:
    """The given values by their keys in the run file."""
    keys = {"model": "model.path", "image_root": "data.image_root", "output": "output"}
    keys |= {split: f"data.{split}" for split in ("train", "val", "test")}
    values = {keys[name]: list(value) if isinstance(value, tuple) else value for name, value in given.items() if value}
    return {key: values[key] for key in ("model.path", *(key for key in values if key != "model.path"))}
