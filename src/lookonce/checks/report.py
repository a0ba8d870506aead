"""What a check found, a line each, and all of it as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lookonce.text import count, duration

Level = Literal["ok", "warning", "error"]
LEVEL_WIDTH, WHAT_WIDTH = 9, 13


@dataclass(frozen=True)
class Result:
    level: Level
    """`error` stops the run, `warning` may surprise, `ok` is as it should be."""
    what: str
    """The name of what was checked, such as "records"."""
    value: str
    do: str = ""
    """What to do about it: a key to change, or a command. Empty if nothing is to be done."""

    def text(self) -> str:
        """The result as a line, and what to do below it; neither is wrapped, so that a command can be copied."""
        line = f"{self.level:<{LEVEL_WIDTH}}{self.what:<{WHAT_WIDTH}}{self.value}"
        return "\n".join([line, *([f"{'':{LEVEL_WIDTH + WHAT_WIDTH}}-> {self.do}"] if self.do else [])])


@dataclass(frozen=True)
class CheckReport:
    run_file: Path
    num_records: int
    is_complete: bool
    """Whether these are all records of the run."""
    seconds: float
    results: list[Result]

    @property
    def is_ok(self) -> bool:
        return self.number("error") == 0

    def number(self, level: Level) -> int:
        return sum(result.level == level for result in self.results)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"num_errors": self.number("error"), "num_warnings": self.number("warning")}

    def text(self) -> str:
        table = [result.text() for result in self.results]
        read = count(self.num_records, "record") + ("" if self.is_complete else ", not all: --all reads the rest")
        numbers = f"{count(self.number('error'), 'error')}, {count(self.number('warning'), 'warning')}"
        return "\n".join([*table, "", f"{numbers}; {read}; {duration(self.seconds)}"])
