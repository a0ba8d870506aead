"""Keep `progress.json` in the run folder up to date while a training runs.

Design: a thread of the first rank rewrites the file every few seconds, so that it also shows a training that is
loading, compiling or validating, and one that hangs: its process lives but its step does not change. A new phase is
written at once. A training that is killed (SIGKILL, a lost node) leaves a file that is no longer touched; every other
one records how it ended. The rate is that of the last minute: it includes waiting for data, but not validation and
checkpoints. Cost: about 7 microseconds per step, and the writes.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import TrainerCallback

from lookonce.claim_file import Process
from lookonce.errors import Stopped
from lookonce.files import write_json
from lookonce.run.progress_file import End, Progress
from lookonce.text import first_line

BEAT_S = 10.0
FIGURES = {"loss": "loss", "validation_loss": "eval_loss", "exact_match": "eval_exact_match"}
"""Figures of the progress, and their keys in Trainer's logs."""
WINDOW_BEATS = 6
"""Number of beats over which the rate is measured."""


class Heartbeat(TrainerCallback):
    """A context manager around a whole training, and a callback in it; does nothing if `is_first` is false."""

    def __init__(
        self,
        path: Path,
        samples_per_step: int,
        is_first: bool = True,
        beat_s: float = BEAT_S,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_lost` says whether another process has taken over the run folder; then nothing more is written."""
        self.path, self._samples_per_step, self._is_first, self._beat_s = path, samples_per_step, is_first, beat_s
        self._is_lost = is_lost
        self.progress = Progress(Process.this(), time.time())
        self._stepped = self._step_began = time.monotonic()
        self._busy_s = 0.0
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW_BEATS + 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._is_first:
            self._write()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._is_first:
            return
        self._ended.set()
        self._thread.join()
        self._measure()
        self._update(end=_end(error), reason=_reason(error), eta_s=None)
        self._write()

    def enter(self, phase: str) -> None:
        """Record that a new phase begins."""
        self._update(phase=phase)
        if self._is_first:
            self._write()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        self._window.append((step, self._busy_s))
        self._update(step=step, first_step=step, num_steps=state.max_steps)
        self.enter("training")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stepped = time.monotonic()
        self._busy_s += self._stepped - self._step_began
        self._update(step=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, key in FIGURES.items():
            if logs and key in logs:
                value = float(logs[key])
                self._update(**{name: value if math.isfinite(value) else None})

    def _update(self, **changes: Any) -> None:
        with self._lock:  # neither thread may undo the other's changes
            self.progress = replace(self.progress, **changes)

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._measure()
            self._write()

    def _measure(self) -> None:
        progress, busy_s = self.progress, self._busy_s
        self._window.append((progress.step, busy_s))
        first_step, first_busy_s = self._window[0]
        changes: dict[str, Any] = {"stepped_s": round(time.monotonic() - self._stepped, 1)}
        if num_steps := progress.step - first_step:
            seconds = (busy_s - first_busy_s) / num_steps
            changes["ms_per_sample"] = round(1000 * seconds / self._samples_per_step, 3)
            changes["eta_s"] = round((progress.num_steps - progress.step) * seconds, 1)
        self._update(**changes)

    def _write(self) -> None:
        # The lock makes the last write the newest. It is not the lock of `_update`, because a step must not wait for
        # the disk. A full disk is ignored: it may have room at the next beat.
        with self._writing, contextlib.suppress(OSError):
            if not self._is_lost():
                write_json(self.path, asdict(self.progress))


def _reason(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C"
    return first_line(error) if str(error) else type(error).__name__


def _end(error: BaseException | None) -> End:
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
