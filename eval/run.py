"""Evaluate a run: answer the questions of a split, score the answers, write predictions and metrics.

A run's own answers and those of its baselines are evaluations of the same kind, in files of different names. Several in
one go load the model once, when the first answer is missing; the untuned model is the same one with its adapter
switched off. The run's own answers come last, when all baselines are known. Each stage of `data.context` is a pass.

Answers of an evaluation that has ended are used again if `answering/NAME.json` has the identity of what they depended
on, apart from the machine. References, labels and majority answers are those of the records now. The file of an
unfinished evaluation does not count, as it may be that of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from lookonce.errors import UsageError
from lookonce.eval.answers.files import Answered, AnsweringCost, PartialAnswers
from lookonce.eval.answers.questions import Questions, on_this_machine, questions_for, row_of, why_not
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.scores.metric import check_metric, working_scorer
from lookonce.eval.scores.metrics import BASELINES, IN_CONTEXT, Baseline, Evaluation
from lookonce.files import write_json
from lookonce.run.open import TO_EVALUATE, OpenRun, open_run
from lookonce.run.records import HELD_OUT
from lookonce.text import Notify, quiet
from lookonce.train.loop.distributed import ALONE, Ranks
from lookonce.train.loop.session import compile_cache
from lookonce.train.model.load import load_trained, load_untuned, without_adapter

Open = Callable[[], AbstractContextManager[Any]]
"""Loads the model, if it is not loaded, and makes it the one that answers within the block."""
Baselines = tuple[Baseline, ...] | Literal["all"]
"""The baselines that are asked: some by name, or all that have a meaning for the run."""
UNTUNED: Baselines = ("untuned",)
"""The baseline that needs no training."""


def evaluate(
    questions: Questions, open_model: Open, ranks: Ranks = ALONE, *, reuses: bool = False
) -> Evaluation | None:
    """Answer questions, and write and return scores (None on all ranks but the first); continues what was interrupted.

    `open_model` is called when the run folder is known to be writable, and only if answers are missing. With `reuses`
    the answers of an evaluation that has ended are taken from its files. The ranks share the batches.
    """
    opened, once, notify = questions.opened, ranks.first_decides, questions.opened.notify
    if reuses and (predictions := once(questions.known_predictions)) is not None:
        notify(f"{questions.name}: the answers are on disk, and are used again")
        return questions.save(predictions) if ranks.is_first else None
    cost = AnsweringCost(identity=once(questions.identity))
    answers: dict[int, Answer] = {}
    unfinished = []
    with ExitStack() as stack, compile_cache(opened, notify).in_use():
        model = cache(lambda: stack.enter_context(open_model()))
        for number, stage in enumerate(questions.stages):
            part = questions.at_stage(number, answers)
            identity = cost.identity if part is questions else once(part.identity)
            machine_identity = once(partial(on_this_machine, identity))
            folder = opened.folder.predictions(part.name).parent
            unfinished.append(PartialAnswers(folder, part.name, machine_identity, ranks.rank))
            answered = answered_batches(part, unfinished[-1], cost, model, ranks)
            answers |= {stage[index]: answer for index, answer in part.of_questions(answered).items()}
    if not ranks.is_first:
        return None
    evaluation = questions.save(questions.after_all(answers).predictions(answers))
    write_json(opened.folder.answering(questions.name), asdict(cost))
    for answers_file in reversed(unfinished):
        answers_file.remove()
    return evaluation


def answered_batches(
    questions: Questions, unfinished: PartialAnswers, cost: AnsweringCost, model: Callable[[], Any], ranks: Ranks
) -> Answered:
    """Give the answers that are missing; returns those of all ranks."""
    owner, notify = questions.opened.owner, questions.opened.notify
    owner.check()
    answered = ranks.first_decides(unfinished.read)
    missing = [number for number in range(len(questions.batches)) if number not in answered]
    if answered:
        before, of_all = questions.num_in(answered), questions.num_in(range(len(questions.batches)))
        notify(f"continuing an evaluation: {before:,} of {of_all:,} questions were answered before")
    with unfinished:
        if assigned := missing[ranks.rank :: ranks.num_ranks]:
            loaded = model()
            with cost.measure(questions.num_in(assigned)):
                for number, answers in questions.answer(loaded, assigned, shows_progress=ranks.is_first):
                    owner.check()
                    unfinished.add(number, answers)
                    answered[number] = answers
    by_rank = ranks.gather_for_all(answered)
    return {number: answers for rank_answers in by_rank for number, answers in rank_answers.items()}


def evaluate_run(
    run_dir: Path,
    split: str | None = None,
    baselines: Baselines = (),
    *,
    assignments: Sequence[str] = (),
    verify_images: bool = False,
    notify: Notify = quiet,
) -> tuple[Evaluation, Path] | None:
    """Evaluate a trained run on a split; returns the scores and the path of the predictions.

    Under torchrun the ranks share the questions, and all but the first return None.

    `run_dir` is the run folder, or the current run file, whose paths and `eval` section may have changed since
    training; `assignments` such as "eval.max_new_tokens=8" replace its values. One baseline is evaluated instead of the
    run; of several those whose answers are not on disk, and the run beside them. For the untuned model alone the run
    need not be trained. `verify_images` reads all images and compares them with the cache. `notify` gets notes on the
    records, such as those that were left out.

    Raises:
        LookonceError: the folder does not hold a trained run or is in use, or an input is missing.
    """
    ranks = Ranks.join()
    with opened_questions(run_dir, split, baselines, ranks, assignments, verify_images, notify) as questions:
        opened = questions.opened
        named = _meaningful_baselines(questions) if isinstance(baselines, str) else baselines
        if reasons := list(filter(None, (why_not(questions, baseline) for baseline in named))):
            raise UsageError(reasons[0])
        is_beside = baselines == "all" or len(baselines) > 1
        open_model = model_of(opened, is_shared=is_beside)
        for baseline in (*named, None) if is_beside else named or (None,):
            baseline_questions = questions_for(questions, baseline)
            done = evaluate(baseline_questions, partial(open_model, baseline), ranks, reuses=is_beside)
        return (done, opened.folder.predictions(baseline_questions.name)) if done else None


@contextmanager
def opened_questions(
    run_dir: Path,
    split: str | None,
    baselines: Baselines,
    ranks: Ranks,
    assignments: Sequence[str],
    verify_images: bool,
    notify: Notify,
) -> Iterator[Questions]:
    """Open a run, with an adapter unless the untuned model alone is asked; gives the questions of a split."""
    images: Literal["hashed", "cached"] = "hashed" if verify_images else "cached"
    needs = replace(TO_EVALUATE, adapter=baselines != UNTUNED, images=images)
    notify = notify if ranks.is_first else quiet
    with open_run(run_dir, needs, assignments, once=ranks.first_decides, notify=notify) as opened:
        for note in opened.notes:
            notify(note)
        yield _questions(opened, split or opened.run.eval.split, ranks)


def _questions(opened: OpenRun, split: str, ranks: Ranks) -> Questions:
    """The questions of a split, for the model that was trained in the folder; an untrained run is recorded."""
    metric, records = opened.run.eval.metric, opened.records.get(split) or ()
    check_metric(metric)
    if rows := [row_of(record, turn, ()) for record in records for turn in range(len(record.turns))]:
        working_scorer(rows, metric, f"the questions of {split}")
    folder, identity = opened.folder, ranks.first_decides(opened.identity)
    if not (opened.needs.adapter or folder.holds_work):
        ranks.first_decides(lambda: folder.claim(opened.run, identity))
    may_change = {"context", "answers"}
    if split != HELD_OUT:  # its model must not have been trained on an image of them
        may_change.add("records")
    folder.check_inputs({name: value for name, value in identity.items() if name not in may_change})
    return Questions.of(opened, split)


def _meaningful_baselines(questions: Questions) -> tuple[Baseline, ...]:
    """All baselines that have a meaning for some questions; a note says why others have none."""
    every = (*BASELINES, *(IN_CONTEXT if questions.opened.run.data.context else ()))
    reasons = {baseline: why_not(questions, baseline) for baseline in every}
    for reason in filter(None, reasons.values()):
        questions.opened.notify(f"{reason}; this baseline is left out")
    return tuple(baseline for baseline, reason in reasons.items() if not reason)


def model_of(opened: OpenRun, is_shared: bool) -> Callable[[Baseline | None], AbstractContextManager[Any]]:
    """The model of each baseline; if it `is_shared` by them, all are the trained one, which is loaded once."""
    model, run = opened.model_folder, opened.run
    trained = cache(lambda: load_trained(model, run, opened.folder.adapter))

    def open_model(baseline: Baseline | None) -> AbstractContextManager[Any]:
        if baseline != "untuned":
            return nullcontext(trained())
        return without_adapter(trained()) if is_shared else nullcontext(load_untuned(model, run))

    return open_model
