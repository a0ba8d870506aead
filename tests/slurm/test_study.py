"""A study as jobs: what waits for what, what is cancelled, requeued and submitted again, under a real Slurm."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

VARIANTS = {
    "a": None,
    "b": {"starts_from": "a", "train.steps": 1},
    "broken": None,
    "after": {"starts_from": "broken"},
    "routed": {"route": {"variants": {"1": "a"}}},
}
Make = Callable[..., Any]
Slurm = Project = Any  # of conftest.py


def submit(project: Project) -> tuple[str, dict[str, str]]:
    """What slurm/study.sh says, and the jobs by run or kind."""
    done = project.submit(script="study.sh", file="study.yaml")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^  (\w+) +job (\d+) +(?:--job-name=lookonce-\w+-(\S+))?", done.stdout, re.M)
    return done.stdout, {name or kind: job for kind, job, name in lines}


@pytest.mark.guarantee(
    "A failed run of a study under Slurm stops only the runs that need it, and the same command submits only "
    "what is missing."
)
def test_a_study_is_a_job_a_run_and_only_what_is_missing_is_submitted_again(
    make_project: Make, slurm: Slurm, undisturbed: Project
):
    """One run is requeued, one fails; those after it are cancelled, and the report has the rest."""
    project = make_project("jobs", site="LOOKONCE_TASKS=1\n", like=undisturbed).empty()
    run = yaml.safe_load((project.folder / "run.yaml").read_text())
    run["data"]["stage_map"] = "stages.yaml"
    (project.folder / "stages.yaml").write_text("questions: {}\ndefault: {stage: 1}\n")
    (project.folder / "run.yaml").write_text(yaml.safe_dump(run))
    study = {"base": "run.yaml", "seeds": [1], "output": "runs/study", "variants": VARIANTS}
    (project.folder / "study.yaml").write_text(yaml.safe_dump(study))
    project.set_knobs(breaks="broken-1.yaml", step_s=2)
    said, jobs = submit(project)
    assert "missing: 1 cache, 1 report, 4 train" in said
    assert jobs.keys() == {"cache", "finalize", "a-1", "b-1", "broken-1", "after-1", "report"}
    assert slurm.jobs(jobs["b-1"])[0]["JobName"] == "lookonce-train-b-1"
    refused = project.submit(script="study.sh", file="study.yaml")
    assert refused.returncode == 1 and "lookonce-report: PENDING (Dependency)" in refused.stderr

    slurm.until(lambda: "step 1/" in project.log("train-a-1"))
    project.set_knobs(breaks="broken-1.yaml")
    assert slurm.states(jobs["finalize"]) == {"COMPLETED"} and slurm.states(jobs["b-1"]) == {"PENDING"}
    slurm.ask("scontrol", "requeue", jobs["a-1"])
    slurm.until(lambda: slurm.states(jobs["a-1"]) == {"PENDING"})
    slurm.ask("scontrol", "update", f"jobid={jobs['a-1']}", "StartTime=now")
    slurm.wait(*jobs.values())
    states = {name: slurm.states(job).pop() for name, job in jobs.items()}
    assert states == dict.fromkeys(jobs, "COMPLETED") | {"broken-1": "FAILED", "after-1": "CANCELLED"}
    assert "restart 1" in project.log("train-a-1")
    assert "training starts with the adapter of" in project.log("train-b-1")
    assert "broken-1 is not complete, and left out" in project.log("report")
    output = project.folder / "runs" / "study"
    assert (output / "report.html").exists() and (output / "routed-1" / "predictions" / "test.jsonl").exists()

    said, jobs = submit(project)
    slurm.ask("scancel", *jobs.values())
    assert "missing: 1 report, 2 train" in said and jobs.keys() == {"broken-1", "after-1", "report"}
