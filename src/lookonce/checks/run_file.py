"""The keys of a run file: all mistakes, and the run without them, so that the rest can be checked too.

Design: a value that is wrong is taken out, and its default stands for it; a variable that is not set stays in its path.
Without a value that is required, the check ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lookonce.checks.report import Result
from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.run.sections.paths import RECORDED
from lookonce.settings import explain, load_values, set_key

CORRECT = "correct it: docs/run-file.md has all keys"
REPEATS = 4
"""How often wrong values are taken out: only without them it is seen whether the others fit together."""


def check_run_file(path: Path, assignments: Sequence[str] = ()) -> tuple[RunFile | None, list[Result]]:
    """The run, with defaults for values that are wrong, and a result for each mistake; no run if it cannot be known."""
    try:
        values = load_values(path, f"run file {path}", "lookonce init writes one", "a mapping of sections")
        for assignment in assignments:
            set_key(values, assignment)
    except UsageError as error:
        return None, [_error(str(error))]
    problems, mistakes = _problems(values), list[str]()
    if not problems:
        return RunFile.model_validate(values), [Result("ok", "run file", str(path))]
    for _ in range(REPEATS):
        mistakes += [explain(problem, RunFile) for problem in problems]
        problems = _problems(values, RECORDED)
        if not problems:
            return RunFile.model_validate(values, context=RECORDED), [_error(text) for text in dict.fromkeys(mistakes)]
        for problem in reversed(problems):  # the last first, so that the numbers of a list's items stay right
            _remove(values, problem)
    return None, [_error(text) for text in dict.fromkeys(mistakes)]


def _problems(values: dict[str, Any], context: Any = None) -> list[Any]:
    try:
        RunFile.model_validate(values, context=context)
    except ValidationError as error:
        return list(error.errors())
    return []


def _error(message: str) -> Result:
    return Result("error", "run file", message, CORRECT)


def _remove(values: Any, problem: Any) -> None:
    """Take out the wrong value. The last parts of a place may be names of types; what is missing cannot be removed."""
    holder, key = None, None
    for part in problem["loc"] if problem["type"] != "missing" else ():
        try:
            holder, key, values = values, part, values[part]
        except (KeyError, IndexError, TypeError):
            break
    if holder is not None:
        del holder[key]
