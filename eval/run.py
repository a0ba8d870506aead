"""Evaluate a run: answer the questions of a split, score the answers, write predictions and metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookonce.datasets.majority import Majority
from lookonce.datasets.records import Record
from lookonce.errors import UsageError
from lookonce.eval.answers.generate import greedy_answers, shuffle_images
from lookonce.eval.scores.metrics import Evaluation, Prediction
from lookonce.files import write_json, write_text
from lookonce.run.config import read_run_file
from lookonce.run.folder import RunFolder
from lookonce.run.inputs import RunInputs
from lookonce.train.loop.session import Session
from lookonce.train.model.load import load_trained


def evaluate(session: Session, model: Any, split: str, records: Sequence[Record] | None = None) -> Evaluation:
    """Answer every question of a split, or of `records`, and score the answers.

    Raises:
        UsageError: the split has no records.
    """
    records = session.inputs.records[split] if records is None else records
    if not records:
        raise UsageError(f"the run file names no records for `data.{split}`; add them or choose another --split")
    majority = Majority.of_records(session.inputs.records["train"])
    asked = [(record, number) for record in records for number in range(len(record.turns))]
    questions = [session.question(record, number) for record, number in asked]
    options = session.inputs.run.eval
    answers = greedy_answers(
        model,
        session.chat_tokenizer.tokenizer,
        session.collator,
        questions,
        options.max_new_tokens,
        options.batch_size,
        session.inputs.run.train.precision,
    )
    return Evaluation.of(
        [
            Prediction(
                origin=record.origin,
                images=tuple(map(str, record.images)),
                question=record.turns[number].question,
                answer=record.turns[number].answer,
                predicted=answer,
                majority=majority.answer(record.turns[number].question),
                references=record.references,
            )
            for (record, number), answer in zip(asked, answers, strict=True)
        ]
    )


def evaluate_run(run_dir: Path, split: str | None = None, shuffled: bool = False) -> tuple[Evaluation, Path]:
    """Evaluate a trained run on a split; returns the scores and the path of the predictions.

    `run_dir` is the run folder, or the current run file, whose paths and `eval` section may have changed since
    training. `shuffled` gives every question another image of the split.

    Raises:
        LookonceError: the folder does not hold a trained run, or an input is missing.
    """
    folder = RunFolder.find(run_dir)
    run = folder.read_run()
    if run_dir.is_file():
        run = read_run_file(run_dir)
        folder.check(run, {})
    inputs = RunInputs.open(run)
    identity = inputs.identity()
    folder.check_inputs({name: identity[name] for name in ("model", "cache")})  # records may have changed
    session = Session.open(inputs)
    split = split or run.eval.split
    records = inputs.records[split]
    model = load_trained(inputs.model_folder, run, folder.adapter)
    evaluation = evaluate(session, model, split, shuffle_images(records, inputs.images) if shuffled else records)
    name = f"{split}-shuffled" if shuffled else split
    save_evaluation(folder, name, evaluation)
    return evaluation, folder.predictions(name)


def save_evaluation(folder: RunFolder, split: str, evaluation: Evaluation) -> None:
    """Write predictions and metrics into the run folder."""
    lines = [json.dumps(prediction.to_json(), ensure_ascii=False) for prediction in evaluation.predictions]
    write_text(folder.predictions(split), "".join(f"{line}\n" for line in lines))
    write_json(folder.metrics(split), evaluation.to_json())
