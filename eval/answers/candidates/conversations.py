"""Conversations that end with a candidate, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.questions import Questions
from lookonce.train.data.chat.conversations import ConversationTokenizer
from lookonce.train.data.tokenize import Example, Tokens


class CandidateConversations:
    """Makes examples of questions with candidates in place of their answers."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._tokenizer = ConversationTokenizer(questions.session.chat_tokenizer)

    def examples(self, wanted: Sequence[tuple[int, str]]) -> list[Example]:
        """The examples of some candidates, each with the number of its question.

        Only the candidate and its end token are supervised; what follows them is left out.

        Raises:
            RecordsError: the chat template does not render a candidate unchanged.
        """
        records = [self._record(number, text) for number, text in wanted]
        tokens = map(_of_last_answer, self._tokenizer.tokens(records))
        prompts = [self._questions.examples[number] for number, _ in wanted]
        return [
            Example(*some, prompt.image_keys, prompt.num_image_tokens, prompt.origin)
            for some, prompt in zip(tokens, prompts, strict=True)
        ]

    def _record(self, number: int, text: str) -> Record:
        record, turn = self._questions.asked[number]
        return replace(record, turns=(*record.turns[:turn], Turn(record.turns[turn].question, text)))


def _of_last_answer(tokens: Tokens) -> Tokens:
    """The tokens up to the end of the last answer, which alone is supervised."""
    token_ids, supervised = tokens
    end = np.flatnonzero(supervised)[-1] + 1
    start = np.flatnonzero(~supervised[:end])[-1] + 1
    return token_ids[:end], np.arange(end) >= start
