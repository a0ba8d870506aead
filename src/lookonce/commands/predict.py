"""`lookonce predict`: answer one question. The work is done in `eval.answers.predict`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, PATH, emit, notify, remember_run_file


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=PATH)
@click.option(
    "--image", "images", multiple=True, type=PATH, help="An image file, cached or not; repeat it for several images."
)
@click.option("--question", required=True, help="The question to ask.")
@click.option("--system", help="System text before the question.")
@JSON
def predict(run_dir: Path, images: tuple[Path, ...], question: str, system: str | None, as_json: bool) -> None:
    """Answer one question about an image, about several, or about none.

    \b
    Examples:
      lookonce predict runs/sample --image data/sample/images/frame-0026.jpg --question "Is there text?"
      lookonce predict runs/pairs --image before.jpg --image after.jpg --question "What was removed?"
    """
    from lookonce.eval.answers.predict import predict as answer
    from lookonce.run.folder import RunFolder

    if run_dir.is_file():
        remember_run_file(run_dir)
    if not images:
        notify("no --image given; asking without an image")
    text = answer(RunFolder.find(run_dir), images, question, system)
    emit({"images": [str(image) for image in images], "question": question, "answer": text}, text, as_json)
