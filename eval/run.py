"""Evaluate a run: answer the questions of a split, score the answers, write predictions and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lookonce.eval.answers.cost import AnsweringCost
from lookonce.eval.answers.generate import shuffle_images
from lookonce.eval.answers.partial import PartialAnswers
from lookonce.eval.answers.questions import Questions
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import write_predictions
from lookonce.files import write_json
from lookonce.run.claim import RunClaim
from lookonce.run.config import RunFile, read_run_file
from lookonce.run.folder import RunFolder
from lookonce.run.inputs import RunInputs
from lookonce.text import Notify, quiet
from lookonce.train.loop.distributed import ALONE, Ranks
from lookonce.train.loop.session import Session
from lookonce.train.model.load import check_adapter, load_trained


def evaluate(
    questions: Questions,
    name: str,
    owner: RunClaim,
    load: Callable[[], Any],
    ranks: Ranks = ALONE,
    notify: Notify = quiet,
) -> Evaluation | None:
    """Answer questions with a run's adapter and write predictions and scores as `name`; continues an interrupted one.

    `load` returns the model. It is called when the run folder is known to be writable, and only if answers are missing.
    The ranks share the batches.

    Returns:
        The scores; None on all ranks but the first.
    """
    folder = RunFolder(owner.folder)
    identity = ranks.first_decides(lambda: questions.identity(folder))
    partial = PartialAnswers(folder.predictions(name).parent, name, identity, ranks.rank)
    owner.check()
    answered = ranks.first_decides(partial.read)
    missing = [number for number in range(len(questions.batches)) if number not in answered]
    if answered:
        num_answered = questions.num_in(answered)
        notify(f"continuing an evaluation: {num_answered:,} of {len(questions.asked):,} questions were answered before")
    cost = AnsweringCost()
    with partial:
        if mine := missing[ranks.rank :: ranks.num_ranks]:
            model = load()
            with cost.measure(questions.num_in(mine)):
                for number, answers in questions.answer(model, mine, shows_progress=ranks.is_first, notify=notify):
                    owner.check()
                    partial.add(number, answers)
                    answered[number] = answers
    answered_by_all = ranks.gather(answered)
    if answered_by_all is None:
        return None
    evaluation = questions.score({number: texts for some in answered_by_all for number, texts in some.items()})
    owner.check()
    save_evaluation(folder, name, evaluation)
    write_json(folder.answering(name), asdict(cost))
    partial.remove()
    return evaluation


def evaluate_run(
    run_dir: Path,
    split: str | None = None,
    shuffled: bool = False,
    *,
    verify_images: bool = False,
    notify: Notify = quiet,
) -> tuple[Evaluation, Path] | None:
    """Evaluate a trained run on a split; returns the scores and the path of the predictions.

    Under torchrun the ranks share the questions, and all but the first return None.

    `run_dir` is the run folder, or the current run file, whose paths and `eval` section may have changed since
    training. `shuffled` gives every question another image of the split. `verify_images` reads all images and compares
    them with the cache. `notify` gets notes on the records, such as those that were left out.

    Raises:
        LookonceError: the folder does not hold a trained run or is in use, or an input is missing.
    """
    ranks = Ranks.join()
    folder, run = ranks.first_decides(lambda: _find(run_dir))
    with RunClaim(folder.folder, "lookonce eval", run.cache.claim_s) as owner:
        ranks.first_decides(owner.take)
        if verify_images:
            inputs = RunInputs.open(run, skip_unusable=True)
        else:
            inputs = RunInputs.from_cache(run, ranks.first_decides)
        notify = notify if ranks.is_first else quiet
        for note in inputs.notes:
            notify(note)
        return _evaluate(folder, inputs, owner, split, shuffled, ranks, notify)


def _find(run_dir: Path) -> tuple[RunFolder, RunFile]:
    folder = RunFolder.find(run_dir)
    run = folder.read_run()
    if run_dir.is_file():
        run = read_run_file(run_dir)
        folder.check(run, {})
    return folder, run


def _evaluate(
    folder: RunFolder,
    inputs: RunInputs,
    owner: RunClaim,
    split: str | None,
    shuffled: bool,
    ranks: Ranks,
    notify: Notify,
) -> tuple[Evaluation, Path] | None:
    run = inputs.run
    identity = ranks.first_decides(lambda: inputs.identity(folder.recorded_inputs()))
    folder.check_inputs({name: value for name, value in identity.items() if name != "records"})  # these may change
    check_adapter(folder.adapter)
    session = Session.open(inputs)
    owner.use_cache(session.cache.folder)
    split = split or run.eval.split
    records = inputs.records[split]
    questions = Questions.of(session, split, shuffle_images(records, inputs.images) if shuffled else records)
    name = f"{split}-shuffled" if shuffled else split
    evaluation = evaluate(
        questions, name, owner, lambda: load_trained(inputs.model_folder, run, folder.adapter), ranks, notify
    )
    return (evaluation, folder.predictions(name)) if evaluation else None


def save_evaluation(folder: RunFolder, split: str, evaluation: Evaluation) -> None:
    """Write predictions and metrics into the run folder."""
    write_predictions(folder.predictions(split), evaluation.predictions)
    write_json(folder.metrics(split), evaluation.to_json())
