"""The process and its machine: library versions, device, host, rank, and how this program was called.

Design: torch is imported inside the functions that need it, so that commands that only read start without it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from lookonce.version import __version__

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 1_000_000_000
"""Models with fewer bytes of weights get one CPU thread: the sample's has 9 MB, the smallest Qwen3-VL 4.3 GB."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user sets the number of CPU threads."""
MANY_OBJECTS = 1_000_000
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors", "numpy", "pillow")


def library_versions() -> dict[str, str | None]:
    """Versions by name; None for a library that is not installed."""
    return {"lookonce": __version__} | {name: library_version(name) for name in LIBRARIES}


@functools.cache
def library_version(name: str) -> str | None:
    """The version of a library; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@functools.cache
def machine() -> str:
    """An identifier of this boot of this machine and of the process namespace: containers do not see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def rank() -> int:
    """The number of this process among those that torchrun started, from 0 on; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """How many processes torchrun started on all machines; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process among those of this machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def best_device() -> torch.device:
    """The GPU of this process, or the CPU if there is no GPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """The GPU's name, or "CPU"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def gpu_gb() -> float | None:
    """The memory of this process's GPU in GB (10^9 bytes); None without a GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else None


def limit_cpu_threads(model_folder: Path) -> None:
    """On a CPU, compute a small model with one thread, unless the user has set a number of threads.

    The threads of a matrix product wait for each other when it ends. The products of a small model are so short that
    this costs more than it gains, and far more if other programs use the same cores: 200 steps of the sample's model
    took 6 s with one thread and 14 s with two, and 131 s with two while a second training ran. The number depends on
    the model alone, since another number of threads may round sums differently: so a training of a small model has the
    same bits on machines with other numbers of cores.
    """
    import torch

    if torch.cuda.is_available() or any(os.environ.get(name) for name in THREADS):
        return
    if sum(file.stat().st_size for file in model_folder.glob("*.safetensors")) < SMALL_BYTES:
        torch.set_num_threads(1)


def program() -> str:
    """The command that calls this program again: its name, or its path if the name is not on the PATH."""
    found, mine = shutil.which("lookonce"), Path(sys.argv[0])
    if mine.name != "lookonce" or (found and mine.resolve() == Path(found).resolve()):
        return "lookonce"
    return shorten(str(mine.absolute()))


def shorten(path: str) -> str:
    """The path relative to the working directory, if it is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause Python's search for cycles while many objects are made: it would look at all of them again and again.

    If they are very many, it never looks at them later either: a search through a million records takes 2 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY_OBJECTS:
            gc.freeze()
        if was_enabled:
            gc.enable()
