"""The process and its machine: library versions, device, host, rank, and how this program was called.

Design: torch is imported inside the functions that need it, so that commands that only read start without it.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from lookonce.version import __version__

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors", "numpy", "pillow")


def library_versions() -> dict[str, str | None]:
    """Versions by name; None for a library that is not installed."""
    return {"lookonce": __version__} | {name: _version(name) for name in LIBRARIES}


@functools.cache
def _version(name: str) -> str | None:
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
