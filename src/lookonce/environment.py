"""The process and its machine: library versions, device, host, and how this program was called.

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
    """Versions by name; None for what is not installed."""
    return {"lookonce": __version__} | {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@functools.cache
def machine() -> str:
    """This boot of this machine, and the process namespace (containers on one machine do not see each other)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def best_device() -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """The GPU's name, or "CPU"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def program() -> str:
    """What to type to call this program again: its name, or its path where the name is not on the PATH."""
    found, mine = shutil.which("lookonce"), Path(sys.argv[0])
    if mine.name != "lookonce" or (found and mine.resolve() == Path(found).resolve()):
        return "lookonce"
    return shorten(str(mine.absolute()))


def shorten(path: str) -> str:
    """Relative to the working directory, if it is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
