"""Where conversations are cut: the parts have the tokens of the whole, for all short texts of some characters."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from lookonce.train.data.conversations import CUTS, PATTERN, cutting_tokens, parts_of

CHARACTERS = "as1'! \n\r\t\u00a0\u0301"
"""Letters with a contraction, a digit, punctuation, all kinds of whitespace, and a mark that combines."""


TEXTS = ["".join(some) for length in range(4) for some in product(CHARACTERS, repeat=length)]


def encode(chat_tokenizer, texts):
    encodings = chat_tokenizer.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return dict(zip(texts, (encoding.ids for encoding in encodings), strict=True))


def joined(chat_tokenizer, parts_of_text):
    """The tokens of the parts of each text, one after the other."""
    ids_of = encode(chat_tokenizer, list({part for parts in parts_of_text.values() for part in parts}))
    return {text: [token for part in parts for token in ids_of[part]] for text, parts in parts_of_text.items()}


@pytest.mark.guarantee(
    "Conversations that are tokenised together have the tokens, the targets and the errors of one at a time, "
    "whatever their texts and the template."
)
def test_the_parts_between_cuts_have_the_tokens_of_the_whole(chat_tokenizer):
    assert joined(chat_tokenizer, {text: CUTS.split(text) for text in TEXTS}) == encode(chat_tokenizer, TEXTS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture is the same object each time
@given(texts=st.lists(st.text(max_size=30) | st.text(CHARACTERS, max_size=30), min_size=10, max_size=10))
def test_so_have_those_of_longer_texts(chat_tokenizer, texts):
    assert joined(chat_tokenizer, {text: CUTS.split(text) for text in texts}) == encode(chat_tokenizer, texts)


def test_a_text_behind_a_line_feed_or_special_token_is_cut_into_words_and_digits(chat_tokenizer):
    texts = [text for text in TEXTS if not text[:1].isspace()]
    for before in ("<|im_start|>assistant\n", "<|vision_end|>"):
        whole = {f"{before}{text}<|im_end|>\n": [before, *parts_of(text), "<|im_end|>\n"] for text in texts}
        assert joined(chat_tokenizer, whole) == encode(chat_tokenizer, list(whole))
    assert parts_of("In 12 of 30?") == ["In", " 1", "2", " of", " 3", "0", "?"]
    assert parts_of("One.\n\nTwo  of\n3") == ["One.\n\n", "Two", "  of\n", "3", ""]


def test_special_tokens_are_cutting_tokens(chat_tokenizer):
    found = {*cutting_tokens(chat_tokenizer.tokenizer)}
    assert {"<|im_start|>", "<|im_end|>", "<|vision_end|>", "<|image_pad|>"} <= found
    assert not {"<think>", "<tool_call>"} & found


def with_added(text, **options):
    """Adds a special token."""
    token = AddedToken(text, **{"special": True, "normalized": False} | options)
    return lambda tokenizer: tokenizer.add_tokens(token, special_tokens=True)


def with_normalizer(tokenizer):
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()


def with_dropout(tokenizer):
    tokenizer.backend_tokenizer.model.dropout = 0.1


def with_split(pattern=PATTERN, *, add_prefix_space=False):
    parts = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
    ]
    return lambda tokenizer: setattr(tokenizer.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Sequence(parts))


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        (with_added("<added>"), True),
        (with_added("<added>", lstrip=True), False),
        (with_added("<added>", rstrip=True), False),
        (with_added("<added>", single_word=True), False),
        (with_added("<two words>"), False),
        (with_added("<number3>"), False),
        (with_split(), True),
        (with_split(PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), False),
        (with_split(add_prefix_space=True), False),
        (with_normalizer, False),
        (with_dropout, False),
        (lambda tokenizer: tokenizer.backend_tokenizer.enable_truncation(10), False),
        (lambda tokenizer: tokenizer.backend_tokenizer.enable_padding(), False),
    ],
)
def test_only_a_tokenizer_that_is_known_has_some(own_chat_tokenizer, change, is_known):
    change(own_chat_tokenizer.tokenizer)
    assert bool(cutting_tokens(own_chat_tokenizer.tokenizer)) == is_known


@pytest.mark.parametrize("other", ["<|im_end|>>", "|>more", "x<|im_e", "im_end"])
def test_a_special_token_that_another_can_overlap_is_none(own_chat_tokenizer, other):
    with_added(other)(own_chat_tokenizer.tokenizer)
    found = cutting_tokens(own_chat_tokenizer.tokenizer)
    assert "<|im_end|>" not in found and other not in found
