"""What a check found, a line each, and all of it as a table of 80 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lookonce.text import count, duration

Level = Literal["ok", "warning", "error"]
WIDTH = 80
LEVEL_WIDTH, WHAT_WIDTH = 9, 13
COMMAND = re.compile(r"\b(lookonce [a-z]|chmod |namei |gunzip )")


@dataclass(frozen=True)
class Result:
    """One thing that was checked."""

    level: Level
    """`error` stops the run, `warning` may surprise, `ok` is as it should be."""
    what: str
    """The name of what was checked, such as "records"."""
    value: str
    """What was found."""
    do: str = ""
    """What to do about it: a key to change, or a command. Empty if nothing is to be done."""

    def lines(self) -> Iterator[str]:
        """The result as lines of a table; what to do stands below what was found."""
        left = f"{self.level:<{LEVEL_WIDTH}}{self.what:<{WHAT_WIDTH}}"
        for text in filter(None, (self.value, f"-> {self.do}" if self.do else "")):
            for line in _wrapped(text, WIDTH - len(left)):
                yield left + line
                left = " " * len(left)


def _wrapped(text: str, width: int) -> list[str]:
    """The lines of a text; a command and what follows it stay on one line, so that it can be copied."""
    found = COMMAND.search(text)
    if found is None or len(text) <= width:
        return textwrap.wrap(text, width, break_on_hyphens=False)
    before, command = text[: found.start()], text[found.start() :].splitlines()
    if before in ("", "-> "):
        return [before + command[0], *command[1:]]
    return [*textwrap.wrap(before, width, break_on_hyphens=False), *command]


@dataclass(frozen=True)
class CheckReport:
    """All that was found about a run file."""

    run_file: Path
    num_records: int
    """Number of records that were read."""
    is_complete: bool
    """Whether these are all records of the run."""
    seconds: float
    results: list[Result]

    @property
    def is_ok(self) -> bool:
        return self.number("error") == 0

    def number(self, level: Level) -> int:
        """The number of results of a level."""
        return sum(result.level == level for result in self.results)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"num_errors": self.number("error"), "num_warnings": self.number("warning")}

    def text(self) -> str:
        table = [line for result in self.results for line in result.lines()]
        read = count(self.num_records, "record") + ("" if self.is_complete else ", not all: --all reads the rest")
        found = f"{count(self.number('error'), 'error')}, {count(self.number('warning'), 'warning')}"
        return "\n".join([*table, "", f"{found}; {read}; {duration(self.seconds)}"])
