"""Programs that tests of the package run, without this environment's Python paths; and uv's resolver."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 900
OURS = ("LOOKONCE", "PYTHON", "VIRTUAL")
"""Beginnings of the variables that a program does not get."""
PLATFORM = "x86_64-manylinux_2_28"
SOURCE_ONLY = ("rouge-score",)
"""Packages without a wheel; they are pure Python."""


def run(*words: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that must succeed, without this environment's Python paths; its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    command = [str(word) for word in words]
    environment = clean | with_find_links() | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def with_find_links() -> dict[str, str]:
    """uv's variable for the folder of wheels that pip is given, such as one with torch for CPUs."""
    return {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}


def resolve(root: Path, python: str, versions: str, fixed: Mapping[str, str] | None = None) -> dict[str, str]:
    """The version of each package that pyproject.toml with all extras resolves to, by its normalised name.

    `versions` is `lowest-direct` or `highest`; `fixed` are versions that are taken whatever the bounds say.
    """
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder, "overrides.txt")
        overrides.write_text("".join(f"{name}=={version}\n" for name, version in (fixed or {}).items()))
        words = ["--all-extras", "--resolution", versions, "--python-version", python, "--python-platform", PLATFORM]
        words += ["--only-binary", ":all:", *(word for name in SOURCE_ONLY for word in ("--no-binary", name))]
        words += ["--overrides", str(overrides), "--no-header", "--no-annotate", "--quiet"]
        done = run(sys.executable, "-m", "uv", "pip", "compile", root / "pyproject.toml", *words, folder=Path(folder))
    lines = [line.partition(";")[0].strip() for line in done.stdout.splitlines()]
    return dict(line.split("==") for line in lines if "==" in line)
