"""What a result was made with, for whoever reads it later, and on which machine."""

from __future__ import annotations

import functools
import os
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lookonce.version import __version__

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
