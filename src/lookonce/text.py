"""Text for people: numbers, tables, bar charts, lists, and texts from data cut to fit; the form to compare texts in."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Notify = Callable[[str], None]
"""Takes a note for the user: what is being done, or what is unusual about it."""


def quiet(note: str) -> None:
    """`Notify` that drops the notes."""


def nfc(text: str) -> str:
    """The text in Unicode's normal form C, in which texts are compared.

    The tokenizers of Qwen normalise to NFC, so a model never writes another form; files of macOS and of PDF exports do.
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """The value under a key, whose normal form does not count; None if there is none."""
    if key in values or key.isascii():
        return values.get(key)
    return next((value for name, value in values.items() if nfc(name) == nfc(key)), None)


def size(num_bytes: float) -> str:
    """Bytes: "1.3 MB"."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if round(amount, 1 if unit != "B" else 0) < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds: "0.9 s", "4 min 12 s", "3 h 20 min"; "unknown" for infinity and NaN."""
    if not math.isfinite(seconds):
        return "unknown"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 image", "6,500 images"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def in_percent(ends: Sequence[float]) -> str:
    """Both ends of an interval in percent: "91.3 to 93.5"."""
    low, high = (round(100 * end, 1) + 0.0 for end in ends)  # no "-0.0"
    return f"{low:.1f} to {high:.1f}"


def shown_p(value: float) -> str:
    """A p value as text."""
    if value < 0.0001:
        return "<0.0001"
    return f"{value:.4f}" if value < 0.001 else f"{value:.3f}"


def rows(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, one pair a line, values aligned."""
    width = max(len(name) for name, _ in pairs) + 2
    return "\n".join(f"  {name:<{width}}{value}".rstrip() for name, value in pairs)


GAP = 2
"""Spaces between the columns of a table."""
MIN_COLUMN = 12
"""A column is never made narrower than this, so numbers stay whole."""


def table(header: Sequence[str], lines: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns: the first aligned left, the others right.

    On a terminal, or in `width` characters, the longest texts are shortened until the lines fit.
    """
    everything = [[one_line(cell) for cell in line] for line in (header, *lines)]
    widths = [max(len(line[column]) for line in everything) for column in range(len(header))]
    if room := width or terminal_width():
        widths = _narrowed(widths, room - GAP * (len(widths) - 1))
    return "\n".join(
        (" " * GAP)
        .join(
            shown(cell, width).ljust(width) if column == 0 else shown(cell, width).rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        .rstrip()
        for line in everything
    )


def terminal_width() -> int | None:
    """The columns of the terminal to which output goes; None for a file or a pipe, which take whole texts."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _narrowed(widths: Sequence[int], room: int) -> list[int]:
    """Widths of columns that fit, the widest narrowed first; none is narrower than `MIN_COLUMN`, whatever the room.

    The first column, which names the line, keeps twice the width of the others.
    """
    widths = list(widths)
    while sum(widths) > room and max(widths) > MIN_COLUMN:
        widest = max(range(len(widths)), key=lambda column: widths[column] * (1 if column else 0.5))
        widths[widest if widths[widest] > MIN_COLUMN else 0] -= 1
    return widths


BAR = 40
"""Characters of the longest bar."""


def bars(numbers: Sequence[tuple[str, int]]) -> str:
    """A bar chart of characters, one named number a line."""
    largest = max((number for _, number in numbers), default=0)
    width = max((len(name) for name, _ in numbers), default=0)
    return "\n".join(
        f"  {name:>{width}}  {'#' * round(BAR * number / largest) if largest else ''} {number:,}"
        for name, number in numbers
    )


def binned(counts: Mapping[int, int], max_bins: int) -> list[tuple[str, int]]:
    """Sum up how often each number occurs in at most `max_bins` ranges of the same width, named "3" or "3-5"."""
    low, high = min(counts), max(counts)
    width = -(-(high - low + 1) // max_bins)
    return [
        (
            str(start) if width == 1 else f"{start:,}-{start + width - 1:,}",
            sum(counts.get(number, 0) for number in range(start, start + width)),
        )
        for start in range(low, high + 1, width)
    ]


def listed(items: Sequence[str], most: int = 5) -> str:
    """The first few of many, and how many more: "a, b, c and 7 more"."""
    rest = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


def first_few(lines: Sequence[str], most: int, elsewhere: str = "") -> list[str]:
    """The first few of many lines, indented, and one that counts the others and may say where they are."""
    more = [f"  and {len(lines) - most:,} more{elsewhere}"] if len(lines) > most else []
    return [*(f"  {line}" for line in lines[:most]), *more]


def first_line(error: BaseException | None) -> str:
    """The first line of another library's error message, which may have dozens."""
    return next(iter(str(error).strip().splitlines()), repr(error))


MAX_SHOWN = 90


def shown(text: str, width: int = MAX_SHOWN) -> str:
    """A text from data on one line: cut if long, with escapes for characters that cannot be printed."""
    return one_line(text if len(text) <= width else text[: width - 3] + "...")


def one_line(text: str) -> str:
    """A text from data on one line, with escapes for characters that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """A text of several lines for a terminal or a log, with escapes for other characters that cannot be printed.

    Texts and names from data may have control characters, which could move the cursor, colour what follows, or turn
    the direction of a line.
    """
    return "\n".join("\t".join(map(one_line, line.split("\t"))) for line in text.split("\n"))


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, with escapes for what JSON itself would leave as it is and cannot be printed.

    A number that is not finite, which JSON has not, is null.
    """
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, default=str)
    return "\n".join(
        line if line.isprintable() else "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)
        for line in text.split("\n")
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def quoted(text: str, width: int = MAX_SHOWN) -> str:
    return f'"{shown(text, width)}"'


def shell(*words: object) -> str:
    """A command that a shell takes as these words, whatever is in them; a path is never an option."""
    return shlex.join(
        f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words
    )


def in_yaml(text: object) -> str:
    """A text as YAML, where the strings of JSON are strings too."""
    return str(text) if re.fullmatch(r"[\w/][\w./-]*", str(text)) else json.dumps(str(text), ensure_ascii=False)


def located(path: Path) -> str:
    """A path in full, and what it is relative to: "/data/a.jsonl (a.jsonl is relative to the working directory)"."""
    return str(path) if path.is_absolute() else f"{path.absolute()} ({path} is relative to the working directory)"


def short_ends(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart, where they differ."""
    parts = [path.absolute().parts for path in paths]
    names = [part[-1] for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        twice = {name for name, number in Counter(dict(zip(parts, names, strict=True)).values()).items() if number > 1}
        names = ["/".join(part[-depth:]) if name in twice else name for part, name in zip(parts, names, strict=True)]
    return names


def share(part: int, whole: int) -> float:
    return part / max(whole, 1)
