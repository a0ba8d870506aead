"""The tokens of many conversations.

Design: conversations of one shape have one layout (layout.py), so only their texts are encoded, in parts that are words
and digits for the most part (cutting.py). The tokens of parts are remembered. A conversation without a layout, or with
anything unusual in it, goes through `ChatTokenizer.tokens`: it gives the same tokens, and says what is wrong.

A conversation of 30 tokens takes about 15 microseconds, a fifteenth of rendering and encoding it by itself. The tokens
of one call are in two arrays, of which each conversation has a part.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from lookonce.datasets.records import Record
from lookonce.train.data.chat.cutting import cutting_tokens, parts_of
from lookonce.train.data.chat.layout import Layout, Shape, layout_of, texts_of
from lookonce.train.data.tokenize import ChatTokenizer, Tokens

ID = np.dtype(np.int32)
MAX_PARTS = 1 << 18
"""Number of parts of texts above which their tokens are forgotten."""


class ConversationTokenizer:
    """Tokenizes the conversations of many records."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._cuts = cutting_tokens(chat.tokenizer)
        self._find_special = re.compile("|".join(map(re.escape, chat.special_tokens))).search
        self._layouts: dict[tuple[int, int, bool], Layout | None] = {}
        self._ids_of_part: dict[str, bytes] = {}

    def tokens(self, records: Sequence[Record]) -> list[Tokens]:
        """The tokens of each record, the same as from `ChatTokenizer.tokens`.

        Raises:
            RecordsError: as for `ChatTokenizer.tokens`, of the first record for which it is raised.
        """
        found = self._usual_tokens(records)
        return [
            _without_given(*tokens, record.num_given) if tokens else self._chat.tokens(record)
            for record, tokens in zip(records, found, strict=True)
        ]

    def prompts(self, asked: Sequence[tuple[Record, int]]) -> list[Tokens]:
        """The tokens of the prompts of turns, the same as from `ChatTokenizer.prompt`.

        In a conversation with a layout they are the tokens before the answer.

        Raises:
            RecordsError: as for `ChatTokenizer.prompt`.
        """
        records = list({id(record): record for record, _ in asked}.values())
        found = dict(zip(map(id, records), self._usual_tokens(records), strict=True))
        starts = {number: _starts(tokens[1]) for number, tokens in found.items() if tokens}
        return [
            _before(tokens[0], starts[id(record)][turn + record.num_given])
            if (tokens := found[id(record)])
            else self._chat.prompt(record, turn)
            for record, turn in asked
        ]

    def _usual_tokens(self, records: Sequence[Record]) -> list[Tokens | None]:
        """The tokens of each record that has a layout; answers of contexts are supervised as others."""
        records = [record.shown for record in records]
        texts = [texts_of(record) for record in records]
        layouts = [self._layout(record, some) for record, some in zip(records, texts, strict=True)]
        usual = [(layout, some) for layout, some in zip(layouts, texts, strict=True) if layout]
        tokens = iter(self._fill(usual))
        return [next(tokens) if layout else None for layout in layouts]

    def _layout(self, record: Record, texts: Sequence[str]) -> Layout | None:
        """The layout of a record, if there is one, and no text contains a special token or begins with whitespace."""
        shape = (len(record.turns), len(record.images), record.system is not None)
        if shape not in self._layouts:
            self._layouts[shape] = layout_of(Shape(*shape), self._chat, self._cuts)
        is_usual = not self._find_special("\0".join(texts)) and not any([text[:1].isspace() for text in texts])
        return self._layouts[shape] if is_usual else None

    def _fill(self, conversations: Sequence[tuple[Layout, Sequence[str]]]) -> list[Tokens]:
        """The tokens of layouts with their texts."""
        ids_of = self._encode({text for _, texts in conversations for text in texts})
        parts = [
            part if isinstance(part, bytes) else ids_of[texts[part]]
            for layout, texts in conversations
            for part in layout.parts
        ]
        num_tokens = np.fromiter(map(len, parts), np.int64, len(parts)) // ID.itemsize
        token_ids = np.frombuffer(bytearray().join(parts), ID)
        flags = np.fromiter(chain.from_iterable(layout.supervised for layout, _ in conversations), np.bool_, len(parts))
        supervised = np.repeat(flags, num_tokens)
        num_parts = [0, *(len(layout.parts) for layout, _ in conversations)]
        ends = np.concatenate([[0], num_tokens.cumsum()])[np.cumsum(num_parts)].tolist()
        return [(token_ids[start:end], supervised[start:end]) for start, end in pairwise(ends)]

    def _encode(self, texts: Collection[str]) -> dict[str, bytes]:
        """The token ids of texts, as the bytes of int32."""
        if len(self._ids_of_part) > MAX_PARTS:
            self._ids_of_part.clear()
        parts_of_text = {text: parts_of(text) for text in texts}
        new = list(set(chain.from_iterable(parts_of_text.values())) - self._ids_of_part.keys())
        encodings = self._chat.tokenizer.backend_tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._ids_of_part |= zip(new, (array("i", encoding.ids).tobytes() for encoding in encodings), strict=True)
        ids_of = self._ids_of_part.__getitem__
        return {text: b"".join(map(ids_of, parts)) for text, parts in parts_of_text.items()}


def _before(token_ids: NDArray[np.int32], end: int) -> Tokens:
    """The tokens before an answer, none of them supervised; neither array takes memory of its own."""
    return token_ids[:end], np.broadcast_to(np.False_, end)


def _without_given(token_ids: NDArray[np.int32], supervised: NDArray[np.bool_], num_given: int) -> Tokens:
    """The tokens with the first answers no longer supervised."""
    if num_given:
        supervised[: _starts(supervised)[num_given]] = False
    return token_ids, supervised


def _starts(supervised: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where each answer begins."""
    return np.flatnonzero(np.diff(supervised, prepend=False) & supervised)
