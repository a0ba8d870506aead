"""Damaged files in great number, from a seed, and the bounds within which a parser must end with them.

Each case is one call in this process. It is fine if the parser returns or raises one of our own errors. All else is a
fault: another exception, more than `MAX_SECONDS`, or more than `MAX_MB` of memory beyond what was used before. A case
is known by its number, which is all that is random about it. LOOKONCE_FUZZ_CASES sets how many there are.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from lookonce.errors import LookonceError

NUM_CASES = int(os.environ.get("LOOKONCE_FUZZ_CASES", "300"))
MAX_SECONDS = 10.0
MAX_MB = 256
NUM_NAMED = 10
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Linux tells the peak of a process's memory, and forgets it on request."""

Make = Callable[[Random], bytes]
Parse = Callable[[Path], Any]


class TooSlow(BaseException):
    """A case took longer than `MAX_SECONDS`."""


@dataclass(repr=False)
class Report:
    """What came of the cases of one parser."""

    name: str
    num_read: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    peak_mb: float = 0.0
    """The most memory that a case took beyond what was used before."""
    faults: dict[str, list[int]] = field(default_factory=dict)
    """The numbers of the cases by what was wrong with them."""

    @property
    def holds(self) -> bool:
        """Whether no case is a fault. Some must be read and some refused, else the damage was none or all there is."""
        return not self.faults and self.num_read > 0 and self.num_refused > 0

    def note(self, fault: str, number: int) -> None:
        self.faults.setdefault(fault, []).append(number)

    def __repr__(self) -> str:
        num_cases = self.num_read + self.num_refused + sum(map(len, self.faults.values()))
        head = f"{self.name}: {num_cases:,} cases, {self.num_read:,} read, {self.num_refused:,} refused"
        cost = f"{self.seconds:.0f} s, slowest {self.slowest_s:.2f} s, at most {self.peak_mb:.0f} MB more"
        lines = [f"  {len(cases)} times {fault}; cases {cases[:5]}" for fault, cases in self.faults.items()]
        return "\n".join([f"{head}; {cost}", *lines[:NUM_NAMED]])


def each(*steps: Callable[[], Iterable[Any]]) -> None:
    """Take all that every step gives; one of our errors in a step does not hide what others do."""
    errors = []
    for step in steps:
        try:
            for _ in step():
                pass
        except LookonceError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def fuzz(name: str, make: Make, parse: Parse, path: Path, num_cases: int = NUM_CASES) -> Report:
    """Write `num_cases` files to `path`, one after another, and parse each."""
    report, began = Report(name), time.perf_counter()
    for number in range(num_cases):
        path.write_bytes(make(Random(f"{name} {number}")))
        _try(report, number, parse, path)
    report.seconds = time.perf_counter() - began
    print(f"\n{report}")
    return report


def _try(report: Report, number: int, parse: Parse, path: Path) -> None:
    before, began = reset_peak(), time.perf_counter()
    try:
        with _time_limit():
            parse(path)
        report.num_read += 1
    except LookonceError as error:
        if str(error).isascii() or str(error).encode("utf-8", "replace").decode() == str(error):
            report.num_refused += 1
        else:
            report.note(f"a message that cannot be printed: {ascii(error)[:120]}", number)
    except TooSlow:
        report.note(f"more than {MAX_SECONDS:g} s", number)
    except Exception as error:
        report.note(_described(error), number)
    seconds, taken = time.perf_counter() - began, memory_mb("VmHWM") - before
    report.slowest_s, report.peak_mb = max(report.slowest_s, seconds), max(report.peak_mb, taken)
    if taken > MAX_MB:
        report.note(f"more than {MAX_MB} MB", number)


def _described(error: Exception) -> str:
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "lookonce" in frame.filename]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {place}: {ascii(error)[:120]}"


@contextmanager
def _time_limit() -> Any:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reset_peak() -> float:
    RESET.write_text("5")
    return memory_mb("VmRSS")


def memory_mb(name: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
