"""Make examples of records: their tokens, their image keys, and the sizes of their images.

Design: tokens depend on texts and the number of images alone, so a conversation that occurs again, as most do in visual
question answering, is tokenized once. The others are tokenized many at a time (chat/conversations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from lookonce.cache.constants import Grid
from lookonce.datasets.curriculum import LessonOrder
from lookonce.datasets.records import Record
from lookonce.environment import without_garbage_collection
from lookonce.errors import RecordsError
from lookonce.train.data.chat.conversations import ConversationTokenizer
from lookonce.train.data.tokenize import ChatTokenizer, Example, Tokens

CHUNK = 8192
"""Number of records whose conversations are tokenized at once."""


def make_examples(
    chat_tokenizer: ChatTokenizer,
    records: Iterable[Record],
    key_of: Callable[[Path], str],
    grid_of: Callable[[str], Grid],
    max_tokens: int,
    split: str = "train",
    limiting_key: str = "batch.max_tokens",
    order: LessonOrder | None = None,
) -> tuple[list[Example], int]:
    """Examples of the records of at most `max_tokens` tokens, and how many longer records were left out.

    `limiting_key` is the key of the run file that sets `max_tokens`. With an `order`, they have its lessons.

    Raises:
        RecordsError: no supervised token is left, so there is nothing to learn.
    """
    with without_garbage_collection():
        everything = list(_each_example(chat_tokenizer, records, key_of, grid_of, order))
    examples = [example for example in everything if example.num_tokens <= max_tokens]
    num_too_long = len(everything) - len(examples)
    if not any(example.supervised.any() for example in examples):
        raise RecordsError(
            f"no supervised token in the {split} data: {len(examples)} records kept, {num_too_long} longer than "
            f"`{limiting_key}` {max_tokens} left out; raise `{limiting_key}` or lower `cache.max_pixels`"
        )
    return examples, num_too_long


def _each_example(
    chat_tokenizer: ChatTokenizer,
    records: Iterable[Record],
    key_of: Callable[[Path], str],
    grid_of: Callable[[str], Grid],
    order: LessonOrder | None,
) -> Iterator[Example]:
    @cache
    def shown(images: tuple[Path, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        keys = tuple(key_of(path) for path in images)
        return keys, tuple(chat_tokenizer.num_image_tokens(grid_of(key)) for key in keys)

    for record, tokens in _with_tokens(ConversationTokenizer(chat_tokenizer), iter(records)):
        lesson = order.lesson_of(record) if order else 0
        yield Example(*tokens, *shown(record.images), record.origin, lesson)


def _with_tokens(tokenizer: ConversationTokenizer, records: Iterator[Record]) -> Iterator[tuple[Record, Tokens]]:
    """Each record with its tokens; conversations that differ in their images alone are tokenized once."""
    number_of: dict[object, int] = {}
    tokens: list[Tokens] = []
    while chunk := list(islice(records, CHUNK)):
        numbers: list[int] = []
        new: list[Record] = []
        for record in chunk:
            texts = record.turns, record.system, record.context
            number = number_of.setdefault((texts, len(record.images)), len(number_of))
            if number == len(tokens) + len(new):
                new.append(record)
            numbers.append(number)
        tokens += tokenizer.tokens(new)
        yield from zip(chunk, [tokens[number] for number in numbers], strict=True)
