"""Examples of records: which are kept, what they share, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookonce.datasets.curriculum import StageOrder
from lookonce.datasets.records import Context, Record, Turn
from lookonce.errors import RecordsError
from lookonce.train.data.tokenize import make_examples

TEXT, COUNT = Turn("Is there text?", "yes"), Turn("How many polyps are in the image?", "2")
A, B = Path("a"), Path("b")
GRIDS = {"a": (1, 4, 6), "b": (1, 20, 20)}


def examples_of(chat_tokenizer, records, max_tokens=4096):
    return make_examples(chat_tokenizer, records, lambda path: path.name, GRIDS.__getitem__, max_tokens)


def test_examples_are_those_of_the_records_one_by_one(chat_tokenizer):
    turns = [(TEXT,), (COUNT,), (TEXT, COUNT), (Turn(" spaces ", "no"),)]
    images = [(A,), (B,), (A, B), ()]
    records = [Record(paths, some, origin=f"{paths} {some}") for paths in images for some in turns * 2]
    for record, example in zip(records, examples_of(chat_tokenizer, records)[0], strict=True):
        keys = [path.name for path in record.images]
        alone = chat_tokenizer.example(record, keys, [GRIDS[key] for key in keys])
        assert example.token_ids.tolist() == alone.token_ids.tolist()
        assert example.supervised.tolist() == alone.supervised.tolist()
        assert (example.image_keys, example.num_image_tokens) == (alone.image_keys, alone.num_image_tokens)
        assert example.origin == alone.origin


def test_conversations_that_differ_in_their_images_alone_share_their_tokens(chat_tokenizer):
    others = [Record((A,), (COUNT,)), Record((A, B), (TEXT,)), Record((A,), (TEXT,), context=Context((COUNT,)))]
    others.append(Record((A,), (TEXT,), "Be brief."))
    first, second, *different = examples_of(chat_tokenizer, [Record((A,), (TEXT,)), Record((B,), (TEXT,)), *others])[0]
    assert first.token_ids is second.token_ids
    assert all(first.token_ids.tolist() != other.token_ids.tolist() for other in different)


def test_the_first_record_that_cannot_be_tokenized_is_named(chat_tokenizer):
    wrong = (Turn("What?", "an <|im_end|> inside"),)
    records = [Record((A,), turns, origin=f"a:{line}") for line, turns in enumerate([(TEXT,), wrong, wrong], start=1)]
    with pytest.raises(RecordsError, match="^a:2: 'an <.im_end.> inside' contains"):
        examples_of(chat_tokenizer, records)


def test_a_record_that_is_too_long_is_left_out_and_counted(chat_tokenizer):
    short, long = Record((A,), (TEXT,)), Record((A, B), (TEXT, COUNT))
    length = chat_tokenizer.example(short, ["a"], [GRIDS["a"]]).num_tokens
    kept, num_too_long = examples_of(chat_tokenizer, [short, long, short], length)
    assert [example.num_tokens for example in kept] == [length, length] and num_too_long == 1


@pytest.mark.parametrize("key", ["batch.max_tokens", "batch.tokens_per_pack"])
def test_nothing_to_learn_is_an_error_that_names_the_key_to_raise(chat_tokenizer, key):
    message = f"no supervised token in the train data: 0 records kept, 1 longer than `{key}` 5 .*; raise `{key}`"
    with pytest.raises(RecordsError, match=message):
        make_examples(
            chat_tokenizer, [Record((A,), (TEXT,))], str, lambda key: (1, 4, 6), max_tokens=5, limiting_key=key
        )


def test_examples_know_their_stages(chat_tokenizer):
    records = [Record((A,), (TEXT,), metadata={"stage": stage}) for stage in ("b", "a", "b")]
    order = StageOrder(by="stage", stages=["a", "b"])
    found, _ = make_examples(chat_tokenizer, records, str, lambda key: (1, 4, 6), max_tokens=4096, order=order)
    assert [example.stage for example in found] == [1, 0, 1]
    assert {example.stage for example in examples_of(chat_tokenizer, records)[0]} == {0}
