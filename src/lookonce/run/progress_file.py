"""What a training says of itself: `progress.json` in its folder. heartbeat.py writes it, `lookonce status` reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lookonce.cache.store.claims import Worker

End = Literal["", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Progress:
    """What the file says."""

    worker: Worker
    began: float
    """Seconds since 1970, by the trainer's clock."""
    phase: str = "loading"
    step: int = 0
    num_steps: int = 0
    """0 until it is known."""
    first_step: int = 0
    """From which it went on."""
    stepped_s: float = 0.0
    """Since the last step ended, or since it began."""
    loss: float | None = None
    validation_loss: float | None = None
    ms_per_sample: float | None = None
    eta_s: float | None = None
    """Seconds of steps to come."""
    end: End = ""
    """How it ended; empty while it has not."""
    reason: str = ""
    """Why, where it did not finish."""


def read_progress(path: Path) -> Progress | None:
    """What a training says of itself; None if it says nothing."""
    try:
        value = json.loads(path.read_text())
        return Progress(**value | {"worker": Worker(**value["worker"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
