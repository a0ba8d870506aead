"""The progress of a training: `progress.json` in the run folder. log_files.py writes it, `lookonce status` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from lookonce.claim_file import Process, read_process_file

End = Literal["", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Progress:
    """The content of the file."""

    __pydantic_config__: ClassVar[ConfigDict] = {"allow_inf_nan": False}

    worker: Process
    began: float
    """When the training began, in seconds since 1970 by the trainer's clock."""
    phase: str = "loading"
    step: int = 0
    num_steps: int = 0
    """All steps of the training; 0 until their number is known."""
    first_step: int = 0
    """The step of the checkpoint from which the training resumed; 0 if it did not."""
    stepped_s: float = 0.0
    """Seconds since the last step ended, or since the training began."""
    loss: float | None = None
    validation_loss: float | None = None
    exact_match: float | None = None
    """The last one that was measured while training."""
    ms_per_sample: float | None = None
    eta_s: float | None = None
    """Estimated seconds for the remaining steps."""
    end: End = ""
    """How the training ended; empty while it runs."""
    reason: str = ""
    """Why it stopped or failed."""


_PROGRESS = TypeAdapter(Progress)


def read_progress(path: Path) -> Progress | None:
    """The progress of a training; None if the file is missing, unreadable or of another form."""
    return read_process_file(path, lambda **values: _PROGRESS.validate_python(values))
