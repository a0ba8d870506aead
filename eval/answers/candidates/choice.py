"""The questions that have candidates, in batches, and the likeliest candidate of each.

Design: this is a second pass over the questions, after the greedy answers. A batch has whole questions, in the order of
their images, so that an image is in few packs. The likeliest candidate is an answer like any other and is kept on disk
as one, so an interrupted evaluation continues here too. Of equally likely candidates the first is chosen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tqdm import tqdm

from lookonce.eval.answers.candidates.conversations import CandidateConversations
from lookonce.eval.answers.candidates.known import OfQuestion, candidates_of
from lookonce.eval.answers.candidates.likelihood import Likelihood
from lookonce.eval.answers.engines import CPU_PACK, MIN_COMPILED
from lookonce.eval.answers.partial import Answered
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.scores.prediction import Prediction
from lookonce.text import Notify, quiet
from lookonce.train.data.groups import group_examples
from lookonce.train.data.tokenize import Example
from lookonce.train.model.load import PRECISIONS

CANDIDATES_OF_BATCH = 1024
"""Candidates of a batch, from which on it takes no more questions."""


@dataclass(frozen=True)
class Choice:
    """Questions with candidates."""

    DONE: ClassVar[str] = "had their candidates scored"
    """What is said of those that an earlier, interrupted evaluation got to."""
    questions: Questions
    candidates: OfQuestion
    batches: list[list[int]]
    """The numbers of the questions whose candidates are scored together."""
    answers: Mapping[int, Answer] | None = None
    """The greedy answers to all questions, which later questions of a dialogue follow."""

    @classmethod
    def of(cls, questions: Questions, notify: Notify = quiet) -> Choice | None:
        """The choice that `eval.candidates` asks for; None if it does not.

        Raises:
            LookonceError: the candidates cannot be read or used.
        """
        if questions.session.inputs.run.eval.candidates is None:
            return None
        candidates = candidates_of(questions, notify)
        return cls(questions, candidates, _plan(questions, candidates))

    @property
    def name(self) -> str:
        """The name of the file of partial answers."""
        return f"{self.questions.name}-candidates"

    def num_in(self, batches: Iterable[int]) -> int:
        """The number of questions in some batches."""
        return sum(len(self.batches[number]) for number in batches)

    def identity(self, identity: str) -> str:
        """The sha256 over what the choice depends on; `identity` is that of the questions."""
        settings = [identity, sorted(self.candidates.items()), self.questions.session.inputs.run.batch.tokens_per_pack]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def answer(
        self, model: Any, batches: Sequence[int], *, shows_progress: bool = True, notify: Notify = quiet
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Yields the number of each batch, and the likeliest candidate of each of its questions."""
        conversations = CandidateConversations(self.questions, self.answers)
        examples = (conversations.examples(self._wanted(number)) for number in batches)
        with _bar(self.num_in(batches), disable=None if shows_progress else True) as progress:
            for number, scored in zip(batches, self._likelihood(model).logprobs(examples), strict=True):
                yield number, self._likeliest(number, scored)
                progress.update(len(self.batches[number]))

    def _wanted(self, batch: int) -> list[tuple[int, str]]:
        """The candidates of a batch, each with the number of its question."""
        return [(number, text) for number in self.batches[batch] for text in self.candidates[number]]

    def _likelihood(self, model: Any) -> Likelihood:
        session, on_gpu = self.questions.session, model.device.type == "cuda"
        run, num_candidates = session.inputs.run, sum(map(len, self.candidates.values()))
        return Likelihood(
            model,
            session.chat_tokenizer,
            session.collator.source,
            run.batch.tokens_per_pack if on_gpu else min(run.batch.tokens_per_pack, CPU_PACK),
            PRECISIONS[run.train.precision],
            compiled=run.train.compile and on_gpu and num_candidates >= MIN_COMPILED,
        )

    def _likeliest(self, batch: int, scored: Sequence[tuple[Example, float]]) -> list[Answer]:
        """The likeliest candidate of each question of a batch."""
        best: dict[int, Answer] = {}
        for (number, text), (example, logprob) in zip(self._wanted(batch), scored, strict=True):
            if number not in best or logprob > best[number].logprob:
                tokens = example.token_ids[example.supervised].tolist()
                best[number] = Answer(text, tuple(tokens), logprob, "stop")
        return [best[number] for number in self.batches[batch]]

    def added_to(self, predictions: Sequence[Prediction], answered: Answered) -> list[Prediction]:
        """The predictions with the likeliest candidates of all batches."""
        batches = [zip(batch, answered[number], strict=True) for number, batch in enumerate(self.batches)]
        best = {question: answer for batch in batches for question, answer in batch}
        return [
            replace(
                row,
                candidate=best[number].text,
                candidate_logprob=best[number].logprob,
                num_candidates=len(self.candidates[number]),
            )
            if number in best
            else row
            for number, row in enumerate(predictions)
        ]

    def again(self, rows: Sequence[Prediction], before: Sequence[Prediction]) -> list[Prediction] | None:
        """Some predictions with the choice that was made before; None if not all questions had one."""
        if {number for number, row in enumerate(before) if row.candidate is not None} != self.candidates.keys():
            return None
        return [
            replace(
                row,
                candidate=one.candidate,
                candidate_logprob=one.candidate_logprob,
                num_candidates=one.num_candidates,
            )
            for row, one in zip(rows, before, strict=True)
        ]


def _plan(questions: Questions, candidates: OfQuestion) -> list[list[int]]:
    """The questions that have candidates in batches, those about an image together."""
    numbers = list(candidates)
    prompts = [questions.examples[number] for number in numbers]
    groups = group_examples(prompts, questions.session.chat_tokenizer.image_token_id)
    batches: list[list[int]] = []
    num_candidates = CANDIDATES_OF_BATCH
    for number in (numbers[place] for group in groups for place in group.examples):
        if num_candidates >= CANDIDATES_OF_BATCH:
            batches.append([])
            num_candidates = 0
        batches[-1].append(number)
        num_candidates += len(candidates[number])
    return batches


def _bar(total: int, *, disable: bool | None) -> Any:
    return tqdm(total=total, desc="score candidates", unit="question", leave=False, disable=disable)
