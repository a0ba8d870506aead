"""merge.sbatch under a real Slurm: it merges, uploads, and begins again after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

NAME, BASE, TOKEN = "owner/merged", "base-owner/base-model", "hf_secret"
Make = Callable[..., Any]
Slurm = Project = Any  # of conftest.py
STAND_IN = """#!/bin/sh
echo "$2 ${HF_HUB_OFFLINE:-online}: $*" >> called
case "$2" in
  merge) [ ! -e breaks ] || { rm breaks; exit 75; }; [ ! -e fails ] || exit 1; mkdir -p "$4" ;;
esac
"""


@pytest.fixture
def stood_in(make_project: Make, undisturbed: Project) -> Project:
    """A project whose `lookonce` notes how it is called."""
    project = make_project("merge", like=undisturbed)
    (project.folder / "bin" / "lookonce").write_text(STAND_IN)
    return project


def called(project: Project) -> list[str]:
    return (project.folder / "called").read_text().splitlines()


def test_a_job_merges_a_trained_run_and_uploads_the_result(
    make_project: Make, slurm: Slurm, undisturbed: Project, make_hub: Make
):
    hub = make_hub(NAME, "models", {}, [])
    hub.exists, hub.token = False, TOKEN
    site = f"export HF_ENDPOINT={hub.endpoint} HF_TOKEN={TOKEN} HF_HUB_DISABLE_XET=1\n"
    project = make_project("merged", site=site, like=undisturbed)
    shutil.copytree(undisturbed.folder / "runs", project.folder / "runs")
    words = ["run.yaml", "models/merged", NAME, "--base-model", BASE]
    job = project.sbatch("merge", *words, options="--gres=none")
    slurm.wait(job)
    assert slurm.states(job) == {"COMPLETED"}, project.log("merge")
    assert hub.is_private and len(hub.messages) == 1
    weights = project.folder / "models" / "merged" / "model.safetensors"
    assert hub.files["model.safetensors"] == weights.read_bytes()
    assert json.loads(hub.files["lookonce-merge.json"])["made_from"]["run"] == "a"
    assert BASE in hub.files["README.md"].decode()


def test_an_interrupted_merge_begins_again_and_then_uploads(stood_in: Project, slurm: Slurm):
    (stood_in.folder / "breaks").touch()
    job = stood_in.sbatch("merge", "run.yaml", "models/m", NAME, "--public", options="--gres=none")
    slurm.until(lambda: slurm.states(job) == {"COMPLETED"})
    merge, push = "merge 1: adapter merge run.yaml models/m", f"adapter push run.yaml {NAME} --merged models/m --public"
    assert called(stood_in) == [merge, merge, f"push online: {push}"]
    again = stood_in.sbatch("merge", "run.yaml", "models/m", options="--gres=none")
    slurm.wait(again)
    assert len(called(stood_in)) == 3 and "models/m exists, so nothing is merged" in stood_in.log("merge")


def test_a_merge_that_fails_uploads_nothing(stood_in: Project, slurm: Slurm):
    (stood_in.folder / "fails").touch()
    job = stood_in.sbatch("merge", "run.yaml", "models/m", NAME, options="--gres=none")
    slurm.wait(job)
    assert slurm.states(job) == {"FAILED"} and [line[:5] for line in called(stood_in)] == ["merge"]
