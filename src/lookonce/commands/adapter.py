"""The commands `lookonce adapter ...`: what a trained adapter is used for. The work is done in `adapter`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookonce.commands.options import JSON, PATH, check_alone, emit, notify, only_results_on_stdout, remember_run_file

if TYPE_CHECKING:
    from lookonce.adapter.merge import Dtype


@click.group()
def adapter() -> None:
    """Merge a trained adapter into its model, check it for other programs, and upload it to the Hub.

    lookonce.save_run makes a run of an adapter that another program trained.

    \b
    Examples:
      lookonce adapter merge runs/kvasir models/kvasir-merged
      lookonce adapter check runs/kvasir --for vllm
      lookonce adapter push runs/kvasir your-name/kvasir-adapter --dry-run
    """


@adapter.command("check")
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.option(
    "--for",
    "program",
    type=click.Choice(["vllm"]),
    default="vllm",
    show_default=True,
    help="The program that will serve the adapter.",
)
@JSON
def check(run_dir: Path, program: str, as_json: bool) -> None:
    """Compare a run's adapter with the rules of a program that serves adapters, and print the command for it.

    RUN is the folder of a trained run, or its run file. Each rule is printed with its source in vLLM's published code;
    vLLM need not be installed. The exit code is 1 if the adapter breaks a rule. A warning means that vLLM was reported
    to load such an adapter and then to ignore it.

    \b
    Keys of --json: for, passed, adapter, rules (name, passed, found, source), command, notes.

    \b
    Examples:
      lookonce adapter check runs/kvasir
      lookonce adapter check runs/kvasir/run.yaml --for vllm --json
    """
    from lookonce.adapter.vllm import check_for_vllm

    remember_run_file(run_dir)
    done = check_for_vllm(run_dir)
    emit(done.to_json(), done.text(), as_json)
    if not done.passed:
        click.get_current_context().exit(1)


@adapter.command("merge")
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Type of the tensors that the adapter changes; all others keep their bytes.",
)
@click.option(
    "--onto-unquantised",
    is_flag=True,
    help="Merge an adapter that was trained on quantised weights (train.frozen) into the unquantised weights.",
)
@JSON
def merge(run_dir: Path, folder: Path, dtype: Dtype, onto_unquantised: bool, as_json: bool) -> None:
    """Merge a run's adapter into its model: a model folder that needs neither PEFT nor lookonce.

    RUN is the folder of a trained run, or its run file. DIR must not exist; it appears when it is complete.

    Only the tensors that the adapter changes are computed, in float32, and rounded once. All other tensors and files
    keep their bytes. With fp32 nothing is rounded, and the configuration says float32, so that transformers loads all
    weights in float32.

    \b
    Keys of --json: folder, dtype, num_tensors, num_changed, size_bytes, rounding, is_untied, left_out.

    \b
    Examples:
      lookonce adapter merge runs/sample models/sample-merged
      lookonce adapter merge runs/kvasir models/kvasir-fp32 --dtype fp32 --json
    """
    check_alone("lookonce adapter merge")
    remember_run_file(run_dir)
    with only_results_on_stdout():
        from lookonce.adapter.merge import merge as merge_run

        done = merge_run(run_dir, folder, dtype, onto_unquantised=onto_unquantised)
    emit(asdict(done), done.text(), as_json)


@adapter.command("push")
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--merged", type=PATH, metavar="DIR", help="Upload the model in DIR, into which RUN was merged.")
@click.option("--base-model", metavar="OWNER/NAME", help="The base model's name on the Hub, if RUN names a folder.")
@click.option(
    "--dataset", metavar="NAME", help="The dataset, a known name or a YAML file, if the records do not name it."
)
@click.option("--license", "licence", metavar="ID", help="Licence of the trained weights, by its name on the Hub.")
@click.option("--public", "is_public", is_flag=True, help="Make the repository public; by default it is private.")
@click.option("--revision", "branch", metavar="BRANCH", help="Upload to this branch instead of main.")
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, without network access.")
@JSON
def push(run_dir: Path, repository: str, dry_run: bool, as_json: bool, **options: Any) -> None:
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
    from lookonce.adapter.push import Options, prepare
    from lookonce.adapter.push import push as push_upload
    from lookonce.run.open import Needs, open_run

    remember_run_file(run_dir)
    needs = Needs("lookonce adapter push", adapter=True, recorded=True)
    upload = prepare(open_run(run_dir, needs).folder, repository, Options(**options))
    done = upload if dry_run else push_upload(upload)
    emit(done.to_json(), done.text(), as_json)
    for note in done.notes:
        notify(note)
