"""A training from start to end: open what it reads, train, save the adapter, evaluate, summarise."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from lookonce.datasets.records import Record
from lookonce.errors import Stopped, UsageError
from lookonce.files import follow_umask, write_json, write_text
from lookonce.train.begin import Say, claim, is_finished
from lookonce.train.bench_step import bench_step
from lookonce.train.evaluate import greedy_answers, shuffle_images
from lookonce.train.fast_layers import training_on_packs
from lookonce.train.heartbeat import Heartbeat
from lookonce.train.inputs import Inputs
from lookonce.train.model import PRECISIONS, add_lora, load_trained, load_without_tower
from lookonce.train.progress import StepLines
from lookonce.train.prompt import Example
from lookonce.train.ranks import Ranks
from lookonce.train.run_file import RunFile, read_run_file
from lookonce.train.run_folder import RunFolder
from lookonce.train.scores import Evaluation, Majority, Prediction
from lookonce.train.session import Session, make_trainer
from lookonce.train.sharding import is_sharded, shard_frozen
from lookonce.train.step_report import StepReport
from lookonce.train.stopping import GO_ON, StopAfterStep
from lookonce.train.summary import Summary, Trained, summarise
from lookonce.train.trainer import training_arguments
from lookonce.train.ways import find_ways, way_of


def train(run: RunFile, *, resume: bool = False, restart: bool = False, say: Say = print) -> Summary | None:
    """Train what a run file says; gives the summary, which is also in the run's folder.

    A finished run is not trained again. `resume` goes on from the last checkpoint, `restart` moves what is there away
    first. Needs the cache; `say` gets notes for a person. Started by torchrun it gives None on all ranks but the first,
    which alone evaluates the adapter.

    Raises:
        Stopped: a signal asked for it; the step in work is saved.
        LookonceError: anything else a user can mend.
    """
    folder = RunFolder(run.output)
    arguments = training_arguments(run, folder.checkpoints)  # what can be refused is refused before all work
    ranks = Ranks.of(arguments)
    say = say if ranks.is_first else _silent
    inputs = Inputs.open(run)
    identity = ranks.first_decides(inputs.identity)
    if not restart and ranks.first_decides(lambda: is_finished(folder, inputs, identity, resume)):
        say(f"{run.output} is trained already; what follows was measured then (--restart trains it anew)")
        return Summary.read(folder) if ranks.is_first else None
    session = Session.open(inputs)
    _warn(session, ranks, say)
    begin = ranks.first_decides(lambda: claim(folder, inputs, identity, restart, say))
    with Heartbeat(folder.progress, run.batch.samples_per_step, ranks.is_first) as heartbeat:
        model = (
            None if begin.is_trained else _train(session, folder, arguments, ranks, begin.checkpoint, heartbeat, say)
        )
        if not ranks.is_first:
            return None
        heartbeat.enter("evaluating")
        evaluation = _evaluate_trained(session, folder, model, say)
        del model
        trained = Trained(**json.loads(folder.trained.read_text()))
        summary = summarise(inputs, session.cache, trained, evaluation, _compare(session, ranks, say))
        write_json(folder.folder / "summary.json", summary.to_json())
    return summary


def _silent(note: str) -> None:
    """What ranks say but the first."""


def _warn(session: Session, ranks: Ranks, say: Say) -> None:
    run = session.inputs.run
    if run.train.fsdp and ranks.number == 1:
        say("train.fsdp spreads the model over several processes, started by torchrun; here is one, and it is whole")
    if run.cache.stage and run.cache.stage not in session.cache.folder.parents:
        say(f"no complete copy of the cache in {run.cache.stage}; reads {session.cache.folder}")
    if (run.train.precision, run.cache.dtype) == ("fp32", "bfloat16"):
        say("features are stored in bfloat16, so this fp32 training sees them rounded; cache.dtype: float32 keeps them")


def _train(
    session: Session,
    folder: RunFolder,
    arguments: TrainingArguments,
    ranks: Ranks,
    checkpoint: Path | None,
    heartbeat: Heartbeat,
    say: Say,
) -> Any:
    """Train and save the adapter; gives the model, unless its weights are spread over the ranks."""
    run, inputs = session.inputs.run, session.inputs
    examples, num_too_long = _examples(session, "train", say)
    held_out, _ = _examples(session, "val", say) if inputs.records["val"] else ([], 0)
    model = load_without_tower(inputs.checkpoint, PRECISIONS[run.train.precision], run.model.attention)
    model = add_lora(model, inputs.checkpoint, run.lora, run.train.seed)
    if run.train.fsdp and ranks.number > 1:
        model = shard_frozen(model, arguments.device)
    lines, stop = StepLines(folder.log, run.batch.samples_per_step), StopAfterStep(ranks)
    trainer = make_trainer(session, model, arguments, examples, held_out, [lines, stop, heartbeat], say=say)
    lines.attach(trainer)
    with stop.heeding():
        compiled = run.train.compile and torch.cuda.is_available()
        packs = training_on_packs(model, compiled=compiled) if run.batch.has_packs else contextlib.nullcontext()
        with packs:
            result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        ranks.part()
        if not ranks.is_first:
            return model
        model.save_pretrained(str(folder.adapter))
        for written in (folder.checkpoints, folder.adapter):
            follow_umask(written)
        trained = Trained(
            num_steps=result.global_step,
            first_step=lines.first_step,
            num_samples=round(len(examples) * float(trainer.state.epoch or 0)),
            num_too_long=num_too_long,
            seconds=float(result.metrics["train_runtime"]),
            wait_share=lines.wait_share,
        )
        write_json(folder.trained, asdict(trained))
    if stop.signal:
        raise Stopped(f"stopped by {stop.signal.name} after the last step; the adapter is saved; {GO_ON}: it evaluates")
    return None if is_sharded(model) else model


def _examples(session: Session, split: str, say: Say) -> tuple[list[Example], int]:
    examples, num_too_long = session.examples(split)
    if num_too_long:
        limit, num_records = session.inputs.run.batch.longest_record, len(session.inputs.records[split])
        say(f"left out {num_too_long} of {num_records} {split} records, longer than {limit} tokens")
    return examples, num_too_long


def _evaluate_trained(session: Session, folder: RunFolder, model: Any, say: Say) -> Evaluation | None:
    """Evaluate what was trained, which is `model` or lies in the run's folder; None if that can not be."""
    inputs, split = session.inputs, session.inputs.run.eval.split
    if not inputs.records[split]:
        return None
    try:
        evaluation = evaluate(session, model or load_trained(inputs.checkpoint, inputs.run, folder.adapter), split)
    except torch.OutOfMemoryError:
        if not inputs.run.train.fsdp:
            raise
        say(f"the model does not fit one GPU to answer questions; on a larger one: lookonce eval {folder.folder}")
        return None
    save_evaluation(folder, split, evaluation)
    return evaluation


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
            images=tuple(map(str, record.images)),
            question=record.turns[number].question,
            answer=record.turns[number].answer,
            predicted=answer,
            majority=majority.answer(record.turns[number].question),
            references=record.references,
        )
        for (record, number), answer in zip(asked, answers, strict=True)
    ]
    return Evaluation.of(predictions)


def evaluate_run(run_dir: Path, split: str | None = None, shuffled: bool = False) -> tuple[Evaluation, Path]:
    """Evaluate a finished run on a split; gives the scores and where the predictions were written.

    `run_dir` is the run's folder, or its run file as it is now: where data and cache lie and what is asked may have
    changed since. `shuffled` shows every question another image of the split.

    Raises:
        LookonceError: the folder is no finished run, or something that it reads has gone.
    """
    folder = RunFolder.find(run_dir)
    run = folder.read_run()
    if run_dir.is_file():
        run = read_run_file(run_dir)
        folder.check(run, {})
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


def _compare(session: Session, ranks: Ranks, say: Say) -> StepReport | None:
    num_steps = session.inputs.run.train.compare_steps
    if num_steps and ranks.number > 1:
        say("train.compare_steps measures one process and is left out; compare with: lookonce bench step")
    if not num_steps or ranks.number > 1:
        return None
    say(f"measuring {num_steps} steps, the plain way and as trained")
    ways = find_ways(["plain", way_of(session.inputs.run)])
    *_, report = bench_step(session, session.examples("train")[0], ways, num_steps)
    return report
