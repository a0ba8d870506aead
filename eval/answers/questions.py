"""The questions of an evaluation, in the batches that its engine answers together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from lookonce.datasets.majority import Majority
from lookonce.datasets.records import Record
from lookonce.errors import UsageError
from lookonce.eval.answers.engines import Engine, engine_of
from lookonce.eval.answers.partial import Answered
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.scores.counts import training_answers
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import Prediction, label
from lookonce.files import hash_file
from lookonce.run.folder import RunFolder, environment
from lookonce.text import Notify, quiet
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.session import Session


@dataclass(frozen=True)
class Questions:
    """Questions that a run's model is asked."""

    session: Session
    asked: list[tuple[Record, int]]
    """Record and turn of each question."""
    examples: list[Example]
    """The prompt of each question."""
    engine: Engine
    batches: list[list[int]]
    """The numbers of the questions that are answered together."""

    @classmethod
    def of(cls, session: Session, split: str, records: Sequence[Record] | None = None) -> Questions:
        """All questions of a split, or of `records`.

        Raises:
            UsageError: there are none.
        """
        records = session.inputs.records[split] if records is None else records
        if not records:
            raise UsageError(f"the run file names no records for `data.{split}`; add them or choose another --split")
        asked = [(record, number) for record in records for number in range(len(record.turns))]
        examples = [session.question(record, number) for record, number in asked]
        engine = engine_of(session)
        return cls(session, asked, examples, engine, engine.plan(examples))

    def num_in(self, batches: Iterable[int]) -> int:
        """The number of questions in some batches."""
        return sum(len(self.batches[number]) for number in batches)

    def answer(
        self, model: Any, batches: Sequence[int], *, shows_progress: bool = True, notify: Notify = quiet
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Answer some batches with a model, which may have an adapter; yields each one's number and answers."""
        with _bar(self.num_in(batches), disable=None if shows_progress else True) as progress:
            for number in batches:
                chosen = [self.examples[question] for question in self.batches[number]]
                yield number, self.engine.answers(model, chosen, notify)
                progress.update(len(chosen))

    def score(self, answered: Answered) -> Evaluation:
        """Score the answers of all batches."""
        pairs = [
            pair for number, batch in enumerate(self.batches) for pair in zip(batch, answered[number], strict=True)
        ]
        answers = dict(pairs)
        inputs = self.session.inputs
        training = inputs.records["train"]
        majority = Majority.of_records(training)
        return Evaluation.of(
            [
                Prediction(
                    origin=record.origin,
                    images=tuple(map(str, record.images)),
                    question=record.turns[turn].question,
                    answer=record.turns[turn].answer,
                    predicted=answers[number].text,
                    majority=majority.answer(record.turns[turn].question),
                    references=record.references,
                    image_keys=tuple(self.examples[number].image_keys),
                    turn=turn,
                    source=label(record.metadata.get("source")),
                    category=label(record.metadata.get("category")),
                    stage=label(record.metadata.get("stage")),
                    system=record.system,
                    earlier=record.turns[:turn],
                    logprob=answers[number].logprob,
                    num_tokens=answers[number].num_tokens,
                    ended=answers[number].ended,
                )
                for number, (record, turn) in enumerate(self.asked)
            ],
            training_answers(training),
            inputs.images.size_of,
        )

    def identity(self, folder: RunFolder) -> str:
        """The sha256 over what a run's answers depend on: adapter, model, prompts, settings, machine."""
        run = self.session.inputs.run
        settings = {
            "adapter": {path.name: hash_file(path) for path in sorted(folder.adapter.glob("adapter_*"))},
            "inputs": folder.recorded_inputs(),
            "cache": self.session.inputs.fingerprint.sha256,
            "eval": run.eval.model_dump(exclude={"split"}),
            "model": [run.train.precision, run.model.attention],
            "environment": environment(),
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for example in self.examples:
            digest.update(repr((example.token_ids.tobytes(), example.image_keys)).encode())
        return digest.hexdigest()


def _bar(total: int, *, disable: bool | None) -> Any:
    return tqdm(total=total, desc="answer questions", unit="question", leave=False, disable=disable)
