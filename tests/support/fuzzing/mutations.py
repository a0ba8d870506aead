"""Ways to damage a file: its bytes, the values in its JSON or YAML, and numbers that say how long something is."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

INTERESTING = [b"\0", b"\xff" * 4, b"\r\n", b"\xef\xbb\xbf", b"\xed\xa0\x80", "\u2028".encode(), b'"']
INTERESTING += [b"[" * 50, b"{" * 50]
HUGE = (-1, 0, 1, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, -(2**63))
STRINGS = (
    *("", "\0", "../../../../etc/passwd", "/dev/zero", "/dev/stdin", "a" * 5000, "\ud800", "\u202e", "NaN"),
    *("$HOME", "~root", "é\u0301", "file:///etc/passwd", "http://127.0.0.1/a.png", "data:image/png;base64,AAAA"),
    *("x.tar/../../y", "{{7*7}}"),
)
LEAVES: tuple[Any, ...] = (None, True, False, [], {}, float("nan"), float("inf"), -0.0, 1e308, *HUGE, *STRINGS)


def damaged(content: bytes, random: Random) -> bytes:
    """Bytes with one to four kinds of damage."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        content = random.choice(DAMAGES)(content, random)
    return content


def flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8)) if changed else 0):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _splice(content: bytes, random: Random) -> bytes:
    """A piece of the file at another place in it."""
    start, place = random.randrange(len(content) + 1), random.randrange(len(content) + 1)
    piece = content[start : start + random.choice((1, 16, 512, len(content)))]
    return content[:place] + piece + content[place + random.choice((0, len(piece))) :]


def _insert(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content) + 1)
    return content[:place] + random.choice(INTERESTING) + content[place:]


def number(content: bytes, random: Random) -> bytes:
    """A number of four or eight bytes, or in digits, that may be the length of something."""
    value, length = random.choice(HUGE), random.choice((4, 8))
    written = (value % (1 << 8 * length)).to_bytes(length, random.choice(("little", "big")))
    place, new = random.randrange(len(content) + 1), random.choice((written, str(value % 10**20).encode()))
    return content[:place] + new + content[place + len(new) :]


DAMAGES: tuple[Callable[[bytes, Random], bytes], ...] = (flip, _cut, _splice, _insert, number)


def changed(value: Any, random: Random) -> Any:
    """A value of JSON with something else at one place in it: another type, a wrong key, deeper nesting."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        if random.random() < 0.8:
            return value | {key: changed(value[key], random)}
        rest = {name: inner for name, inner in value.items() if name != key}
        return rest if random.random() < 0.5 else rest | {random.choice((*STRINGS, key.upper())): value[key]}
    if isinstance(value, list) and value and random.random() < 0.85:
        place = random.randrange(len(value))
        some = value * random.choice((0, 2, 3)) if random.random() < 0.2 else list(value)
        return [changed(one, random) if number == place else one for number, one in enumerate(some)]
    if random.random() < 0.1:
        for _ in range(random.choice((1, 10, 300))):
            value = [value] if random.random() < 0.5 else {"a": value}
        return value
    return random.choice(LEAVES)


def as_json(value: Any, random: Random) -> bytes:
    """JSON text of a value, which may then be damaged as text, or nested too deeply to be read."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    chance = random.random()
    if chance < 0.03:
        depth = random.choice((100, 2000, 50_000))
        return text.replace(b"null", b"[" * depth + b"]" * depth, 1) + (b"[" * depth if chance < 0.01 else b"")
    return damaged(text, random) if chance < 0.3 else text


def several(value: Any, random: Random, most: int = 3) -> Any:
    """A value with one to `most` changes."""
    for _ in range(random.randint(1, most)):
        value = changed(value, random)
    return value
