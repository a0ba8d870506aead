"""A process that runs the commands of a study one after another: `python -m lookonce.runner`, started by study/pool.py.

A later command finds what a new process spends most of a short run on: imported libraries, CUDA's context, compiled
code, and the frozen weights of its model (train/model/load.py). It must find nothing else, so that its results are
those of a process of its own, bit for bit. So what a command changes of its process is put back (`STATE`). The process
ends after the command if any of that cannot be put back, if memory of the GPU is not freed, if the command fails (with
its exit code), or if it called functions of the user's own (`eval.metric`, `grpo.reward`), whose modules may keep
anything. study/pool.py then starts a new one.

Compiled code is kept for a command with the same options whose run has the same settings, apart from `FREE`; it is then
the code that such a process finds on the disk. For other commands it is discarded, because the compiler makes other
code if it has seen similar shapes before.

Weights, optimizer and captured passes are freed, so a run has the memory of a process of its own. CUDA's context with
compiled kernels and some kilobytes of masks stay on the GPU, the frozen weights on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lookonce import cli
from lookonce.errors import LookonceError
from lookonce.run.config import read_run_file
from lookonce.run.startup import begin_command, process_age
from lookonce.signals import SIGNALS
from lookonce.text import size

FREE: Any = {
    "data": True,
    "output": True,
    "train": set("seed epochs steps start_from learning_rate warmup scheduler logging_steps save_steps".split()),
}
"""Keys of a run file on which no compiled code depends."""
LEFT_BYTES = 1 << 28
"""If more memory of the GPU is in use after a command, some was not freed."""
BACKENDS: Any = torch.backends
PER_PROCESS = {"wandb", "mlflow"}
"""Trackers that take what a later run logs for a part of the first run of the process."""


def _set_environment(values: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


def _with_precision() -> list[Any]:
    """What has a precision of float32: PyTorch, its libraries, and kinds of products, which may have their own."""
    cudnn, mkldnn = BACKENDS.cudnn, BACKENDS.mkldnn
    return [BACKENDS, cudnn, mkldnn, BACKENDS.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv]


def _precisions() -> list[str]:
    try:
        of_products = torch.get_float32_matmul_precision()
    except RuntimeError:  # the others do not agree with it
        of_products = ""
    return [of_products, *(each.fp32_precision for each in _with_precision())]


def _set_precisions(values: list[str]) -> None:
    """Set all of them: transformers sets PyTorch's, and torch.compile makes it that of matrix products too."""
    torch.set_float32_matmul_precision(values[0])  # sets some of the others
    for each, value in zip(_with_precision(), values[1:], strict=True):
        each.fp32_precision = value
    if found := sys.modules.get("transformers.utils.import_utils"):
        getattr(found.enable_tf32, "cache_clear", int)()  # or the next command's call would set nothing


def _flags() -> dict[str, Any]:
    """Settings of PyTorch that no command changes, as far as is known."""
    cuda, cudnn = BACKENDS.cuda, BACKENDS.cudnn
    return {
        "cudnn.enabled": cudnn.enabled,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "flash attention": cuda.flash_sdp_enabled(),
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled(),
        "attention by products": cuda.math_sdp_enabled(),
        "attention of cuDNN": cuda.cudnn_sdp_enabled(),
        "default data type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "autocast on the GPU": torch.is_autocast_enabled("cuda"),
        "anomaly detection": torch.is_anomaly_enabled(),
    }


def _keep(value: Any) -> None:
    """In place of what would put a value back."""


STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the environment": (lambda: dict(os.environ), _set_environment),
    "the handlers of signals": (lambda: [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)], _keep),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of float32": (_precisions, _set_precisions),
    "flags of PyTorch": (_flags, _keep),
}
"""What a command may change of its process: how to read it, and how to put it back."""


def serve(commands: Connection) -> None:
    """Run commands, each with its log file, until there are no more; raises SystemExit if one has failed."""
    state = {name: read() for name, (read, _) in STATE.items()}
    states = random.getstate(), np.random.get_state(), torch.initial_seed()
    settings: Any = None  # before the first command
    while True:
        try:
            words, log = commands.recv()
        except (EOFError, KeyboardInterrupt):
            return
        begin_command(process_age() if settings is None else 0.0)
        before, settings, alone = settings, *_settings(words)
        if settings != before:
            _forget_compiled()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.manual_seed(states[2])
        run(words, log)
        if reasons := [*_put_back(state), *_free_memory(), *alone]:
            print(f"the next command of the study gets a new process, because of {', '.join(reasons)}", file=sys.stderr)
            return
        with contextlib.suppress(BrokenPipeError):
            commands.send(True)


def run(words: Sequence[str], log: str) -> None:
    """Run a command whose output goes to a file, from its end on; raises SystemExit if it has failed."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    with warnings.catch_warnings():
        try:
            cli.main([*words], prog_name="python -m lookonce")
        except SystemExit as end:
            if end.code:
                raise
    sys.stdout.flush()


def _settings(words: Sequence[str]) -> tuple[Any, list[str]]:
    """What the compiled code of a command may depend on, and what of it needs a process of its own."""
    try:
        run = read_run_file(Path(words[-1]))
    except LookonceError:
        return words, []  # the command itself says what is wrong
    of_own = sorted({name for name in (run.eval.metric, *run.grpo.reward) if ":" in name})  # the user's functions
    return (words[:-1], run.model_dump(exclude=FREE)), [*sorted(PER_PROCESS & {*run.train.track}), *of_own]


def _forget_compiled() -> None:
    """Forget compiled code, and the masks that it was compiled for, if there is any."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if packs := sys.modules.get("lookonce.train.model.packs"):
        packs.forget_masks()


def _put_back(state: dict[str, Any]) -> list[str]:
    """Put back what a command has changed; names what is still different."""
    for name, (_, put_back) in STATE.items():
        put_back(state[name])
    return [name + _changed(state[name], read()) for name, (read, _) in STATE.items() if read() != state[name]]


def _changed(before: Any, after: Any) -> str:
    """Which items of a dictionary have changed."""
    if not isinstance(before, dict):
        return ""
    return f" ({', '.join(name for name in before | after if before.get(name) != after.get(name))})"


def _free_memory() -> list[str]:
    """Free what the command does not need any more; names what is left on the GPU."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.utils.counters.clear()  # so that the next command counts its own graphs
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # what stays is not searched again by the next command, which takes half a second
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    left = torch.cuda.memory_allocated()
    return [f"{size(left)} of memory of the GPU"] if left > LEFT_BYTES else []


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
