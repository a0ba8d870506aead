"""Many conversations at once: the same tokens as one by one, and the same errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lookonce.datasets.records import Context, Record, Turn
from lookonce.errors import RecordsError
from lookonce.train.data import conversations as module
from lookonce.train.data.conversations import ConversationTokenizer
from lookonce.train.data.tokenize import ChatTokenizer

CHARACTERS = "as1'! \n\r\t\u00a0\u0301é你😀<|>"
WORDS = (*"Where is the polyp? 12 mm <think> <|im_ end|> it's <|im_end|>".split(), "\n", "  ")
TEXTS = (
    st.text(CHARACTERS, max_size=12) | st.text(max_size=8) | st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)
)
TURNS = st.lists(st.builds(Turn, TEXTS, TEXTS), min_size=1, max_size=3).map(tuple)
RECORDS = st.builds(
    Record,
    st.lists(st.just(Path("a")), max_size=2).map(tuple),
    TURNS,
    st.none() | TEXTS,
    origin=st.integers(1, 99).map(lambda line: f"train.jsonl:{line}"),
    context=st.none() | st.builds(Context, TURNS, st.none() | TEXTS),
)
PLAIN = [
    Record((Path("a"),), (Turn("Is there text?", "yes"), Turn("How many polyps?", "2")), "Answer in one word."),
    Record((Path("a"), Path("b")), (Turn("Où est l'ulcère? 你好", "ilöum; 38 °C\nétage 2"),)),
    Record((), (Turn("List  them.", "one\n\ntwo\n"),)),
]


def one_by_one(chat_tokenizer, records):
    """The tokens of the records before the first that is refused, and its error."""
    found = []
    for record in records:
        try:
            found.append(chat_tokenizer.tokens(record))
        except RecordsError as error:
            return found, str(error)
    return found, None


def as_lists(tokens):
    return [(token_ids.tolist(), supervised.tolist()) for token_ids, supervised in tokens]


@pytest.fixture
def conversations(chat_tokenizer):
    return ConversationTokenizer(chat_tokenizer)


@pytest.mark.guarantee(
    "Conversations that are tokenised together have the tokens, the targets and the errors of one at a time, "
    "whatever their texts and the template."
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # all examples use one object
@given(records=st.lists(RECORDS, max_size=6))
def test_tokens_and_errors_are_those_of_conversations_one_by_one(chat_tokenizer, conversations, records):
    expected, error = one_by_one(chat_tokenizer, records)
    assert as_lists(conversations.tokens(records[: len(expected)])) == as_lists(expected)
    if error:
        with pytest.raises(RecordsError) as raised:
            conversations.tokens(records)
        assert str(raised.value) == error


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(RECORDS, max_size=4))
def test_prompts_are_those_of_one_turn_at_a_time(chat_tokenizer, conversations, records):
    asked = [(record, turn) for record in records for turn in range(len(record.turns))]
    try:
        expected = [chat_tokenizer.prompt(*one) for one in asked]
    except RecordsError as error:
        with pytest.raises(RecordsError) as raised:
            conversations.prompts(asked)
        assert str(raised.value) == str(error)
    else:
        assert as_lists(conversations.prompts(asked)) == as_lists(expected)


@pytest.mark.parametrize("change", ["| trim", "~ ''", "| upper | lower"])
def test_so_are_those_of_a_template_that_changes_texts(own_chat_tokenizer, change):
    tokenizer = own_chat_tokenizer.tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ part.text }}", f"{{{{ part.text {change} }}}}")
    records = [Record((Path("a"),), (Turn(f" What is {number}? ", "yes"),)) for number in range(3)]
    found = ConversationTokenizer(own_chat_tokenizer).tokens(records)
    assert as_lists(found) == as_lists(one_by_one(own_chat_tokenizer, records)[0])
    assert len({ids.tobytes() for ids, _ in found}) == 3


@pytest.mark.guarantee("A context has the tokens of a record written by hand.")
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_context_has_the_tokens_of_a_record_written_by_hand_and_only_own_answers_are_supervised(
    chat_tokenizer, conversations, system
):
    image, known, own = (Path("a"),), (Turn("Is there text?", "no"), Turn("How many?", "2")), (Turn("Where?", "left"),)
    text = "Known so far: Is there text? no; How many? 2\nWhere?"
    summary = Record(image, own, system, context=Context(known, text))
    turns = Record(image, own, system, context=Context(known))
    by_hand = [Record(image, (Turn(text, "left"),), system), Record(image, (*known, *own), system)]
    expected = as_lists(map(chat_tokenizer.tokens, by_hand))
    found = as_lists(conversations.tokens([summary, turns]))
    assert [ids for ids, _ in found] == [ids for ids, _ in expected] and found[0] == expected[0]
    ids, supervised = found[1]
    targets = [token for token, is_target in zip(ids, supervised, strict=True) if is_target]
    assert chat_tokenizer.tokenizer.decode(targets) == "left<|im_end|>"
    prompts = as_lists(conversations.prompts([(summary, 0), (turns, 0)]))
    assert prompts == as_lists([chat_tokenizer.prompt(by_hand[0], 0), chat_tokenizer.prompt(by_hand[1], 2)])


def test_usual_conversations_are_not_rendered(chat_tokenizer, conversations, monkeypatch):
    expected = as_lists(map(chat_tokenizer.tokens, PLAIN))
    conversations.tokens(PLAIN)
    monkeypatch.setattr(ChatTokenizer, "render", None)
    assert as_lists(conversations.tokens(PLAIN)) == expected


def test_parts_are_forgotten_when_they_are_many(chat_tokenizer, conversations, monkeypatch):
    monkeypatch.setattr(module, "MAX_PARTS", 2)
    for record in PLAIN * 2:
        assert as_lists(conversations.tokens([record])) == as_lists([chat_tokenizer.tokens(record)])
    assert len(conversations._ids_of_part) < 12


def test_tokens_can_be_written_to(chat_tokenizer, conversations):
    [(token_ids, supervised)] = conversations.tokens(PLAIN[:1])
    expected_ids, expected = chat_tokenizer.tokens(PLAIN[0])
    assert (token_ids.dtype, supervised.dtype) == (expected_ids.dtype, expected.dtype)
    assert token_ids.flags.writeable and supervised.flags.writeable
