"""Results of the self-test that were noted on this machine, so that it runs once on each combination.

A combination is what decides which kernels run: the GPU and its driver, torch and its compiler, transformers, this
program, and the precision. Each has a file of its own in the user's cache folder, $XDG_CACHE_HOME/lookonce/selftest
(~/.cache without the variable). A file that cannot be read or written is not an error: the self-test then runs again,
and a note says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from pathlib import Path

import torch

from lookonce.environment import device_name, library_version, library_versions
from lookonce.files import read_json, write_json
from lookonce.selftest.report import Report
from lookonce.selftest.ways import Way
from lookonce.text import Notify, first_line, quiet

MODULE = Path("/sys/module/nvidia/version")
"""The driver's version, where Linux shows its module; nvidia-smi takes a second."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
VARIABLE = "LOOKONCE_SELFTEST"
"""The environment variable that switches the self-test before trainings off."""


def combination(precision: str) -> dict[str, str]:
    """The device, its driver, the library versions and the precision; what is missing is "none"."""
    libraries = library_versions() | {"triton": library_version("triton"), "cuda": torch.version.cuda}
    names = ("torch", "cuda", "triton", "transformers", "lookonce")
    found = {"device": device_name(), "driver": _driver() if torch.cuda.is_available() else None}
    found |= {name: libraries[name] for name in names} | {"precision": precision}
    return {name: value or "none" for name, value in found.items()}


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        return MODULE.read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=60, check=True)
        return next(iter(done.stdout.split()), None)
    return None


def note_path(found: dict[str, str]) -> Path | None:
    """The file of a combination; None without a home folder."""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    with contextlib.suppress(RuntimeError):
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "lookonce" / "selftest" / f"{digest}.json"
    return None


def save_note(report: Report, notify: Notify = quiet) -> None:
    """Note a result, or say why that is not possible; earlier results of ways that it did not compare stay."""
    path, found = note_path(report.combination), report.to_json()
    compared = [way.settings for way in report.compared]
    found["exact"] += [settings for settings in noted_exact(report.combination) if settings not in compared]
    try:
        if path is None:
            raise OSError("there is no home folder")
        write_json(path, found)
    except OSError as error:
        notify(
            f"the self-test's result cannot be kept ({first_line(error)}), so it runs again before the next training; "
            "name a folder that you can write to in XDG_CACHE_HOME"
        )


def noted_exact(found: dict[str, str]) -> list[list[str]]:
    """The settings of each way that was noted as exact with a combination; empty without a note."""
    path = note_path(found)
    with contextlib.suppress(OSError, ValueError):
        noted = read_json(path) if path else {}
        if isinstance(noted, dict) and noted.get("combination") == found:
            return list(noted.get("exact", []))
    return []


def is_noted_exact(found: dict[str, str], way: Way) -> bool:
    return way.settings in noted_exact(found)
