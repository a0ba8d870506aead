"""The files of an evaluation beside its results: the answers so far, and what answering cost.

Each batch of answers is one line of JSON, written when it is answered. Each rank has a file of its own,
`SPLIT.partial-RANK.jsonl`, and any number of ranks may continue from all of them. The first line identifies what the
answers depend on; files of other evaluations are deleted. A line that was cut short is asked again.

The first rank measures the cost after the model is loaded; of a resumed evaluation, that of the last part. The cost has
a file of its own, since the scores are the same bytes in every repetition.
"""

from __future__ import annotations

import contextlib
import glob
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pydantic import TypeAdapter

from lookonce.environment import device_name
from lookonce.errors import Stopped
from lookonce.eval.decoding.dialogue import Answer
from lookonce.files import naming_full_disk
from lookonce.run.folder import read_form
from lookonce.text import count


@dataclass
class AnsweringCost:
    """The content of answering/SPLIT.json in the run folder."""

    num_answered: int = 0
    """Questions that were answered in these seconds; 0 if all answers were on disk before."""
    seconds: float = 0.0
    device: str | None = None
    model_mb: float = 0.0
    """GPU memory that was allocated before the first answer, in 1024 x 1024 bytes."""
    used_mb: float = 0.0
    """GPU memory that was allocated after the last answer, without `model_mb`."""
    identity: str = ""
    """What the answers depend on, as `Questions.identity` has it."""

    @classmethod
    def read(cls, path: Path) -> AnsweringCost:
        """The cost in a file, without figures if there is none; raises RunFolderError if the file is broken."""
        return read_form(path, cls, "write it again with: lookonce eval RUN") if path.exists() else cls()

    @contextlib.contextmanager
    def measure(self, num_questions: int) -> Iterator[None]:
        """Measure how questions are answered within the block; the questions of later blocks are added."""
        began = time.perf_counter()
        if not self.num_answered:
            self.model_mb = round(_allocated_mb(), 2)
        yield
        self.num_answered += num_questions
        self.seconds = round(self.seconds + time.perf_counter() - began, 4)
        self.used_mb, self.device = round(_allocated_mb() - self.model_mb, 2), device_name()


def _allocated_mb() -> float:
    import torch

    return torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0


STAGE = re.compile(r"-stage-\d+$")
"""What the name of a later stage of an evaluation ends with."""
ANSWERS = TypeAdapter(list[Answer])
Answered = dict[int, list[Answer]]
"""The answers of whole batches, by the number of the batch."""


class PartialAnswers:
    """The files of one evaluation that has not ended; a context manager that closes the file of this rank."""

    def __init__(self, folder: Path, name: str, evaluation: str, rank: int = 0) -> None:
        """`name` is the split; `evaluation` identifies everything that the answers depend on."""
        self._folder, self._name, self._evaluation = folder, name, evaluation
        self._path = folder / f"{name}.partial-{rank}.jsonl"

    def read(self) -> Answered:
        """The answers of all ranks so far. Files of other evaluations are deleted."""
        answered: Answered = {}
        for path in self._files():
            evaluation, batch_answers = _read(path)
            if evaluation != self._evaluation:
                path.unlink()
            else:
                answered |= batch_answers
        return answered

    def __enter__(self) -> PartialAnswers:
        """Open this rank's file to append to; raises OSError if it may not be written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        end = _end_of_last_line(self._path)
        self._file.truncate(end)
        if end == 0:
            self._write({"evaluation": self._evaluation})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if isinstance(error, Stopped | KeyboardInterrupt):
            kept = sum(map(len, _read(self._path)[1].values()))
            error.add_note(f"{count(kept, 'answer')} {'is' if kept == 1 else 'are'} kept in {self._path}")

    def add(self, batch: int, answers: Sequence[Answer]) -> None:
        self._write({"batch": batch, "answers": ANSWERS.dump_python([*answers])})

    def remove(self) -> None:
        """Delete the files of all ranks."""
        for path in self._files():
            path.unlink(missing_ok=True)

    def _files(self) -> Iterator[Path]:
        return self._folder.glob(f"{glob.escape(self._name)}.partial-*.jsonl")

    def _write(self, value: object) -> None:
        line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        with naming_full_disk(self._path, len(line)):
            self._file.write(line)
            self._file.flush()


def is_begun(folder: Path, name: str) -> bool:
    """Whether an evaluation of that name has not ended."""
    return any(folder.glob(f"{glob.escape(name)}.partial-*.jsonl"))


def unfinished(folder: Path) -> dict[str, int]:
    """How many questions each evaluation without a result has answered so far, by its name; its stages together."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*.partial-*.jsonl")):
        name = STAGE.sub("", path.name.partition(".partial-")[0])
        counts[name] += sum(map(len, _read(path)[1].values()))
    return dict(counts)


def _read(path: Path) -> tuple[str, Answered]:
    """What identifies the evaluation of a file, and its answers; without a line that is cut short or not ours."""
    evaluation, answered = "", {}
    for line in path.read_bytes()[: _end_of_last_line(path)].splitlines():
        try:
            value = json.loads(line)
            evaluation = value.get("evaluation", evaluation)
            if "batch" in value:
                answered[int(value["batch"])] = ANSWERS.validate_python(value["answers"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return evaluation, answered


def _end_of_last_line(path: Path) -> int:
    """The number of bytes until the last line that is whole."""
    return path.read_bytes().rfind(b"\n") + 1
