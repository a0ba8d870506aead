"""One problem that an audit has found: how severe it is, how often it occurs, and where.

There are three levels: an `error` spoils a training or its scores, or stops it; a `warning` is dirt that a model would
learn; a `note` is worth knowing. `items` are complete and for programs, `examples` are the first few and for people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lookonce.text import one_line

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""All levels, the most severe first."""
NUM_EXAMPLES = 3
"""A finding shows this many of its items."""

Item = dict[str, Any]
"""One occurrence of a problem, in plain types for JSON."""


@dataclass(frozen=True)
class Finding:
    """Something wrong, or worth knowing."""

    code: str
    """The name of the problem; it does not change from version to version."""
    level: Level
    count: int
    says: str
    """One sentence with the number, without its full stop."""
    examples: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()

    @property
    def num_more(self) -> int:
        """How many items are not among the examples."""
        return len(self.items) - len(self.examples)

    def to_json(self) -> Item:
        return asdict(self)


def findings_from(
    code: str,
    level: Level,
    items: Sequence[Item],
    says: str,
    example: Callable[[Item], str],
    *,
    count: int | None = None,
    num_examples: int = NUM_EXAMPLES,
) -> list[Finding]:
    """Return one finding with its first few items as examples, or none if there are no items."""
    if not items:
        return []
    examples = tuple(one_line(example(item)) for item in items[:num_examples])
    return [Finding(code, level, len(items) if count is None else count, says, examples, tuple(items))]


def encodable(value: Any) -> Any:
    """Return a plain value with all lone surrogates in its texts escaped, which UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list | tuple) else value
