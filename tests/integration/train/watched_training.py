"""`lookonce train` whose ranks write files about themselves, and fail or are signalled when a test asks for it.

    python watched_training.py WATCH train run.yaml [FLAG...]

WATCH is JSON: `folder` for the files; `sleep`: seconds before each step; `signal` and `fail`: `[step, rank]`;
`waits_for_others`: the first rank evaluates only after the other has ended; `captured`: capture passes on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

import lookonce.train.train as train_module
import lookonce.workflow as workflow
from lookonce.cli import main
from lookonce.train.data.dataset import DataCollatorForPacks
from lookonce.train.loop import trainer

WATCH = json.loads(sys.argv[1])
FOLDER, RANK = Path(WATCH["folder"]), int(os.environ.get("RANK", 0))
WAIT_S = 20

evaluate = workflow.evaluate


def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
    copies = {key: value.detach().clone() for key, value in tensors.items()}
    save_file(copies, FOLDER / f"{name}-{RANK}.safetensors")


class Watched(train_module.MetricsLog):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
        weights = [getattr(weight, "_local_tensor", weight) for weight in kwargs["model"].parameters()]
        (FOLDER / f"held-{RANK}").write_text(str(sum(weight.numel() for weight in weights)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        time.sleep(WATCH.get("sleep", 0))
        if [state.global_step, RANK] == WATCH.get("signal"):
            os.kill(os.getpid(), signal.SIGUSR1)
        if [state.global_step, RANK] == WATCH.get("fail"):
            raise RuntimeError("this rank has failed")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
        save(f"gradients-{state.global_step}", gradients)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        (FOLDER / f"validation-{state.global_step}-{RANK}").write_text(repr(metrics["eval_loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        save("weights", {name: weight for name, weight in model.named_parameters() if weight.requires_grad})


def evaluate_alone(*arguments: Any, **options: Any) -> Any:
    """Evaluate after the other rank has ended."""
    other = int((FOLDER / "pid-1").read_text())
    deadline = time.monotonic() + WAIT_S
    while is_running(other):
        assert time.monotonic() < deadline, "the other rank waits for this one"
        time.sleep(0.05)
    return evaluate(*arguments, **options)


def is_running(process_id: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def capture_on_cpu() -> None:
    """Do on a CPU what training does on a GPU, with passes that are launched instead of captured and replayed."""

    def padded(*arguments: Any, **options: Any) -> DataCollatorForPacks:
        return DataCollatorForPacks(*arguments, **options | {"pads_to_blocks": True})

    changes: list[tuple[Any, str, Any]] = [
        (trainer, "DataCollatorForPacks", padded),
        (trainer.PackTrainer, "_can_capture", lambda *_: True),
        (torch.random, "fork_rng", lambda devices: contextlib.nullcontext()),
        *((torch.cuda, name, lambda: None) for name in ("synchronize", "empty_cache", "reset_peak_memory_stats")),
        *((torch.cuda, name, lambda: 0) for name in ("max_memory_allocated", "memory_reserved")),
        (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1)),
    ]
    for owner, name, replacement in changes:
        setattr(owner, name, replacement)


if WATCH.get("captured"):
    capture_on_cpu()
if WATCH.get("waits_for_others"):
    workflow.evaluate = evaluate_alone
train_module.MetricsLog = Watched
main(sys.argv[2:])
