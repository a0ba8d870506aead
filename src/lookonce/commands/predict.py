"""`lookonce predict`: answer questions about any images. The work is done in `eval.predict`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce.commands.options import JSON, PATH, check_launch, emit, notify, only_results_on_stdout, remember_run_file
from lookonce.environment import num_ranks
from lookonce.errors import LookonceError, UsageError
from lookonce.text import count

if TYPE_CHECKING:
    from lookonce.eval.answerer import Answerer


@click.command()
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.option("--records", type=PATH, metavar="FILE", help="Records with the questions, in any record format.")
@click.option(
    "--image-root",
    type=PATH,
    help="Folder that image paths in the records are relative to; by default the folder of the records.",
)
@click.option(
    "--images",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Images to ask each question about: a folder, with its subfolders, or a pattern in quotes, such as "
    "'folder/*.jpg'; repeat it for several.",
)
@click.option(
    "--image", "images", multiple=True, type=PATH, help="An image file, cached or not; several are shown together."
)
@click.option("--question", "questions", multiple=True, help="A question to ask; repeat it for several.")
@click.option("--untuned", is_flag=True, help="Answer without the adapter; RUN may then also be a model.")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Write the answers to a .jsonl or .csv file.")
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
@JSON
def predict(
    run_dir: Path,
    records: Path | None,
    image_root: Path | None,
    patterns: tuple[str, ...],
    images: tuple[Path, ...],
    questions: tuple[str, ...],
    untuned: bool,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Answer questions about any images, or about none.

    Questions come from a records file, or each --question is asked about every file that --images names. Each image is
    encoded once, or read from the run's cache, and all its questions share it. Questions that cannot be answered are
    named, all others are answered, and the command exits with 1. An interrupted command with -o is continued by the
    same command.

    RUN is a run folder or a run file. With --untuned it need not be trained, and may be a model folder or a model on
    the Hub (owner/name).

    \b
    Examples:
      lookonce predict runs/sample --image data/sample/images/frame-0026.jpg --question "Is there text?"
      lookonce predict runs/pairs --image before.jpg --image after.jpg --question "What was removed?"
      lookonce predict runs/sample --images 'frames/*.jpg' --question "Is there text?" -o answers.csv
      lookonce predict runs/sample --images frames --question "Is there text?" -o answers.jsonl
      lookonce predict runs/sample --records q.jsonl -o answers.jsonl
      lookonce predict run.yaml --records q.jsonl -o untuned.jsonl --untuned
    """
    if num_ranks() > 1:
        raise UsageError(
            "lookonce predict runs in one process; start it without torchrun, or, if nothing has set WORLD_SIZE="
            f"{num_ranks()} in the environment on purpose: unset WORLD_SIZE"
        )
    check_launch()
    if records and (patterns or images or questions):
        raise UsageError("--records has all of a question; leave out --images, --image and --question")
    if patterns and images:
        raise UsageError("--images asks about each image and --image about several together; give only one of them")
    if not records and not questions:
        raise UsageError("no question is given; ask with --question, or name a records file with --records")
    if image_root and not records:
        raise UsageError("--image-root is for --records; leave it out, or name a records file")
    with only_results_on_stdout():
        from lookonce.eval.answerer import Answerer, ask_each, match_images, read_questions
        from lookonce.eval.predict import check_output
        from lookonce.eval.predict import predict as answer_all
        from lookonce.run.folder import claimed_around

    remember_run_file(run_dir)
    if output:
        check_output(output, records, overwrite=overwrite)
    broken: Mapping[str, LookonceError] = {}
    if records:
        asked, broken = read_questions(records, image_root)
    else:
        if not patterns and not images:
            notify("no --image given; asking without an image")
        found = match_images(patterns)
        if found:
            notify(f"asking about {count(len(found), 'image')}")
        asked = ask_each([(path,) for path in found] or [images], questions)
    with claimed_around(output, "lookonce predict") if output else nullcontext():
        answerer = Answerer.open(run_dir, untuned=untuned)
        if len(questions) == 1 and not patterns and not output:
            _answer_one(answerer, images, questions[0], as_json)
            return
        report = answer_all(answerer, asked, broken, output, notify)
    emit(report.to_json(), report.text(), as_json)
    for note in report.notes():
        notify(note)
    sys.exit(1 if report.num_skipped else 0)


def _answer_one(answerer: Answerer, images: tuple[Path, ...], question: str, as_json: bool) -> None:
    """Print the answer alone."""
    [answer] = answerer.answer(images, question)
    how = {"logprob": answer.logprob, "num_tokens": answer.num_tokens, "ended": answer.ended}
    asked = {"images": [str(image) for image in images], "question": question}
    emit(asked | {"answer": answer.text} | how, answer.text, as_json)
