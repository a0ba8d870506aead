"""What answering cost: time and GPU memory, which submissions to challenges ask for; and which answers these are.

Design: measured by the first rank, after the model is loaded. An evaluation that was interrupted has the cost of the
questions that were answered last, and their number. Figures that vary do not belong to the scores, which are the same
bytes in every repetition; so they have a file of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lookonce.environment import device_name
from lookonce.run.folder import read_form


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
    """What the answers depend on, as `Questions.identity` has it; empty if an earlier version answered."""

    @classmethod
    def read(cls, path: Path) -> AnsweringCost:
        """The cost in a file; without figures if there is none.

        Raises:
            RunFolderError: the file is broken.
        """
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
