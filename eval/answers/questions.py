"""The questions of an evaluation, in batches of similar length, so that padding is small.

Design: the batches depend on the questions and on `eval.batch_size` alone. So an answer has the same bits whichever
rank gives it, and whether or not the evaluation was interrupted.
"""

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
from lookonce.eval.answers.generate import greedy_answers
from lookonce.eval.answers.partial import Answered
from lookonce.eval.scores.metrics import Evaluation, Prediction
from lookonce.files import hash_file
from lookonce.run.folder import RunFolder, environment
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
        order = sorted(range(len(examples)), key=lambda number: examples[number].num_tokens)
        size = session.inputs.run.eval.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        return cls(session, asked, examples, batches)

    def num_in(self, batches: Iterable[int]) -> int:
        """The number of questions in some batches."""
        return sum(len(self.batches[number]) for number in batches)

    def answer(
        self, model: Any, batches: Sequence[int], *, shows_progress: bool = True
    ) -> Iterator[tuple[int, list[str]]]:
        """Answer some batches with a model, which may have an adapter; yields each one's number and answers."""
        session, run = self.session, self.session.inputs.run
        tokenizer, collator = session.chat_tokenizer.tokenizer, session.collator
        with _bar(self.num_in(batches), disable=None if shows_progress else True) as progress:
            for number in batches:
                chosen = [self.examples[question] for question in self.batches[number]]
                yield (
                    number,
                    greedy_answers(model, tokenizer, collator, chosen, run.eval.max_new_tokens, run.train.precision),
                )
                progress.update(len(chosen))

    def score(self, answered: Answered) -> Evaluation:
        """Score the answers of all batches."""
        pairs = [
            pair for number, batch in enumerate(self.batches) for pair in zip(batch, answered[number], strict=True)
        ]
        answers = dict(pairs)
        majority = Majority.of_records(self.session.inputs.records["train"])
        return Evaluation.of(
            [
                Prediction(
                    origin=record.origin,
                    images=tuple(map(str, record.images)),
                    question=record.turns[turn].question,
                    answer=record.turns[turn].answer,
                    predicted=answers[number],
                    majority=majority.answer(record.turns[turn].question),
                    references=record.references,
                )
                for number, (record, turn) in enumerate(self.asked)
            ]
        )

    def identity(self, folder: RunFolder) -> str:
        """The sha256 over what a run's answers depend on: adapter, model, prompts, settings, machine."""
        run = self.session.inputs.run
        settings = {
            "adapter": {path.name: hash_file(path) for path in sorted(folder.adapter.glob("adapter_*"))},
            "inputs": folder.recorded_inputs(),
            "cache": self.session.inputs.fingerprint.sha256,
            "eval": run.eval.model_dump(include={"max_new_tokens", "batch_size"}),
            "model": [run.train.precision, run.model.attention],
            "environment": environment(),
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for example in self.examples:
            digest.update(repr((example.token_ids.tobytes(), example.image_keys)).encode())
        return digest.hexdigest()


def _bar(total: int, *, disable: bool | None) -> Any:
    return tqdm(total=total, desc="answer questions", unit="question", leave=False, disable=disable)
