"""Prompts that are put together from a dialogue's tokens are those of the chat template, and no answer breaks them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lookonce.datasets.context import NOT_ANSWERED
from lookonce.datasets.records import Record, Turn
from lookonce.errors import ModelError
from lookonce.eval.answers.questions import without_answers
from lookonce.eval.decoding.dialogue import Answer, Dialogue

TURNS = (Turn("Is there text?", "yes"), Turn("How many polyps?", "2"), Turn("Où?", "in the centre; left"))
RECORDS = (
    Record((Path("a"),), TURNS),
    Record((Path("a"), Path("b")), TURNS[:2], system="Answer in one word."),
    Record((), TURNS),
)


def prompts_of(chat, record: Record) -> list:
    keys = [path.name for path in record.images]
    return [chat.question(record, turn, keys, [(1, 4, 6)] * len(keys)) for turn in range(len(record.turns))]


def dialogue_of(chat, record: Record) -> Dialogue:
    every = range(len(record.turns))
    asked = without_answers([(record, turn) for turn in every], [every])
    return Dialogue.of(prompts_of(chat, asked[0][0]), chat)


def answer(chat, text: str, *, ended: bool = True) -> Answer:
    token_ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Answer.of([*token_ids, *[chat.tokenizer.eos_token_id] * ended], [[0.0]] * 99, chat.tokenizer)


@pytest.mark.guarantee("In a dialogue, prompts have the tokens of the chat template.")
@pytest.mark.parametrize("record", RECORDS)
def test_a_later_prompt_has_the_tokens_of_the_template_with_the_answers_before(chat_tokenizer, record):
    dialogue, expected = dialogue_of(chat_tokenizer, record), prompts_of(chat_tokenizer, record)
    answers = [answer(chat_tokenizer, turn.answer) for turn in record.turns]
    assert dialogue.num_questions == len(expected)
    for turn, prompt in enumerate(expected):
        found = dialogue.prompt(answers[:turn])
        assert found.token_ids.tolist() == prompt.token_ids.tolist() and found.num_tokens == prompt.num_tokens
        assert len(found.supervised) == len(found.token_ids) and not found.supervised.any()


@pytest.mark.parametrize("text", ["", " \n", "yes<|im_start|>user\nyes", "<|image_pad|>", "cut"])
def test_an_answer_that_is_empty_or_cut_or_has_special_tokens_is_shown_as_not_answered(chat_tokenizer, text):
    record = RECORDS[0]
    given = answer(chat_tokenizer, text, ended=text != "cut")
    shown = replace(record, turns=(replace(TURNS[0], answer=NOT_ANSWERED), *TURNS[1:]))
    expected = prompts_of(chat_tokenizer, shown)[1]
    assert dialogue_of(chat_tokenizer, record).prompt([given]).token_ids.tolist() == expected.token_ids.tolist()


def test_there_is_room_for_the_longest_answers_and_all_later_questions(chat_tokenizer):
    dialogue = dialogue_of(chat_tokenizer, RECORDS[0])
    stands_in = len(dialogue.not_answered)
    for longest in (1, stands_in, 40):
        tokens = (7,) * (longest - 1) + (chat_tokenizer.tokenizer.eos_token_id,)
        answers = [Answer("x", tokens, 0.0, "stop"), Answer("", (1,) * longest, 0.0, "length")]
        behind = dialogue.prompt(answers).num_tokens - dialogue.first.num_tokens + longest
        assert behind <= dialogue.room(longest) <= behind + longest + stands_in


def test_a_template_that_changes_earlier_turns_is_refused(chat_tokenizer):
    first, second, _ = prompts_of(chat_tokenizer, RECORDS[0])
    changed = replace(second, token_ids=np.append(first.token_ids[1:], second.token_ids), origin="val.jsonl:3")
    with pytest.raises(
        ModelError, match=r"val.jsonl:3: the chat template changes earlier turns .*eval.turns: reference"
    ):
        Dialogue.of([first, changed], chat_tokenizer)
