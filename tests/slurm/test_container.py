"""Jobs in a container, without Slurm: what environment.sh and container/lookonce run. A script stands for Apptainer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

APPTAINER = '#!/bin/bash\nprintf "%s\\n" "$(basename "$0")" "$@" "HF_HUB_OFFLINE=$HF_HUB_OFFLINE"\nexit 75\n'
JOB = 'set -euo pipefail\n. "$1/slurm/environment.sh"\nbash "$1/slurm/rank.sh" lookonce train "a b.yaml" --resume\n'


@pytest.fixture
def job(root: Path, tmp_path: Path):
    """Runs a training as a job of one rank does, with site settings and programs of the test's own."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "slurm").symlink_to(root / "slurm")
    for name in ("apptainer", "podman", "lookonce"):
        (programs / name).write_text(APPTAINER)
        (programs / name).chmod(0o755)
    (tmp_path / "image.sif").touch()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "LOOKONCE"))}

    def run(**site: str) -> subprocess.CompletedProcess[str]:
        environment = clean | {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_NTASKS": "1"} | site
        command = ["bash", "-c", JOB, "job", str(tmp_path)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_every_command_runs_in_the_container_and_its_exit_code_is_that_of_the_rank(job, tmp_path):
    done = job(LOOKONCE_CONTAINER="image.sif")
    words = ["apptainer", "exec", "--nv", str(tmp_path / "image.sif"), "lookonce", "train", "a b.yaml", "--resume"]
    assert (done.stdout.splitlines(), done.returncode) == ([*words, "HF_HUB_OFFLINE=1"], 75), done.stderr


def test_the_program_and_its_options_can_be_others(job, tmp_path):
    done = job(LOOKONCE_CONTAINER="image.sif", LOOKONCE_CONTAINER_RUN="podman run --rm")
    assert done.stdout.splitlines()[:5] == ["podman", "run", "--rm", str(tmp_path / "image.sif"), "lookonce"]


def test_a_container_that_does_not_exist_ends_the_job_before_it_starts(job):
    done = job(LOOKONCE_CONTAINER="absent.sif")
    assert done.returncode == 1 and done.stdout == ""
    assert "no container at absent.sif (LOOKONCE_CONTAINER); build one:" in done.stderr


def test_without_a_container_the_command_of_the_environment_runs(job):
    done = job(LOOKONCE_VENV="nowhere")
    assert done.stdout.splitlines()[:2] == ["lookonce", "train"]
