"""What all forms ask of a value, and how a value is shown in a message."""

from __future__ import annotations

from typing import Any

from lookonce.errors import RecordsError

Row = dict[str, Any]
"""One record as a file holds it: an object of JSON, a line of CSV, a row of parquet."""
SHOWN = 200
"""Characters of a value that a message shows; an embedded image has a million."""


def text(value: Any, key: str, origin: str) -> str:
    """The value, if it is text that is not empty.

    Raises:
        RecordsError: it is not, or it can not be written in UTF-8.
    """
    if not isinstance(value, str) or not value.strip():
        raise RecordsError(f"{origin}: `{key}` must be text that is not empty, got {shown(value)}")
    if not value.isascii() and not is_utf8(value):
        raise RecordsError(f"{origin}: `{key}` holds half a character (a lone surrogate): {ascii(value)[:SHOWN]}")
    return value


def optional_text(value: Any, key: str, origin: str) -> str | None:
    """The same, or None where forms leave a key empty in place of leaving it out."""
    return None if value is None or value == "" else text(value, key, origin)


def items(value: Any, key: str, origin: str) -> list[Any]:
    """The value, if it is a list.

    Raises:
        RecordsError: it is none.
    """
    if not isinstance(value, list):
        raise RecordsError(f"{origin}: `{key}` must be a list, got {kind(value)}")
    return value


def need(row: Row, key: str, origin: str) -> Any:
    """What stands under a key.

    Raises:
        RecordsError: nothing does.
    """
    if key not in row:
        raise RecordsError(f"{origin}: expected the key `{key}`, got {sorted(row)}")
    return row[key]


def is_utf8(value: str) -> bool:
    """Whether it can be written; a lone surrogate, as JSON's escapes can make it, can not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind(value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, dict):
        return f"an object with {sorted(value)}"
    return "a list" if isinstance(value, list) else shown(value)


def shown(value: Any) -> str:
    """Its repr, cut short."""
    whole = repr(value)
    return whole if len(whole) <= SHOWN else f"{whole[:SHOWN]}... ({len(whole):,} characters)"
