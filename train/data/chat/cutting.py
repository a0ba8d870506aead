"""Where a rendered conversation can be cut, so that the tokens of its parts are those of the whole.

Design: a tokenizer first finds its added tokens, then encodes each stretch between them by itself: it normalizes the
stretch to NFC, splits it into matches of a pattern, and encodes each match by itself. So a text can be cut where a
match is certain to end, what was matched before does not depend on what follows, and nothing combines across. With
Qwen's pattern these places are

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
from typing import Any

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
