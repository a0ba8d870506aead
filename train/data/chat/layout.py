"""The layout of conversations of one shape: the tokens around their texts.

Design: what the template writes around the texts, and the tokens of that, are the same in all conversations of a shape,
so they are computed once. There is a layout only where this is certain (template.py, cutting.py), and if conversations
have the usual form: each answer follows the rendered prompt of its turn, and the end token follows the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lookonce.datasets.records import Record, Turn
from lookonce.train.data.chat.template import Pieces, Text, write_around
from lookonce.train.data.tokenize import EDGE, ChatTokenizer, to_messages


class Shape(NamedTuple):
    """What conversations have in common that differ in their texts alone."""

    num_turns: int
    num_images: int
    has_system: bool

    @property
    def answers(self) -> range:
        """The numbers of the answers among the texts, as `texts_of` orders them."""
        return range(1, 2 * self.num_turns, 2)

    def messages(self, texts: Sequence[Any]) -> list[dict[str, Any]]:
        """The messages of a conversation with these texts, which may be of any type."""
        turns = tuple(Turn(*texts[answer - 1 : answer + 1]) for answer in self.answers)
        return to_messages(Record((Path(),) * self.num_images, turns, texts[-1] if self.has_system else None))


def texts_of(record: Record) -> list[str]:
    """The texts of a record: question and answer of each turn, and the system text."""
    texts = [text for turn in record.turns for text in (turn.question, turn.answer)]
    return texts if record.system is None else [*texts, record.system]


@dataclass(frozen=True)
class Layout:
    """The tokens of a conversation in parts."""

    parts: tuple[bytes | int, ...]
    """The number of a text, or other token ids as the bytes of int32."""
    supervised: tuple[bool, ...]
    """Whether each part is supervised: the answers, and the end token after each."""


def layout_of(shape: Shape, chat: ChatTokenizer, cuts: tuple[str, ...]) -> Layout | None:
    """The layout of conversations of a shape; None if the template or the tokenizer does not admit one.

    `cuts` are the tokenizer's cutting tokens.
    """
    pieces, end_token = _written(shape, chat, 2 * shape.num_turns), chat.tokenizer.eos_token
    if pieces is None or not {end_token, chat.image_token} <= {*cuts} or not _can_cut(pieces, cuts):
        return None
    for answer in _checked_answers(pieces, shape):
        prompt = _written(shape, chat, answer, generation_prompt=True)
        if prompt is None or not _is_answered(prompt, answer, end_token, pieces):
            return None
    encode = partial(chat.tokenizer.backend_tokenizer.encode, add_special_tokens=False)
    token_ids = [piece if isinstance(piece, int) else encode(piece).ids for piece in pieces]
    num_images = sum(some.count(chat.image_token_id) for some in token_ids if isinstance(some, list))
    return _layout(token_ids, shape) if num_images == shape.num_images else None


def _written(shape: Shape, chat: ChatTokenizer, num_messages: int, generation_prompt: bool = False) -> Pieces | None:
    """What the template writes around the texts of the first messages after the system text.

    A rendering of some words is compared with that of transformers, whose environment of templates could change.
    """
    words = [f"word{number}" for number in range(2 * shape.num_turns + shape.has_system)]
    texts, end = [Text() for _ in words], num_messages + shape.has_system
    pieces = write_around(
        chat.tokenizer.get_chat_template(),
        texts,
        messages=shape.messages(texts)[:end],
        tools=None,
        documents=None,
        add_generation_prompt=generation_prompt,
        **chat.template_options,
        **chat.tokenizer.special_tokens_map,
    )
    if pieces is None:
        return None
    rendered = "".join(words[piece] if isinstance(piece, int) else piece for piece in pieces)
    return pieces if rendered == chat.render(shape.messages(words)[:end], generation_prompt) else None


def _checked_answers(pieces: Pieces, shape: Shape) -> Sequence[int]:
    """The answers whose prompts are rendered: all, or those at the ends of a long conversation that is written alike.

    To render all of them takes the square of the turns.
    """
    answers, texts = shape.answers, range(2, 2 * shape.num_turns)
    places = [place for place, piece in enumerate(pieces) if isinstance(piece, int) and piece in texts]
    around = [pieces[first + 1 : second] for first, second in pairwise(places)]
    is_regular = around[2:] == around[:-2] and len(answers) > 2 * EDGE
    return [*answers[:EDGE], *answers[-EDGE:]] if is_regular else answers


def _is_answered(prompt: Pieces, answer: int, end_token: str, pieces: Pieces) -> bool:
    """Whether the conversation is the prompt, then the answer, then the end token, and has the answer only there."""
    place = len(prompt)
    after = "".join(map(str, pieces[place + 1 : place + 2]))
    return pieces[: place + 1] == (*prompt, answer) and after.startswith(end_token) and pieces.count(answer) == 1


def _can_cut(pieces: Pieces, cuts: tuple[str, ...]) -> bool:
    """Whether each text can be cut off from what the template writes before and after it."""
    return all(
        before.endswith((*cuts, "\n")) if isinstance(before, str) else isinstance(after, str) and after.startswith(cuts)
        for before, after in pairwise(pieces)
    )


def _layout(token_ids: Iterable[int | list[int]], shape: Shape) -> Layout:
    """The layout of texts, given by their numbers, and the token ids around them."""
    parts: list[tuple[int | bytes, bool]] = []
    for some in token_ids:
        if isinstance(some, int):
            parts.append((some, some in shape.answers))
            continue
        ends_answer = bool(parts) and parts[-1][1]
        parts += (
            [(_as_bytes(some[:1]), True), (_as_bytes(some[1:]), False)] if ends_answer else [(_as_bytes(some), False)]
        )
    return Layout(*zip(*parts, strict=True))


def _as_bytes(token_ids: list[int]) -> bytes:
    return np.array(token_ids, np.int32).tobytes()
