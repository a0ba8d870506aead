"""Answers of a model: `lookonce eval`, `predict`, `ask` and `export`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lookonce.commands.options import (
    JSON,
    PATH,
    SEED,
    SET,
    SPLIT,
    VERIFY_IMAGES,
    Decimal,
    check_alone,
    check_launch,
    emit,
    notify,
    only_results_on_stdout,
    remember_run_file,
    say,
)
from lookonce.environment import fewer_imports
from lookonce.errors import LookonceError, UsageError
from lookonce.text import count, json_text, listed, shell

if TYPE_CHECKING:
    from lookonce.eval.answerer import Conversation
    from lookonce.eval.decoding.dialogue import Answer
    from lookonce.eval.submission import Challenge, SubmissionInfo


@click.command("eval")
@click.argument("run_dir", metavar="RUN_DIR", type=PATH)
@SPLIT
@click.option(
    "--shuffle-images",
    "shuffled",
    is_flag=True,
    help="Give each question another image: a model that uses the images must score lower.",
)
@click.option("--untuned", is_flag=True, help="Answer without the adapter; with a run file also before it is trained.")
@click.option(
    "--reference-context",
    "reference",
    is_flag=True,
    help="With data.context, give reference answers to earlier questions.",
)
@click.option("--no-context", "none", is_flag=True, help="With data.context, give no answers to earlier questions.")
@click.option("--baselines", is_flag=True, help="Answer as each baseline, and compare the run with all of them.")
@click.option(
    "--samples", "num_samples", type=click.IntRange(2, 1000), metavar="N", help="Draw N answers to each question."
)
@click.option(
    "--temperature",
    type=Decimal(0.01, 100),
    default=1.0,
    show_default=True,
    help="With --samples, what logits are divided by.",
)
@click.option(
    "--top-p",
    type=Decimal(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="With --samples, the probability of the likeliest tokens that are drawn from.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the samples.")
@SET
@VERIFY_IMAGES
@JSON
def evaluate(
    run_dir: Path,
    split: str | None,
    baselines: bool,
    num_samples: int | None,
    temperature: float,
    top_p: float,
    seed: int,
    assignments: tuple[str, ...],
    verify_images: bool,
    as_json: bool,
    **chosen: bool,
) -> None:
    """Score a split, and compare with the majority baseline and those that a model has answered.

    Questions are answered greedily. An answer is right if it equals the reference, apart from spaces around it. The
    majority baseline always gives the question's most frequent training answer, without the image.

    Under torchrun the processes divide the questions. An interrupted evaluation is continued by the same command.

    RUN_DIR is a run folder, or a run file; lookonce.save_run makes a run folder of an adapter that another program
    trained. A run folder is evaluated with the settings of its training, which run.json records; its run.yaml is a copy
    for people. A run file is evaluated with its own paths and its own section `eval`. --set replaces keys of either.

    Predictions are written to `predictions` in the run folder, scores to `metrics`; those of a baseline have names such
    as test-untuned. With several baselines the model is loaded once, answers on disk are reused, and the run is
    compared with all of them.

    --samples draws several answers to each question and says how often some are right (pass@k), what a majority vote
    scores, and in how many questions some are right and others not, from which a training by rewards could learn. They
    are written to `samples`; a baseline may be named too. The same seed gives the same samples.

    \b
    Examples:
      lookonce eval runs/sample
      lookonce eval runs/sample --split test --json
      lookonce eval runs/sample --baselines
      lookonce eval runs/sample --shuffle-images
      lookonce eval runs/sample --reference-context --no-context
      lookonce eval runs/sample --samples 8 --temperature 1
      lookonce eval runs/sample --set eval.max_new_tokens=8
      lookonce eval run.yaml --untuned
      lookonce eval runs/sample/run.yaml
      torchrun --nproc-per-node 4 -m lookonce eval runs/sample
    """
    check_launch()
    named: tuple[Any, ...] = tuple(name for name in ("untuned", "shuffled", "reference", "none") if chosen[name])
    if num_samples and (baselines or len(named) > 1):
        raise UsageError("--samples takes at most one baseline at a time; name one, such as --untuned")
    source = click.get_current_context().get_parameter_source
    if not num_samples and any(
        source(name) is ParameterSource.COMMANDLINE for name in ("temperature", "top_p", "seed")
    ):
        raise UsageError("--temperature, --top-p and --seed are those of samples; add --samples 8, or leave them out")
    with only_results_on_stdout(), fewer_imports():
        from lookonce.eval.decoding.sampling import Sampling
        from lookonce.eval.run import evaluate_run
        from lookonce.eval.samples import sample_run
        from lookonce.eval.scores.metrics import read_metrics
        from lookonce.run.folder import RunFolder

    remember_run_file(run_dir, assignments)
    how: dict[str, Any] = {"assignments": assignments, "verify_images": verify_images, "notify": notify}
    if num_samples:
        sampling = Sampling(num_samples, temperature, top_p)
        if sampled := sample_run(run_dir, sampling, split, *named, seed=seed, **how):  # on the first rank
            scores, path = sampled
            notify(f"samples: {path}")
            emit(scores.to_json(), scores.text(), as_json)
    elif done := evaluate_run(run_dir, split, "all" if baselines else named, **how):  # on the first rank
        evaluation, path = done
        notify(f"predictions: {path}")
        folder = RunFolder(path.parent.parent)
        beside = {key: read_metrics(folder, f"{path.stem}-{key}") for key in evaluation.baselines}
        emit(evaluation.to_json(), evaluation.text({key: known for key, known in beside.items() if known}), as_json)


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
    named, and the command then exits with 1; all others are answered. An interrupted command with -o is continued by
    the same command.

    RUN is a run folder or a run file; lookonce.save_run makes a run folder of an adapter that another program trained.
    With --untuned it need not be trained, and may be a model folder or a model on the Hub (owner/name).

    \b
    Examples:
      lookonce predict runs/sample --image data/sample/images/frame-0026.jpg --question "Is there text?"
      lookonce predict runs/pairs --image before.jpg --image after.jpg --question "What was removed?"
      lookonce predict runs/sample --images 'frames/*.jpg' --question "Is there text?" -o answers.csv
      lookonce predict runs/sample --images frames --question "Is there text?" -o answers.jsonl
      lookonce predict runs/sample --records q.jsonl -o answers.jsonl
      lookonce predict run.yaml --records q.jsonl -o untuned.jsonl --untuned
    """
    check_alone("lookonce predict")
    misplaced = patterns or images if records else image_root
    if bool(records) == bool(questions) or misplaced or (patterns and images):
        raise UsageError(
            "questions come either from --records, with --image-root for its images, or from --question, about each "
            "image of --images or about those of --image together; give the options of one of these"
        )
    with only_results_on_stdout(), fewer_imports():
        from lookonce.datasets.records import check_target
        from lookonce.eval.answerer import Answerer, ask_each, match_images, read_questions
        from lookonce.eval.predict import SUFFIXES
        from lookonce.eval.predict import predict as answer_all
        from lookonce.run.folder import claimed_around

    remember_run_file(run_dir)
    if output:
        check_target(output, records, SUFFIXES, overwrite=overwrite)
    broken: Mapping[str, LookonceError] = {}
    if records:
        record_turns, broken = read_questions(records, image_root)
    else:
        if not patterns and not images:
            notify("no --image given; asking without an image")
        matched = match_images(patterns)
        if matched:
            notify(f"asking about {count(len(matched), 'image')}")
        record_turns = ask_each([(path,) for path in matched] or [images], questions)
    with claimed_around(output, "lookonce predict") if output else nullcontext():
        answerer = Answerer.open(run_dir, untuned=untuned)
        if len(questions) == 1 and not patterns and not output:
            [answer] = answerer.answer(images, questions[0])
            row = {"images": [str(image) for image in images]} | _row(questions[0], answer)
            emit(row, answer.text, as_json)
            return
        report = answer_all(answerer, record_turns, broken, output, notify)
    emit(report.to_json(), report.text(), as_json)
    for note in report.notes():
        notify(note)
    sys.exit(1 if report.num_skipped else 0)


def _row(question: str, answer: Answer) -> dict[str, Any]:
    how = {"logprob": answer.logprob, "num_tokens": answer.num_tokens, "ended": answer.ended}
    return {"question": question, "answer": answer.text} | how


COMMANDS = "/image PATH ..., /reset, /quit"


@click.command()
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.argument("images", metavar="[IMAGE]...", nargs=-1, type=PATH)
@click.option("--system", help="System text before the first question; by default data.system.")
@click.option("--untuned", is_flag=True, help="Answer without the adapter; RUN may then also be a model.")
@click.option("--json", "as_json", is_flag=True, help="Print each answer as a line of JSON.")
def ask(run_dir: Path, images: tuple[Path, ...], system: str | None, untuned: bool, as_json: bool) -> None:
    """Ask about images in a conversation, one question per line.

    The model sees its own earlier answers, and answers appear word by word. Lines that begin with a slash are commands:
    /image PATH ... starts a conversation about other images, /reset about the same images, and /quit or the end of the
    input ends it.

    \b
    Examples:
      lookonce ask runs/sample data/sample/images/frame-0026.jpg
      lookonce ask runs/pairs before.jpg after.jpg
      lookonce ask Qwen/Qwen3-VL-2B-Instruct a.jpg --untuned
    """
    check_alone("lookonce ask")
    with only_results_on_stdout(), fewer_imports():
        from lookonce.eval.answerer import Answerer, Conversation

    remember_run_file(run_dir)
    conversation = Conversation(Answerer.open(run_dir, untuned=untuned), images, system)
    notify(f"ask a question a line, or: {COMMANDS}")
    has_failed = False
    while (line := _next_line()) not in (None, "/quit"):
        try:
            _answer(conversation, line or "", as_json)
        except LookonceError as error:
            has_failed = True
            notify(str(error))
    if has_failed and not sys.stdin.isatty():  # a script cannot read what was said
        sys.exit(1)


def _next_line() -> str | None:
    """The next line of the input without spaces around it; None at its end, or after Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(conversation: Conversation, line: str, as_json: bool) -> None:
    """Answer a question, or do what a command says."""
    name, _, rest = line.partition(" ")
    if name == "/image" and not rest:
        raise UsageError("/image needs the path of an image, or of several: /image PATH ...")
    if name == "/image":
        conversation.show([Path(word).expanduser() for word in _words(rest)])
    elif name == "/reset" and not rest:
        conversation.reset()
    elif name.startswith("/"):
        raise UsageError(f"{line} is not a command; there are: {COMMANDS}")
    elif line:
        streams = sys.stdout.isatty() and not as_json
        answer = conversation.ask(line, partial(say, nl=False) if streams else lambda text: None)
        say("" if streams else json_text(_row(line, answer)) if as_json else answer.text)


def _words(text: str) -> list[str]:
    """The words of a command, with quotes as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text}: {error}; close the quotes") from None


@click.command()
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.option("--to", "challenge", type=click.Choice(["medico", "medvqa-gi"]), required=True, help="The challenge.")
@SPLIT
@click.option("--info", "info_file", type=PATH, metavar="FILE", help="YAML or JSON with the keys of submission_info.")
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    help="File to write; it must not exist. By default predictions_1.json.",
)
@click.option("--partial", is_flag=True, help="Write the file although rows that the challenge scores are missing.")
@click.option("--repo", type=PATH, metavar="DIR", help="Write the files of a repository to submit, instead of answers.")
@click.option("--repo-id", metavar="OWNER/NAME", help="With --repo, the repository on the Hub that has the adapter.")
@click.option("--base-model", metavar="OWNER/NAME", help="With --repo, the base model's name, if RUN names a folder.")
@click.option(
    "--task2", type=PATH, metavar="RECORDS", help="With --repo, also explain the answers to these 1,500 rows."
)
@click.option(
    "--explain",
    "probes",
    multiple=True,
    metavar="QUESTION",
    help="With --task2, a question about each image whose answer explains; repeat it for several.",
)
@JSON
def export(
    run_dir: Path,
    challenge: Challenge,
    split: str | None,
    info_file: Path | None,
    output: Path | None,
    partial: bool,
    repo: Path | None,
    as_json: bool,
    **submitted: Any,
) -> None:
    """Write a run's answers as the submission JSON of a challenge, or the repository that the challenge runs.

    medico is task 1 of MediaEval Medico, medvqa-gi task 1 of ImageCLEFmed MEDVQA-GI. The file has the keys of the
    challenges' own scripts, with the public scores of the answers; these need the extra `metrics`.

    --info names the participants: Participant_Names, Affiliations, Contact_emails (a list), Team_Name, Country and
    Notes_to_organizers. An image's id is its file name without suffix.

    Fails if questions of the split are not answered, or medico's public rows are not complete, unless --partial is
    given.

    With --repo it writes submission_task1.py, which the organisers' tool runs: it loads the model and the adapter of
    --repo-id with transformers and PEFT, and answers as `lookonce eval` does. With --task2 the rows of medico's task 2
    are answered now and explained, by the answers to further questions about their images.

    \b
    Examples:
      lookonce export runs/x1 --to medico --split test --info team.yaml
      lookonce export runs/kvasir --to medvqa-gi --split test -o submission.json
      lookonce export runs/x1 --to medico --repo submit --repo-id your-name/x1 --info team.yaml
      lookonce export runs/x1 --to medico --repo submit --repo-id your-name/x1 --task2 data/x1/medico-task2.jsonl
    """
    from lookonce.eval.submission import SubmissionInfo
    from lookonce.settings import read_settings

    info = SubmissionInfo()
    if info_file:
        title, form = f"submission info {info_file}", f"a mapping of {', '.join(SubmissionInfo.model_fields)}"
        info = read_settings(info_file, SubmissionInfo, title, "name another file", form)
    remember_run_file(run_dir)
    if repo:
        if not submitted["repo_id"] or split or output or partial or (submitted["probes"] and not submitted["task2"]):
            raise UsageError(
                "--repo needs --repo-id, the repository on the Hub that has the adapter, and takes none of --split, "
                "--output and --partial; --explain needs --task2"
            )
        _export_repository(run_dir, challenge, info, repo, as_json, **submitted)
    elif any(submitted.values()):
        raise UsageError(
            "--repo-id, --base-model, --task2 and --explain belong to --repo DIR; add it, or leave them out"
        )
    else:
        _export_answers(run_dir, challenge, split, info, output or Path("predictions_1.json"), partial, as_json)


def _export_answers(
    run_dir: Path,
    challenge: Challenge,
    split: str | None,
    info: SubmissionInfo,
    output: Path,
    partial: bool,
    as_json: bool,
) -> None:
    from lookonce.eval.answers.files import AnsweringCost
    from lookonce.eval.join import find_predictions
    from lookonce.eval.scores.prediction import read_predictions
    from lookonce.eval.submission import notes, submission, to_text, too_few, why_incomplete
    from lookonce.files import create_text
    from lookonce.run.folder import claimed_around
    from lookonce.run.open import Needs, open_run
    from lookonce.run.records import read_split

    opened = open_run(run_dir, Needs("lookonce export", recorded=True))
    folder, run = opened.folder, opened.run
    with claimed_around(output, "lookonce export"):
        split = split or run.eval.split
        predictions = read_predictions(find_predictions(folder, split))
        are_here = all(path.exists() for path in getattr(run.data, split, ()))
        records = [*read_split(run, split)] if split in ("val", "test") and are_here else []
        few = too_few(len(predictions), challenge)
        missing = why_incomplete(predictions, records) or few
        if missing and not partial:
            answer = f"; answer all with: {shell('lookonce', 'eval', run_dir, '--split', split)}"
            change = "; name the split that has these rows with --split" if missing == few else answer
            raise UsageError(f"{missing}{change}, or export what there is with --partial")
        value = submission(predictions, challenge, info, AnsweringCost.read(folder.answering(split)))
        if not create_text(output, to_text(value)):
            raise UsageError(f"{output} exists; name another file with -o, or remove it")
    for note in dict.fromkeys(filter(None, [missing, *notes(value, challenge)])):
        notify(note)
    written = {"file": str(output), "num_answers": len(predictions), "public_scores": value["public_scores"]}
    emit(written, f"wrote {len(predictions):,} answers to {output}", as_json)


def _export_repository(
    run_dir: Path,
    challenge: Challenge,
    info: SubmissionInfo,
    folder: Path,
    as_json: bool,
    repo_id: str,
    base_model: str | None,
    task2: Path | None,
    probes: Sequence[str],
) -> None:
    """Write the files that a repository needs besides the adapter, and name the commands that submit it."""
    check_launch()
    with only_results_on_stdout():
        from lookonce.adapter.card import find_base_model
        from lookonce.adapter.challenge import FILES, PROBES, task1_files, task2_files
        from lookonce.eval.answerer import Answerer
        from lookonce.eval.submission import RULES, lacking
        from lookonce.files import create_text
        from lookonce.run.open import Needs, open_run

    if task2 and challenge != "medico":
        raise UsageError(f"--task2 writes the form of medico, and task 2 of {challenge} asks for another; leave it out")
    tasks = (1, 2) if task2 else (1,)
    for path in (folder / name for task in tasks for name in FILES[task]):
        if path.exists():
            raise UsageError(f"{path} exists; name another folder with --repo, or remove it")
    opened = open_run(run_dir, Needs("lookonce export", adapter=True, recorded=True))
    base = find_base_model(opened.run.model, base_model)
    files = task1_files(opened.run, base, repo_id, challenge, info)
    if task2:
        files |= task2_files(Answerer.open(opened.folder.folder), task2, probes or PROBES, info, notify)
    for name, text in files.items():
        create_text(folder / name, text)
    pushed = ["--base-model", base_model] if base_model else []
    validate = ["medvqa", "validate", f"--competition={RULES[challenge].competition}"]
    commands = [
        shell("lookonce", "adapter", "push", run_dir, repo_id, *pushed),
        shell("hf", "upload", repo_id, folder),
        *(shell(*validate, f"--task={task}", f"--repo_id={repo_id}") for task in tasks),
    ]
    names = sorted(files)
    emit({"repo": str(folder), "files": names, "next": commands}, f"wrote {listed(names)} to {folder}", as_json)
    for note in lacking(info):
        notify(note)
    notify("\n  ".join(["next:", *commands]))
