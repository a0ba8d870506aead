"""`lookonce adapter push`: an adapter on the Hugging Face Hub. The work is done in `adapter.upload`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from lookonce.commands.adapter.group import adapter
from lookonce.commands.options import JSON, PATH, emit, notify, remember_run_file


@adapter.command("push")
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--merged", type=PATH, metavar="DIR", help="Upload the model in DIR, into which RUN was merged.")
@click.option("--base-model", metavar="OWNER/NAME", help="The base model's name on the Hub, if RUN names a folder.")
@click.option("--dataset", metavar="NAME", help="A known dataset, or a YAML file, if the records do not say theirs.")
@click.option("--license", "licence", metavar="ID", help="The Hub's name of the licence of the trained weights.")
@click.option("--public", "is_public", is_flag=True, help="Everybody may see it; by default it is private.")
@click.option("--revision", "branch", metavar="BRANCH", help="Upload to this branch instead of main.")
@click.option("--message", metavar="TEXT", help="The message of the commit.")
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, and ask no other machine.")
@JSON
def push(
    run_dir: Path,
    repository: str,
    merged: Path | None,
    base_model: str | None,
    dataset: str | None,
    licence: str | None,
    is_public: bool,
    branch: str | None,
    message: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload a run's adapter to the Hugging Face Hub, with a model card, or the model that it was merged into.

    RUN is the folder of a trained run, or its run file. The card has the base model, the dataset and its licence, the
    scores with intervals and baselines, how to ask the model, how it was made, and its limits. Predictions, records and
    images are never uploaded, and no file names a folder of this machine.

    The upload is one commit. `train.start_from: hf://OWNER/NAME@COMMIT` starts a training from an uploaded adapter.

    \b
    Keys of --json: repository, url, is_private, branch, commit (null with --dry-run), start_from, files, size_bytes,
    base_model, dataset, card, notes.

    \b
    Examples:
      lookonce adapter push runs/kvasir your-name/kvasir-adapter --dry-run
      lookonce adapter push runs/kvasir your-name/kvasir-adapter --base-model Qwen/Qwen3-VL-8B-Instruct
      lookonce adapter push runs/kvasir your-name/kvasir-merged --merged models/kvasir-merged
    """
    if sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "0"  # its own bars are the only ones that show an upload
    from lookonce.adapter.upload.push import Options, prepare
    from lookonce.adapter.upload.push import push as push_upload
    from lookonce.run.folder import RunFolder

    if run_dir.is_file():
        remember_run_file(run_dir)
    options = Options(merged, base_model, dataset, licence, is_public, branch, message)
    upload = prepare(RunFolder.find(run_dir), repository, options)
    done = upload if dry_run else push_upload(upload)
    emit(done.to_json(), done.text(), as_json)
    for note in done.notes:
        notify(note)
