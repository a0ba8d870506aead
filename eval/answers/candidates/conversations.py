"""Conversations that end with a candidate, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.answer import Answer
from lookonce.train.data.chat.conversations import ConversationTokenizer
from lookonce.train.data.tokenize import Example, Tokens


class CandidateConversations:
    """Makes examples of questions with candidates in place of their answers."""

    def __init__(self, questions: Questions, answers: Mapping[int, Answer] | None = None) -> None:
        """`answers` to all questions are the model's own, for the prompts of later questions (`eval.turns`).

        Without them these have the answers that stand in `Questions.examples`.
        """
        self._questions, self._answers = questions, answers
        self._tokenizer = ConversationTokenizer(questions.session.chat_tokenizer)

    def examples(self, wanted: Sequence[tuple[int, str]]) -> list[Example]:
        """The examples of some candidates, each with the number of its question.

        Only the candidate and its end token are supervised; what follows them is left out.

        Raises:
            RecordsError: the chat template does not render a candidate unchanged.
        """
        records = [self._record(number, text) for number, text in wanted]
        tokens = map(_of_last_answer, self._tokenizer.tokens(records))
        return [self._example(number, *some) for (number, _), some in zip(wanted, tokens, strict=True)]

    def _example(self, number: int, token_ids: NDArray[np.int32], supervised: NDArray[np.bool_]) -> Example:
        """The conversation with the question's own prompt before its candidate."""
        prompt = self._prompt(number)
        joined = np.concatenate([prompt.token_ids, token_ids[supervised]])
        return replace(prompt, token_ids=joined, supervised=np.arange(len(joined)) >= len(prompt.token_ids))

    def _prompt(self, number: int) -> Example:
        questions = self._questions
        if self._answers is None:
            return questions.examples[number]
        return questions.dialogues.prompt(number, self._answers)

    def _record(self, number: int, text: str) -> Record:
        record, turn = self._questions.asked[number]
        return replace(record, turns=(*record.turns[:turn], Turn(record.turns[turn].question, text)))


def _of_last_answer(tokens: Tokens) -> Tokens:
    """The tokens up to the end of the last answer, which alone is supervised."""
    token_ids, supervised = tokens
    end = np.flatnonzero(supervised)[-1] + 1
    start = np.flatnonzero(~supervised[:end])[-1] + 1
    return token_ids[:end], np.arange(end) >= start
