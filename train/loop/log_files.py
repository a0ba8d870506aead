"""What a training writes of its progress: `log.jsonl` and its printed lines, `progress.json`, and trackers.

There is no progress bar: in a Slurm log a bar that is redrawn makes thousands of lines, and one dense line per logging
step reads well there and on a terminal. Memory is what PyTorch reserved at most on this GPU, because that is what
decides whether a training fits.

A thread of the first rank rewrites `progress.json` every few seconds, so that it also shows a training that is loading,
compiling or validating, and one that hangs: its process lives but its step does not change. A training that is killed
leaves a file that is no longer touched; every other one records how it ended. The rate is that of the last minute, with
waiting for data, but not validation and checkpoints. Cost: about 7 microseconds per step, and the writes.

The trackers of `train.track` are transformers' own callbacks. TensorBoard alone gets its folder, in the run folder, and
hides what a killed training logged after the checkpoint that it is resumed from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback, get_reporting_integration_callbacks

from lookonce.claim_file import Process
from lookonce.datasets.records import Record
from lookonce.errors import Stopped, TrainingError, UsageError
from lookonce.files import parse_json, write_json, write_text
from lookonce.run.log_file import PHASES, End, Progress
from lookonce.run.sections import METRICS
from lookonce.text import count, duration, first_line, json_text
from lookonce.train.data.policy import Drawn

MUCH_WAITING, LEAST_S = 0.05, 1.0
"""Share of the time, at least in seconds; the user is notified if training waits longer for data."""
FOR_TRACKERS = ("samples_per_second", "tokens_per_second", "wait_share")
STOCK_PRINTERS = (PrinterCallback, ProgressCallback)
"""Trainer's own printing callbacks, which these lines replace."""
BEAT_S = 10.0
FIGURES = {
    "loss": "loss",
    "validation_loss": "eval_loss",
    "exact_match": "eval_exact_match",
    "score": "eval_score",
    "reward": "reward",
    "mixed_share": "mixed_share",
}
"""Figures of the progress, and their keys in Trainer's logs."""
WINDOW_BEATS = 6
"""Number of beats over which the rate is measured."""
EXTRAS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow"}
"""The extra of lookonce that installs each tracker; trackers are named as their packages."""


class MetricsLog(TrainerCallback):
    """Prints Trainer's logs to stderr and appends them to `path`, one JSON object per line; on the first rank.

    Rates include waiting for data, but not validation and checkpoints. What is measured here is added to Trainer's
    logs, so that trackers that come after this callback log it too.
    """

    def __init__(self, path: Path, samples_per_step: int, metric: str = "exact_match") -> None:
        """`metric` is that of `eval.metric`."""
        self.path, self.samples_per_step, self._metric = path, samples_per_step, metric
        self.busy_seconds = 0.0
        """Time spent in steps, including waiting for their data."""
        self.first_step = 0
        """The step from which this training resumed; 0 if it did not."""
        self.trainer: Any = None
        """Whose time spent waiting for data is logged; set before it trains."""
        self._began = 0.0
        self._at = (0, 0.0, 0.0, 0, 0)
        """Step, busy seconds, seconds waited, bytes read and tokens at the line before."""
        self._has_notified = False

    @property
    def wait_share(self) -> float:
        """Share of the time of all steps so far that was spent waiting for data."""
        waited: float = self.trainer.wait_seconds
        return waited / max(self.busy_seconds, 1e-9)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step = state.global_step
        self._at = self._now(state)
        if state.is_world_process_zero:
            drop_lines_after(self.path, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.busy_seconds += time.perf_counter() - self._began

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            _check_finite(logs, state.global_step)
        if logs and state.is_world_process_zero:
            self._show(state, logs)

    def _show(self, state: Any, logs: dict[str, Any]) -> None:
        step = f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
        if "loss" in logs:
            is_first_line, busy = self._at[0] == self.first_step, self._at[1]  # the first batches are always waited for
            measured = self._measure(state)
            memory = peak_memory()
            tqdm.write(f"{step}  {step_line(logs, measured | memory)}", file=sys.stderr)
            self._append(state, logs | measured | memory)
            logs.update({name: measured[name] for name in FOR_TRACKERS} | memory)
            if not is_first_line and self._at[1] - busy >= LEAST_S:  # shorter times say nothing
                self._notify_of_waiting(measured)
        elif evaluated := {name: value for name, value in logs.items() if name.startswith("eval_")}:
            validated = "eval_loss" in logs
            line = f"validation loss {logs['eval_loss']:.4f}" if validated else answered_line(evaluated, self._metric)
            tqdm.write(f"{step}  {line}", file=sys.stderr)
            self._append(state, evaluated | peak_memory())

    def _now(self, state: Any) -> tuple[int, float, float, int, int]:
        trainer = self.trainer
        return state.global_step, self.busy_seconds, trainer.wait_seconds, trainer.bytes_read, trainer.num_tokens

    def _measure(self, state: Any) -> dict[str, float]:
        step, busy, waited, read, num_tokens = self._at
        self._at = self._now(state)
        seconds, num_steps = max(self._at[1] - busy, 1e-9), max(state.global_step - step, 1)
        return {
            "samples_per_second": num_steps * self.samples_per_step / seconds,
            "tokens_per_second": (self._at[4] - num_tokens) / seconds,
            "wait_share": (self._at[2] - waited) / seconds,
            "read_mb_per_second": (self._at[3] - read) / seconds / 1e6,
            "eta_seconds": (state.max_steps - state.global_step) * seconds / num_steps,
        }

    def _notify_of_waiting(self, measured: dict[str, float]) -> None:
        """Notify once if features are read too slowly."""
        if measured["wait_share"] > MUCH_WAITING and not self._has_notified:
            self._has_notified = True
            tqdm.write(
                f"training waits {measured['wait_share']:.0%} of its time for features, which are read at "
                f"{measured['read_mb_per_second']:,.0f} MB/s; copy them to a faster "
                "disk (lookonce cache stage, cache.stage)",
                file=sys.stderr,
            )

    def _append(self, state: Any, values: dict[str, Any]) -> None:
        # JSON cannot hold infinity; the first gradients of fp16 are infinite.
        odd = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        values = values | dict.fromkeys(odd)
        with self.path.open("a") as file:
            now = round(time.time(), 3)
            file.write(json.dumps({"step": state.global_step, "epoch": state.epoch, "time": now, **values}) + "\n")


def drop_lines_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed training makes again, and what a killed process has written of a line."""
    if path.exists():
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                kept += [f"{line}\n"] if parse_json(line)["step"] <= step else []
        write_text(path, "".join(kept))


def write_drawn(
    path: Path, questions: Sequence[tuple[Record, int]], step: int, shown: Sequence[tuple[int, Sequence[Drawn]]]
) -> None:
    """Append what was drawn in a logged step of a training by rewards: a JSON object a question, with its answers.

    `questions` are those of the training, which `shown` names by their numbers.
    """
    with path.open("a", encoding="utf-8") as file:
        for number, group in shown:
            record, turn = questions[number]
            answers = [{"text": one.text, "reward": one.reward, "cut": one.is_cut} for one in group]
            asked, images = record.turns[turn], [str(image) for image in record.images]
            references = record.references or [asked.answer]
            about = {"origin": record.origin, "images": images, "question": asked.question}
            line = {"step": step, **about, "references": [*references], "answers": answers}
            file.write(json_text(line) + "\n")  # drawn texts have all characters that end lines


def _check_finite(logs: dict[str, Any], step: int) -> None:
    if not math.isfinite(logs["loss"]):
        raise TrainingError(
            f"the loss is {logs['loss']} at step {step}, so training diverged; lower train.learning_rate, "
            "raise train.warmup or use train.precision: bf16, and start again with --restart"
        )


def peak_memory() -> dict[str, float]:
    """The most memory that PyTorch has reserved on this process's GPU, in gigabytes; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    return {"memory_gb": round(torch.cuda.max_memory_reserved() / 1e9, 3)}


def answered_line(logs: dict[str, float], metric: str) -> str:
    """What answers score by the metric that counts, with exact match, and what they cost, on one line."""
    questions = count(int(logs["eval_num_questions"]), "question")
    scored = f"{METRICS.get(metric, metric)} {logs['eval_score']:.1%}, " if "eval_score" in logs else ""
    return f"{scored}exact match {logs['eval_exact_match']:.1%} on {questions} in {duration(logs['eval_seconds'])}"


def step_line(logs: dict[str, Any], measured: dict[str, float]) -> str:
    """The figures of the last steps on one line; of a training by rewards those of its answers, not its loss."""
    is_rewarded = "sampling_seconds" in logs
    parts = _of_rewards(logs) if is_rewarded else [f"loss {logs['loss']:.4f}"]
    if logs.get("grad_norm") is not None:
        parts.append(f"grad {float(logs['grad_norm']):.2f}")
    parts.append(f"lr {logs.get('learning_rate', 0):.1e}")
    parts.append(f"{measured['samples_per_second']:.0f} {'questions' if is_rewarded else 'samples'}/s")
    if not is_rewarded:
        parts.append(f"{measured['tokens_per_second']:,.0f} tokens/s")
    if "memory_gb" in measured:
        parts.append(f"{measured['memory_gb']:.1f} GB reserved")
    if not is_rewarded:
        parts.append(f"data wait {measured['wait_share']:.1%}")
    parts.append(f"eta {tqdm.format_interval(measured['eta_seconds'])}")
    return "  ".join(parts)


def _of_rewards(logs: dict[str, Any]) -> list[str]:
    """The answers drawn since the line before, unless all steps had those of earlier ones."""
    seconds = sum(logs[f"{phase}_seconds"] for phase in PHASES) or 1.0
    parts = ["no new answers"]
    if "reward" in logs:
        parts = [f"reward {logs['reward']:.3f}", f"mixed {logs['mixed_share']:.0%}", f"entropy {logs['entropy']:.2f}"]
        parts += [f"length {logs['answer_tokens']:.1f}"]
        parts += [f"cut {logs['cut_share']:.0%}"] if logs["cut_share"] else []
    parts += [f"kl {logs['kl']:.4f}"] if "kl" in logs else []
    return [*parts, f"sampling {logs['sampling_seconds'] / seconds:.0%}"]


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
        self._write()
        if self._is_first:
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
        self._update(phase=phase)
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
            if self._is_first and not self._is_lost():
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


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of these trackers are installed; else raises UsageError, which says what to do."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"train.track names {name}, which is not installed; install it with: "
                f"pip install 'lookonce[{EXTRAS[name]}]', or remove it from train.track"
            )


def tracker_callbacks(names: Sequence[str], folder: Path, first_step: int) -> list[TrainerCallback]:
    """transformers' callbacks that log to these trackers, for the first rank of a training that begins after a step.

    They must come after `MetricsLog`, which adds to the logs.
    """
    kinds: list[Any] = get_reporting_integration_callbacks([*names])  # type: ignore[no-untyped-call]
    return [
        kind(_tensorboard_writer(folder, first_step)) if kind is TensorBoardCallback else kind()  # type: ignore[no-untyped-call]
        for kind in kinds
    ]


def _tensorboard_writer(folder: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    files = os.environ.get("TENSORBOARD_LOGGING_DIR") or folder / "tensorboard"
    return SummaryWriter(files, purge_step=first_step + 1)
