"""Checks of a run on the sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookonce.checks.check import check
from lookonce.checks.report import CheckReport, Result


class Checked:
    """A report and what is found in it."""

    def __init__(self, report: CheckReport) -> None:
        self.report = report

    def levels(self) -> dict[str, int]:
        return {level: self.report.number(level) for level in ("error", "warning")}

    def problems(self, what: str = "") -> list[Result]:
        """The errors and warnings about something, or about everything."""
        return [one for one in self.report.results if one.level != "ok" and what in ("", one.what)]

    def one(self, what: str) -> Result:
        """The only problem about something."""
        [found] = self.problems(what)
        return found


@pytest.fixture
def run_file(make_run: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """Writes a run file on the sample, with changes as `make_run` takes them."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(make_run(**changes).to_yaml())
        return path

    return write


@pytest.fixture
def checked(run_file: Callable[..., Path]) -> Callable[..., Checked]:
    """Checks a run on the sample."""

    def run_check(*assignments: str, most: int | None = 1000, gpu_gb: float | None = None, **changes: Any) -> Checked:
        return Checked(check(run_file(**changes), assignments, most, gpu_gb))

    return run_check
