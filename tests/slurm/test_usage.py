"""--help of the scripts that submit jobs, which needs neither Slurm nor an installed lookonce."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FIRST = {
    "submit.sh": "Submit a whole run as a chain of jobs: slurm/submit.sh RUN.yaml [--force]\n\n",
    "study.sh": "Submit a whole study, with a job for each run: slurm/study.sh STUDY.yaml [--force]\n\n",
}


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("script", FIRST)
def test_help_is_the_usage_text(root: Path, tmp_path: Path, script: str, option: str):
    program = ["/bin/bash", str(root / "slurm" / script), option]
    done = subprocess.run(program, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(FIRST[script])
    assert "run the same command again" in done.stdout and "set -euo" not in done.stdout
