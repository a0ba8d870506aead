"""A training from start to end: open what it reads, train, save the adapter, evaluate, summarise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lookonce.cache.store.uses import note_use
from lookonce.datasets.records import Record
from lookonce.errors import RunFolderError, UsageError
from lookonce.files import follow_umask, write_json, write_text
from lookonce.train.bench_step import StepReport, bench_step
from lookonce.train.evaluate import Evaluation, Majority, Prediction, greedy_answers, shuffle_images
from lookonce.train.fast_layers import training_on_packs
from lookonce.train.inputs import Inputs
from lookonce.train.model import PRECISIONS, add_lora, load_trained, load_without_tower
from lookonce.train.progress import StepLines
from lookonce.train.run_file import RunFile
from lookonce.train.run_folder import RunFolder
from lookonce.train.session import Session, make_trainer
from lookonce.train.summary import Summary, Trained, summarise
from lookonce.train.trainer import training_arguments
from lookonce.train.ways import find_ways, way_of

Say = Callable[[str], None]


def train(run: RunFile, *, resume: bool = False, restart: bool = False, say: Say = print) -> Summary:
    """Train what a run file says; gives the summary, which is also in the run's folder.

    A finished run is not trained again. `resume` goes on from the last checkpoint, `restart` moves what is there away
    first. Needs the cache; `say` gets notes for a person.

    Raises:
        LookonceError: anything a user can mend.
    """
    folder, inputs = RunFolder(run.output), Inputs.open(run)
    identity = inputs.identity()
    if not restart:
        folder.check(run, identity)
        if folder.is_finished:
            say(f"{run.output} is trained already; what follows was measured then (--restart trains it anew)")
            return Summary.read(folder)
        if folder.last_checkpoint and not resume:
            raise RunFolderError(
                f"{run.output} holds this run, unfinished, with {folder.last_checkpoint.name}; "
                "add --resume to go on from there, or --restart to begin anew"
            )
    session = Session.open(inputs)
    if run.cache.stage and run.cache.stage not in session.cache.folder.parents:
        say(f"no complete copy of the cache in {run.cache.stage}; reads {session.cache.folder}")
    if (run.train.precision, run.cache.dtype) == ("fp32", "bfloat16"):
        say("features are stored in bfloat16, so this fp32 training sees them rounded; cache.dtype: float32 keeps them")
    training_arguments(run, folder.checkpoints)  # all that can be refused is refused before the folder is touched
    if restart and (moved := folder.move_away()):
        say(f"moved the run that was there to {moved}")
    folder.claim(run, identity)
    note_use(inputs.cache_folder, run.output)
    trained, model = _train(session, folder, say)
    evaluation = evaluate(session, model, run.eval.split) if inputs.records[run.eval.split] else None
    if evaluation:
        save_evaluation(folder, run.eval.split, evaluation)
    del model
    summary = summarise(inputs, session.cache, trained, evaluation, _compare(session, say))
    write_json(folder.folder / "summary.json", summary.to_json())
    return summary


def _train(session: Session, folder: RunFolder, say: Say) -> tuple[Trained, Any]:
    run, inputs = session.inputs.run, session.inputs
    examples, num_too_long = session.examples("train")
    held_out, num_held_out_too_long = session.examples("val") if inputs.records["val"] else ([], 0)
    for split, number in (("train", num_too_long), ("val", num_held_out_too_long)):
        if number:
            num_records = len(inputs.records[split])
            say(f"left out {number} of {num_records} {split} records, longer than {run.batch.longest_record} tokens")
    model = load_without_tower(inputs.checkpoint, PRECISIONS[run.train.precision], run.model.attention)
    model = add_lora(model, inputs.checkpoint, run.lora, run.train.seed)
    lines = StepLines(folder.log, run.batch.samples_per_step)
    trainer = make_trainer(session, model, training_arguments(run, folder.checkpoints), examples, held_out, [lines])
    lines.attach(trainer)
    checkpoint = folder.last_checkpoint
    if checkpoint:
        say(f"going on from {checkpoint.name}")
    with training_on_packs(model, compiled=run.train.compile and torch.cuda.is_available()):
        result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    model.save_pretrained(str(folder.adapter))
    follow_umask(folder.folder)
    trained = Trained(
        num_steps=result.global_step,
        first_step=lines.first_step,
        num_samples=round(len(examples) * float(trainer.state.epoch or 0)),
        num_too_long=num_too_long,
        seconds=float(result.metrics["train_runtime"]),
        wait_share=lines.wait_share,
    )
    return trained, model


def evaluate(session: Session, model: Any, split: str, records: Sequence[Record] | None = None) -> Evaluation:
    """Ask every question of a split, or of `records`, and score the answers.

    Raises:
        UsageError: the split has no records.
    """
    records = session.inputs.records[split] if records is None else records
    if not records:
        raise UsageError(f"the run file names no records for `data.{split}`; add them or choose another --split")
    majority = Majority(session.inputs.records["train"])
    asked = [(record, number) for record in records for number in range(len(record.turns))]
    questions = [session.question(record, number) for record, number in asked]
    options = session.inputs.run.eval
    tokenizer, collator = session.prompter.tokenizer, session.collator
    answers = greedy_answers(
        model,
        tokenizer,
        collator,
        questions,
        options.max_new_tokens,
        options.batch_size,
        session.inputs.run.train.precision,
    )
    predictions = [
        Prediction(
            origin=record.origin,
            image=str(record.images[0]) if record.images else "",
            question=record.turns[number].question,
            answer=record.turns[number].answer,
            predicted=answer,
            majority=majority.answer(record.turns[number].question),
        )
        for (record, number), answer in zip(asked, answers, strict=True)
    ]
    return Evaluation.of(predictions)


def evaluate_run(run_dir: Path, split: str | None = None, shuffled: bool = False) -> tuple[Evaluation, Path]:
    """Evaluate a finished run on a split; gives the scores and where the predictions were written.

    `run_dir` is the run's folder or its run file; `shuffled` shows every question another image of the split.

    Raises:
        LookonceError: the folder is no finished run, or something that it reads has gone.
    """
    folder = RunFolder.find(run_dir)
    run = folder.read_run()
    inputs = Inputs.open(run)
    identity = inputs.identity()
    folder.check_inputs({name: identity[name] for name in ("model", "cache")})  # other questions may be asked
    session = Session.open(inputs)
    split = split or run.eval.split
    records = inputs.records[split]
    model = load_trained(inputs.checkpoint, run, folder.adapter)
    evaluation = evaluate(session, model, split, shuffle_images(records, inputs.images) if shuffled else records)
    name = f"{split}-shuffled" if shuffled else split
    save_evaluation(folder, name, evaluation)
    return evaluation, folder.predictions(name)


def save_evaluation(folder: RunFolder, split: str, evaluation: Evaluation) -> None:
    """Write predictions and metrics into the run's folder."""
    lines = [json.dumps(prediction.to_json(), ensure_ascii=False) for prediction in evaluation.predictions]
    write_text(folder.predictions(split), "".join(f"{line}\n" for line in lines))
    write_json(folder.metrics(split), evaluation.to_json())


def _compare(session: Session, say: Say) -> StepReport | None:
    num_steps = session.inputs.run.train.compare_steps
    if not num_steps:
        return None
    say(f"measuring {num_steps} steps, the plain way and as trained")
    return bench_step(
        session, session.examples("train")[0], find_ways(["plain", way_of(session.inputs.run)]), num_steps
    )
