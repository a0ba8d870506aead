"""The dialogues in which the questions of records are answered, as `eval.turns` asks.

Design: with `own`, the questions of a record are one dialogue, and each follows the model's own answers. With `true`,
each question is a dialogue of its own, whose prompt has the record's answers to the questions before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lookonce.datasets.curriculum.context import NOT_ANSWERED
from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.engines import Engine
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.dialogue import Dialogue, is_shown
from lookonce.run.open import OpenRun
from lookonce.text import Notify, quiet
from lookonce.train.data.tokenize import ChatTokenizer, Example

Asked = tuple[Record, int]
"""A record, and the number of the turn that is asked."""
Turns = Literal["own", "true"]
"""Whose answers the earlier turns of a prompt have: the model's own, or the record's."""


@dataclass(frozen=True)
class Dialogues:
    """Questions in their dialogues."""

    asked: list[Asked]
    numbers: list[list[int]]
    """The numbers of the questions of each dialogue."""
    prompts: list[Example]
    """The prompt of each question; in those of later questions of a dialogue the answers are `NOT_ANSWERED`."""
    each: list[Dialogue]

    @classmethod
    def of(cls, opened: OpenRun, asked: Sequence[Asked]) -> Dialogues:
        """The dialogues of some questions of a run."""
        numbers = together(asked, opened.run.eval.turns)
        prompts = opened.prompts(without_answers(asked, numbers))
        return cls([*asked], numbers, prompts, dialogues_of(numbers, prompts, opened.chat_tokenizer))

    def about(self, records: Sequence[Record], prompts: Sequence[Example], chat: ChatTokenizer) -> Dialogues:
        """The same questions of other records with other images; `prompts` have the same words."""
        asked = [(record, turn) for record, (_, turn) in zip(records, self.asked, strict=True)]
        return Dialogues(asked, self.numbers, [*prompts], dialogues_of(self.numbers, prompts, chat))

    def plan(self, engine: Engine) -> list[list[int]]:
        """The numbers of the dialogues that an engine answers together."""
        return engine.plan(self.each)

    def questions(self, batch: Iterable[int]) -> list[int]:
        """The numbers of the questions of some dialogues."""
        return [question for number in batch for question in self.numbers[number]]

    def answer(
        self, engine: Engine, model: Any, batches: Sequence[Sequence[int]], notify: Notify = quiet
    ) -> Iterator[list[Answer]]:
        """The answers to the questions of each batch of dialogues, in order."""
        chosen = [[self.each[number] for number in batch] for batch in batches]
        for answers in engine.stream(model, chosen, notify):
            yield [answer for some in answers for answer in some]


def together(asked: Sequence[Asked], turns: Turns) -> list[list[int]]:
    """The numbers of the questions of each dialogue; the questions of a record must follow one another."""
    numbers: list[list[int]] = []
    for number, (record, turn) in enumerate(asked):
        follows = turns == "own" and number and asked[number - 1][0] is record and asked[number - 1][1] == turn - 1
        if follows:
            numbers[-1].append(number)
        else:
            numbers.append([number])
    return numbers


def without_answers(asked: Sequence[Asked], numbers: Sequence[Sequence[int]]) -> list[Asked]:
    """The questions with `NOT_ANSWERED` for the answers that the model gives before them."""
    found = [*asked]
    for some in numbers:
        record, first = asked[some[0]]
        if len(some) > 1:
            unanswered = (Turn(turn.question, NOT_ANSWERED) for turn in record.turns[first:])
            record = replace(record, turns=(*record.turns[:first], *unanswered))
        for number in some:
            found[number] = (record, asked[number][1])
    return found


def dialogues_of(numbers: Iterable[Sequence[int]], prompts: Any, chat: ChatTokenizer) -> list[Dialogue]:
    """Each dialogue; `prompts` has the prompt of each question by its number, as in `Dialogues.prompts`."""
    return [Dialogue.of([prompts[number] for number in some], chat) for some in numbers]


def turns_before(
    asked: Sequence[Asked], numbers: Iterable[Sequence[int]], answers: Mapping[int, Answer], special: Iterable[int]
) -> dict[int, tuple[Turn, ...]]:
    """The turns before each question in its prompt.

    `numbers` are those of the questions of some dialogues, and `special` the token ids of no shown answer.
    """
    never = {*special}
    found: dict[int, tuple[Turn, ...]] = {}
    for some in numbers:
        record, first = asked[some[0]]
        turns = record.turns[:first]
        for number in some:
            found[number], answer = turns, answers[number]
            text = answer.text if is_shown(answer, never) else NOT_ANSWERED
            turns += (Turn(record.turns[len(turns)].question, text),)
    return found
