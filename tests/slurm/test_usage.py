"""slurm/submit.sh --help, which needs neither Slurm nor an installed lookonce."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_the_usage_text(root: Path, tmp_path: Path, option: str):
    program = ["/bin/bash", str(root / "slurm" / "submit.sh"), option]
    done = subprocess.run(program, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Submit a whole run as a chain of jobs: slurm/submit.sh RUN.yaml [--force]\n\n")
    assert "LOOKONCE_TASKS" in done.stdout and "set -euo" not in done.stdout
