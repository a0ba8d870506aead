"""The command line: parse, call, print. What commands do is in `cache` and `train`.

Groups of commands are in `commands`.

Data goes to stdout, all else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by a signal. Modules
are imported inside the commands, so that help needs no torch.
"""

from __future__ import annotations

import os
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import lookonce.commands.audit  # noqa: F401  (adds audit and pack to the group `data`)
import lookonce.commands.care  # noqa: F401  (adds verify, repair, show, gc and stage to the group `cache`)
import lookonce.commands.records  # noqa: F401  (adds convert to the group `data`)
from lookonce.commands.bench import bench
from lookonce.commands.cache import cache
from lookonce.commands.data import data
from lookonce.commands.fetch import fetch
from lookonce.commands.options import JSON, PATH, RUN, SET, emit, is_first, notify, read_run
from lookonce.commands.status import status
from lookonce.datasets.sample.scene import DEFAULT_SEED, NUM_IMAGES
from lookonce.errors import LookonceError, Stopped
from lookonce.signals import stopping_early
from lookonce.version import __version__


class Commands(click.Group):
    """A group whose errors are messages: no traceback without --debug, and never a lost exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise  # click's own
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            code, message = _explain(error)
            click.echo(f"{click.style('Error:', fg='red')} {_rank()}{message}", err=True)
            ctx.exit(code)


def _rank() -> str:
    """Who speaks, if it is one of several processes and not the first; torchrun says so."""
    return "" if is_first() else f"rank {os.environ['RANK']}: "


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit code and message of whatever stopped a command."""
    if isinstance(error, LookonceError | Stopped):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return (
            130,
            "interrupted; the same command goes on from what was finished (train: with --resume)",
        )
    if isinstance(error, OSError):
        return 1, str(error)
    return 1, f"unexpected {type(error).__name__}: {error} (`lookonce --debug ...` shows where)"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="%(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks and the libraries' warnings.")
def main(debug: bool) -> None:
    """Look at each image once, train on it many times.

    Phase 1, `cache`, runs the frozen vision tower once over every distinct image. Phase 2, `train`, trains the
    language model's LoRA adapter from what it put out.

    \b
    Examples:
      lookonce sample data/sample
      lookonce cache build experiments/sample.yaml
      lookonce train experiments/sample.yaml
      lookonce eval runs/sample --split test
    """
    if not debug:
        _hush_libraries()


@main.command()
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--seed", default=DEFAULT_SEED, show_default=True, help="The same seed gives the same bytes.")
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    type=click.Choice(["tiny", "2b", "4b", "8b"]),
    help="Size of the model; real sizes have random weights, to measure speed.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True),
    help="Folder of a tokenizer to give the model instead of the sample's own.",
)
@click.option("--images", "num_images", default=NUM_IMAGES, show_default=True, type=click.IntRange(8), help="Frames.")
@click.option(
    "--sizes",
    type=PATH,
    help="CSV file with columns width and height; frames get each as often as it is there; or kvasir: Kvasir-VQA's.",
)
@click.option("--tower-only", is_flag=True, help="Leave the language model out: enough to make and measure caches.")
@JSON
def sample(
    folder: Path,
    seed: int,
    model: str,
    tokenizer: Path | None,
    num_images: int,
    sizes: Path | None,
    tower_only: bool,
    as_json: bool,
) -> None:
    """Write a small sample set and a model to try everything on.

    \b
    Examples:
      lookonce sample data/sample
      lookonce sample data/speed --model 2b
      lookonce sample data/cache-speed --model 8b --tower-only --images 1200 --sizes sizes.csv
    """
    from lookonce.datasets.sample.write import write_sample

    report = write_sample(folder, seed, model, tokenizer, num_images=num_images, sizes=sizes, tower_only=tower_only)
    emit(asdict(report), report.text(), as_json)


main.add_command(data)
main.add_command(cache)


@main.command()
@RUN
@SET
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint, if there is one.")
@click.option("--restart", is_flag=True, help="Move what the output folder holds away and train anew.")
@JSON
def train(run_file: Path, assignments: tuple[str, ...], resume: bool, restart: bool, as_json: bool) -> None:
    """Phase 2: train the adapter from the cache.

    Evaluates it on the validation split and ends with a summary.

    SIGUSR1 and SIGTERM finish the step in work, write a checkpoint and exit 75: go on with --resume.

    \b
    Examples:
      lookonce train experiments/sample.yaml
      lookonce train experiments/sample.yaml --set train.epochs=5 --set output=runs/longer
      lookonce train run.yaml --resume
      torchrun --nproc-per-node 2 -m lookonce train run.yaml
    """
    if resume and restart:
        raise click.UsageError("--resume goes on and --restart begins anew; give one of them")
    with stopping_early("the same command with --resume goes on"):
        run = read_run(run_file, assignments)
        from lookonce.workflow.train import train as train_run

        summary = train_run(run, resume=resume, restart=restart, notify=notify)
    if summary:
        emit(summary.to_json(), summary.text(), as_json)


@main.command("eval")
@click.argument("run_dir", metavar="RUN_DIR", type=PATH)
@click.option("--split", type=click.Choice(["train", "val", "test"]), help="By default the run file's `eval.split`.")
@click.option("--shuffle-images", is_flag=True, help="Show each question another image: a model that looks must fail.")
@JSON
def evaluate(run_dir: Path, split: str | None, shuffle_images: bool, as_json: bool) -> None:
    """Score a split beside the majority baseline.

    Answers its questions greedily; an answer is right if it is the reference, word for word.

    Predictions go to RUN_DIR/predictions, scores to RUN_DIR/metrics.

    \b
    Examples:
      lookonce eval runs/sample
      lookonce eval runs/sample --split test --json
      lookonce eval runs/sample --shuffle-images
    """
    from lookonce.eval.run import evaluate_run

    evaluation, where = evaluate_run(run_dir, split, shuffled=shuffle_images)
    notify(f"predictions in {where}")
    emit(evaluation.to_json(), evaluation.text(), as_json)


@main.command()
@click.argument("run_dir", metavar="RUN_DIR", type=PATH)
@click.option(
    "--image", "images", multiple=True, type=PATH, help="An image file, in the cache or not; several times for several."
)
@click.option("--question", required=True, help="What to ask about them.")
@click.option("--system", help="System text to put before it.")
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

    if not images:
        notify("no --image: asked without one")
    text = answer(RunFolder.find(run_dir), images, question, system)
    emit({"images": [str(image) for image in images], "question": question, "answer": text}, text, as_json)


main.add_command(fetch)
main.add_command(status)
main.add_command(bench)


def _hush_libraries() -> None:
    """Their progress bars and deprecation notes would bury ours."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", module="PIL")  # on palettes and on large images, both of which we handle


if __name__ == "__main__":
    main()
