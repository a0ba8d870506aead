"""One line a logging step, for people and for `log.jsonl`.

Design: no progress bar. In a Slurm log, a bar that is redrawn is thousands of lines of noise; one dense line a logging
step reads well there and on a terminal alike.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

STOCK_PRINTERS = (PrinterCallback, ProgressCallback)
"""What Trainer would print with; removed in favour of these lines."""


class StepLines(TrainerCallback):
    """Prints what Trainer logs to stderr and appends it to `path`, one JSON object a line."""

    def __init__(self, path: Path, samples_per_step: int) -> None:
        self.path, self.samples_per_step = path, samples_per_step
        self._trainer: Any = None
        self._at = (0, 0.0, 0.0)
        """Step, time and seconds waited at the line before."""

    def attach(self, trainer: Any) -> None:
        """Read the time spent waiting for data from this trainer."""
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at = (state.global_step, time.perf_counter(), self._trainer.wait_seconds)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        place = f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
        if "loss" in logs:
            measured = self._measure(state)
            tqdm.write(f"{place}  {step_line(logs, measured)}", file=sys.stderr)
            self._append(state, logs | measured)
        elif "eval_loss" in logs:
            tqdm.write(f"{place}  validation loss {logs['eval_loss']:.4f}", file=sys.stderr)
            self._append(state, {"eval_loss": logs["eval_loss"]})

    def _measure(self, state: Any) -> dict[str, float]:
        step, start, waited = self._at
        now, waited_now = time.perf_counter(), self._trainer.wait_seconds
        self._at = (state.global_step, now, waited_now)
        seconds, num_steps = max(now - start, 1e-9), max(state.global_step - step, 1)
        return {
            "samples_per_second": num_steps * self.samples_per_step / seconds,
            "wait_share": (waited_now - waited) / seconds,
            "eta_seconds": (state.max_steps - state.global_step) * seconds / num_steps,
        }

    def _append(self, state: Any, values: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": state.global_step, "epoch": state.epoch, **values}) + "\n")


def step_line(logs: dict[str, Any], measured: dict[str, float]) -> str:
    """What is worth knowing of some steps, on one line."""
    parts = [f"loss {logs['loss']:.4f}"]
    if logs.get("grad_norm") is not None:
        parts.append(f"grad {float(logs['grad_norm']):.2f}")
    parts.append(f"lr {logs.get('learning_rate', 0):.1e}")
    parts.append(f"{measured['samples_per_second']:.0f} samples/s")
    parts.append(f"data wait {measured['wait_share']:.1%}")
    parts.append(f"eta {tqdm.format_interval(measured['eta_seconds'])}")
    return "  ".join(parts)
