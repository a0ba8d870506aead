"""Many conversations to tokens, and records to examples: their tokens, their image keys, and the sizes of their images.

Design: tokens depend on texts and the number of images alone, so a conversation that occurs again, as most do in visual
question answering, is tokenized once. What the template writes around the texts, and the tokens of that, are the same
in all conversations of a shape, so this layout is computed once. There is a layout only where this is certain, and if
conversations have the usual form: each answer follows the rendered prompt of its turn, and the end token follows the
answer. So only texts are encoded, in parts that are words and digits for the most part, and the tokens of parts are
remembered. A conversation without a layout, or with anything unusual in it, goes through `ChatTokenizer.tokens`: it
gives the same tokens, and says what is wrong.

A conversation of 30 tokens takes about 15 microseconds, a fifteenth of rendering and encoding it by itself. The tokens
of one call are in two arrays, of which each conversation has a part.

A rendered conversation is cut where the tokens of its parts are those of the whole. A tokenizer first finds its added
tokens, then encodes each stretch between them by itself: it normalizes the stretch to NFC, splits it into matches of a
pattern, and encodes each match by itself. So a text can be cut where a match is certain to end, what was matched before
does not depend on what follows, and nothing combines across. With Qwen's pattern these places are

- before and after a special token that no other added token can overlap;
- after a line feed, if no whitespace follows: no match continues there, and whitespace up to a line feed is matched
  alike, whatever follows;
- before a space, if no whitespace precedes: a match that is not all whitespace has a space at its start only;
- before an ASCII digit, if no whitespace precedes, and after it: a digit is a match by itself.

So most texts fall into words and digits, of which there are few different ones. No added token may contain a digit or
whitespace. `cutting_tokens` returns none for a tokenizer of which all this is not known; its conversations are not cut.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookonce.cache.format import Grid
from lookonce.datasets.curriculum import StageOrder
from lookonce.datasets.records import Record, Turn
from lookonce.environment import without_garbage_collection
from lookonce.errors import RecordsError
from lookonce.train.data.tokenize import EDGE, ChatTokenizer, Example, Pieces, Text, Tokens, to_messages, write_around

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of Qwen2 and later models."""
SPLIT = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
CUTS = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?=[ 0-9])|(?<=[0-9])")
"""The places in texts where they are cut."""
WORDS = re.compile(r" ?(?:[^ 0-9]+|[0-9])")
"""The parts of a text with single spaces between its words; finding these is faster."""
NEIGHBOURS = ("lstrip", "rstrip", "single_word")
"""Settings with which finding an added token depends on its neighbours."""
ID = np.dtype(np.int32)
MAX_PARTS = 1 << 18
"""Number of parts of texts above which their tokens are forgotten."""
CHUNK = 8192
"""Number of records whose conversations are tokenized at once."""


def cutting_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The special tokens at which text can be cut; none if the tokenizer is not known."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    depends = any(getattr(token, name) for token in added.values() for name in NEIGHBOURS)
    if depends or any(re.search(r"[\s0-9]", text) for text in added) or not _is_known(tokenizer.backend_tokenizer):
        return ()
    special = [text for text, token in added.items() if token.special and not token.normalized]
    return tuple(text for text in special if not any(_overlap(text, other) for other in added))


def parts_of(text: str) -> list[str]:
    """The parts of a text: words and digits for the most part."""
    return WORDS.findall(text) if text == " ".join(text.split()) else CUTS.split(text)


def _is_known(backend: Any) -> bool:
    """Whether a tokenizer normalizes to NFC or not at all, splits by Qwen's pattern, and merges bytes."""
    normalizer, splitting = _state(backend.normalizer), _state(backend.pre_tokenizer)
    split, *others = splitting.get("pretokenizers", [{}])
    return bool(
        normalizer.get("type", "NFC") == "NFC"
        and split == SPLIT
        and [(other["type"], other.get("add_prefix_space"), other.get("use_regex")) for other in others]
        == [("ByteLevel", False, False)]
        and type(backend.model).__name__ == "BPE"
        and not (backend.model.dropout or backend.truncation or backend.padding or backend.encode_special_tokens)
    )


def _state(component: Any) -> dict[str, Any]:
    """The settings of a component of a tokenizer; none if it lacks the component."""
    return {} if component is None else json.loads(component.__getstate__())


def _overlap(one: str, other: str) -> bool:
    """Whether a text can hold both tokens, or one of them twice, with characters in common."""
    if one != other and (one in other or other in one):
        return True
    lengths = range(1, min(len(one), len(other)))
    return any(one[-length:] == other[:length] or other[-length:] == one[:length] for length in lengths)


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

        def prompt(record: Record, turn: int) -> Tokens:
            if not (tokens := found[id(record)]):
                return self._chat.prompt(record, turn)
            end = starts[id(record)][turn + record.num_given]
            return tokens[0][:end], np.broadcast_to(np.False_, end)  # neither array takes memory of its own

        return [prompt(record, turn) for record, turn in asked]

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


def _without_given(token_ids: NDArray[np.int32], supervised: NDArray[np.bool_], num_given: int) -> Tokens:
    """The tokens with the first answers no longer supervised."""
    if num_given:
        supervised[: _starts(supervised)[num_given]] = False
    return token_ids, supervised


def _starts(supervised: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where each answer begins."""
    return np.flatnonzero(np.diff(supervised, prepend=False) & supervised)


def make_examples(
    chat_tokenizer: ChatTokenizer,
    records: Iterable[Record],
    key_of: Callable[[Path], str],
    grid_of: Callable[[str], Grid],
    max_tokens: int,
    split: str = "train",
    limiting_key: str = "batch.max_tokens",
    order: StageOrder | None = None,
) -> tuple[list[Example], int]:
    """Examples of the records of at most `max_tokens` tokens, and how many longer records were left out.

    `limiting_key` is the key of the run file that sets `max_tokens`. With an `order`, they have its stages.

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
    order: StageOrder | None,
) -> Iterator[Example]:
    @cache
    def shown(images: tuple[Path, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        keys = tuple(key_of(path) for path in images)
        return keys, tuple(chat_tokenizer.num_image_tokens(grid_of(key)) for key in keys)

    for record, tokens in _with_tokens(ConversationTokenizer(chat_tokenizer), iter(records)):
        stage = order.stage_of(record) if order else 0
        yield Example(*tokens, *shown(record.images), record.origin, stage)


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
