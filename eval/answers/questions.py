"""The questions of an evaluation, in the batches that its engine answers together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from tqdm import tqdm

from lookonce.datasets.records import Context, Turn
from lookonce.errors import UsageError
from lookonce.eval.answers.dialogues import Asked, Dialogues, turns_before
from lookonce.eval.answers.engines import Engine, engine_of
from lookonce.eval.answers.partial import Answered
from lookonce.eval.answers.rows import unanswered
from lookonce.eval.answers.staged import (
    Staged,
    in_context,
    questions_of,
    stages_of,
    true_before,
    with_true_answers,
)
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.scores.counts import training_answers
from lookonce.eval.scores.headline import Baseline, BaselineAnswers
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import Prediction
from lookonce.files import hash_file
from lookonce.run.folder import Environment
from lookonce.run.open import OpenRun
from lookonce.text import Notify, quiet
from lookonce.train.data.tokenize import Example
from lookonce.train.model.frozen.choice import model_settings

NOT_OF_ANSWERS = {"split", "staged", "every", "max_questions", "frozen"}
"""Keys of `eval` that answers do not depend on, or that their identity has in another form."""


@dataclass(frozen=True)
class Questions:
    """Questions that a run's model is asked."""

    opened: OpenRun
    split: str
    dialogues: Dialogues
    engine: Engine
    waves: list[list[int]]
    """The numbers of the dialogues that are answered together."""
    staged: Staged = "none"
    """Whose answers the contexts have; the model's own are not in these prompts, but in those of each stage."""
    baseline: Baseline | None = None
    """The baseline that is asked them; None for the run itself."""
    stage: int = 0
    """The number of the stage that they are, from 0."""

    @classmethod
    def of(cls, opened: OpenRun, split: str, staged: Staged | None = None) -> Questions:
        """All questions of a split, with contexts as `staged` or `eval.staged` says.

        Raises:
            UsageError: there are none.
        """
        records, run = opened.records.get(split), opened.run
        if records is None:
            raise UsageError("the run has no held-out records: `data.held_out` leaves no training record out")
        if not records:
            raise UsageError(f"the run file names no records for `data.{split}`; add them or choose another --split")
        staged = (staged or run.eval.staged) if run.data.context else "none"
        dialogues, engine = Dialogues.of(opened, questions_of(opened, records, staged)), engine_of(opened)
        return cls(opened, split, dialogues, engine, dialogues.plan(engine), staged)

    @property
    def stages(self) -> list[list[int]]:
        """The numbers of the questions of each stage; all are one unless contexts have own answers."""
        return stages_of(self.opened, self.asked, self.staged)

    def at_stage(self, stage: int, answers: Mapping[int, Answer]) -> Questions:
        """The questions of a stage, with the answers to those of earlier stages.

        Their engine is a new one, so that answers do not depend on the stages that it has answered before.
        """
        stages = self.stages
        if len(stages) == 1:
            return self
        asked = in_context(self.opened, self.asked, stages[stage], answers)
        dialogues, engine = Dialogues.of(self.opened, asked), engine_of(self.opened)
        return replace(self, dialogues=dialogues, engine=engine, waves=dialogues.plan(engine), stage=stage)

    def after_all(self, answers: Mapping[int, Answer]) -> Questions:
        """All questions with the prompts in which they were answered."""
        if self.staged != "own":
            return self
        asked = in_context(self.opened, self.asked, range(len(self.asked)), answers)
        return replace(self, dialogues=Dialogues.of(self.opened, asked))

    @property
    def asked(self) -> list[Asked]:
        """Record and turn of each question."""
        return self.dialogues.asked

    @property
    def examples(self) -> list[Example]:
        """The prompt of each question."""
        return self.dialogues.prompts

    @cached_property
    def batches(self) -> list[list[int]]:
        """The numbers of the questions that are answered together."""
        return [self.dialogues.questions(wave) for wave in self.waves]

    @property
    def name(self) -> str:
        """The name of their files in the run folder; later stages have files of partial answers alone."""
        return self.name_of(self.baseline) + (f"-stage-{self.stage + 1}" if self.stage else "")

    def name_of(self, baseline: Baseline | None) -> str:
        """The name of a baseline's files: `test-untuned`."""
        return f"{self.split}-{baseline}" if baseline else self.split

    def num_in(self, batches: Iterable[int]) -> int:
        """The number of questions in some batches."""
        return sum(len(self.batches[number]) for number in batches)

    def answer(
        self, model: Any, batches: Sequence[int], *, shows_progress: bool = True, notify: Notify = quiet
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Answer some batches with a model, which may have an adapter; yields each one's number and answers."""
        with _bar(self.num_in(batches), disable=None if shows_progress else True) as progress:
            waves = [self.waves[number] for number in batches]
            given = self.dialogues.answer(self.engine, model, waves, notify)
            for number, answers in zip(batches, given, strict=True):
                yield number, answers
                progress.update(len(answers))

    def of_questions(self, answered: Answered) -> dict[int, Answer]:
        """The answers of all batches, by the number of their question."""
        batches = [zip(batch, answered[number], strict=True) for number, batch in enumerate(self.batches)]
        return {question: answer for batch in batches for question, answer in batch}

    def predictions(self, answers: Mapping[int, Answer]) -> list[Prediction]:
        """The answers to all questions, each in the row of its question, in order."""
        special = self.opened.chat_tokenizer.special_token_ids
        earlier = turns_before(self.asked, self.dialogues.numbers, answers, special)
        rows = self._rows(self.asked, [earlier[number] for number in range(len(answers))])
        return [
            replace(row, predicted=one.text, logprob=one.logprob, num_tokens=one.num_tokens, ended=one.ended)
            for row, one in ((row, answers[number]) for number, row in enumerate(rows))
        ]

    def again(self, before: Sequence[Prediction]) -> list[Prediction]:
        """Answers that were given before to these questions, with all else as it is in the records now."""
        asked = [
            (replace(record, context=Context(one.context) if one.context else None), turn)
            for (record, turn), one in zip(self.asked, before, strict=True)
        ]
        return [
            replace(row, predicted=one.predicted, logprob=one.logprob, num_tokens=one.num_tokens, ended=one.ended)
            for row, one in zip(self._rows(asked, [row.earlier for row in before]), before, strict=True)
        ]

    def _rows(self, asked: Sequence[Asked], earlier: Sequence[tuple[Turn, ...]]) -> Iterator[Prediction]:
        training = with_true_answers(self.opened, self.opened.records["train"])
        true, turns = true_before(self.opened, self.asked), self.opened.run.eval.turns
        return unanswered(asked, earlier, true, self.examples, training, turns, self.staged)

    def score(self, predictions: list[Prediction], baselines: BaselineAnswers | None = None) -> Evaluation:
        """Score answers, beside those of baselines."""
        inputs = self.opened
        training = training_answers(inputs.records["train"])
        return Evaluation.of(predictions, training, inputs.images.size_of, baselines)

    def identity(self) -> str:
        """The sha256 over what the answers depend on, but the machine: adapter, model, prompts, settings."""
        run, folder = self.opened.run, self.opened.folder
        inputs = folder.recorded_inputs()
        adapter = {path.name: hash_file(path) for path in sorted(folder.adapter.glob("adapter_*"))}
        if self.baseline == "untuned":
            adapter = {}
            inputs.pop("records", None)  # those of a training, which may not have begun
        settings: dict[str, Any] = {
            "baseline": self.baseline,
            "adapter": adapter,
            "inputs": inputs,
            "cache": self.opened.fingerprint.sha256,
            "eval": run.eval.model_dump(exclude=NOT_OF_ANSWERS),
            "model": model_settings(run),
        }
        if form := run.data.context:
            stages = [form.stage_of(record) for record, _ in self.asked]
            settings["context"] = [self.staged, form.model_dump(exclude={"answers", "dropout"}), stages]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for example in self.examples:
            digest.update(repr((example.token_ids.tobytes(), example.image_keys)).encode())
        return digest.hexdigest()


def on_this_machine(identity: str) -> str:
    """An identity of answers with the same bits: libraries and hardware included."""
    return hashlib.sha256(json.dumps([identity, asdict(Environment.this())], sort_keys=True).encode()).hexdigest()


def _bar(total: int, *, disable: bool | None) -> Any:
    return tqdm(total=total, desc="answer questions", unit="question", leave=False, disable=disable)
