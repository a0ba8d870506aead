"""One thing that an audit has found: how bad it is, how often it occurs, and where.

Three levels: an `error` spoils a training or its numbers, or stops it; a `warning` is dirt that a model would learn; a
`note` is worth knowing. `items` are complete and for programs, `examples` are the first few and for people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
NUM_EXAMPLES = 3

Item = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """Something wrong, or worth knowing."""

    code: str
    """Its name, which does not change from version to version."""
    level: Level
    count: int
    says: str
    """One sentence, with the number."""
    examples: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()

    def to_json(self) -> Item:
        return asdict(self)


def find(
    code: str,
    level: Level,
    items: Sequence[Item],
    says: str,
    example: Callable[[Item], str],
    *,
    count: int | None = None,
    num_examples: int = NUM_EXAMPLES,
) -> list[Finding]:
    """A finding with its first few items as examples, or none where there are no items."""
    if not items:
        return []
    examples = tuple(example(item) for item in items[:num_examples])
    return [Finding(code, level, len(items) if count is None else count, says, examples, tuple(items))]


def valid(value: Any) -> Any:
    """Plain values as they are, but for halves of surrogate pairs in texts, which no file of UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {valid(key): valid(item) for key, item in value.items()}
    return [valid(item) for item in value] if isinstance(value, list | tuple) else value
