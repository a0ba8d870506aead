"""What slurm/ promises, under a real Slurm. The jobs that reach a real time limit start first and are checked last."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

SAME_RESULT = pytest.mark.guarantee(
    "A cache build and a training that meet their time limit under Slurm, are requeued, preempted or lose a "
    "node end with the same features and adapter."
)

ONE, TWO = "127.0.1.1", "127.0.1.2"
TWO_NODES = "--nodes=2 --ntasks-per-node=1"
Make = Callable[..., Any]
Slurm = Project = Any  # of conftest.py


@dataclass(frozen=True)
class Limited:
    """A cache job and a training job that need more than their limit of a minute, and the expected result."""

    undisturbed: Project
    caching: Project
    cache_job: str
    training: Project
    train_job: str


@pytest.fixture(scope="session", autouse=True)
def limited(make_project: Make, undisturbed: Project) -> Limited:
    minute = f"--time=1 --signal=B:USR1@10 --nodelist={ONE} --gres=none"  # the other tests use the GPUs
    caching, training = (
        make_project(name, like=undisturbed, steps=30, save_steps=100) for name in ("caching", "training")
    )
    caching.empty().set_knobs(encode_s=8)
    training.set_knobs(step_s=2.5)
    cache_job = caching.sbatch("cache", "run.yaml", "1", options=f"--array=0 {minute}")
    return Limited(undisturbed, caching, cache_job, training, training.sbatch("train", "run.yaml", options=minute))


@pytest.fixture(scope="session", autouse=True)
def on_two_nodes(make_project: Make, undisturbed: Project, limited: Limited) -> tuple[Project, str]:
    """An uninterrupted training on two nodes, and its job."""
    project = make_project("alone", like=undisturbed, steps=8, save_steps=100)
    return project, project.sbatch("train", "run.yaml", options=f"{TWO_NODES} --gres=none")


def test_shellcheck_finds_nothing(root):
    scripts = [path for path in (root / "slurm").iterdir() if path.suffix in (".sh", ".sbatch", ".example")]
    scripts += [root / "tests" / "slurm" / "cluster.sh", root / "slurm" / "container" / "lookonce"]
    done = subprocess.run(["shellcheck", *map(str, scripts)], cwd=root, capture_output=True, text=True)
    assert len(scripts) > 8 and done.returncode == 0, done.stdout


def test_slurm_accepts_the_directives(slurm: Slurm, root: Path):
    for script in sorted((root / "slurm").glob("*.sbatch")):
        options = ["--gres=gpu:2"] if script.stem == "study" else []
        slurm.ask("sbatch", "--test-only", *options, str(script), "run.yaml")
        assert not re.search(r"(account|partition|qos)=|^ *module", script.read_text(), re.M)


def test_either_all_jobs_are_submitted_or_none(make_project: Make, slurm: Slurm):
    project = make_project("refused", site='LOOKONCE_EVAL_OPTIONS="--partition=absent"\n')
    # A job may begin before the submission is refused: it must still run when it is cancelled.
    answers = "#!/bin/sh\n[ \"$1\" = status ] || exec sleep 60\nprintf 'cache 3\\ntrain\\neval\\n'\n"
    (project.folder / "bin" / "lookonce").write_text(answers)
    done = project.submit()
    jobs = re.findall(r"job (\d+)", done.stdout)
    assert done.returncode == 1 and len(jobs) == 3
    assert f"nothing is left in the queue (cancelled: {' '.join(jobs)})" in done.stderr
    slurm.wait(*jobs)
    assert {state for job in jobs for state in slurm.states(job)} == {"CANCELLED"}


def test_one_command_submits_a_run_and_prints_what_is_missing(make_project: Make, slurm: Slurm):
    """With more tasks than an array may have, no environment passed to jobs, and a copy on the node's own disk."""
    project = make_project(
        "fresh", site="export SBATCH_EXPORT=NONE LOOKONCE_TASKS=6\nexport LOOKONCE_STAGE=$PWD/near\n"
    )
    done = project.submit()
    assert done.returncode == 0, done.stderr
    assert "missing: cache (10 shards), train, eval" in done.stdout
    jobs = re.findall(r"^  (\w+) +job (\d+) +(.*)$", done.stdout, re.M)
    assert [kind for kind, _, _ in jobs] == ["cache", "cache", "finalize", "train", "eval"]
    assert [note for _, _, note in jobs[:2]] == ["--array=0-4", "--array=0-0"]
    assert "watch -x -n 10 lookonce status run.yaml" in done.stdout

    again = project.submit()
    assert again.returncode == 1 and "still in the queue" in again.stderr
    assert f"{jobs[-1][1]} lookonce-eval: PENDING (Dependency)" in again.stderr

    slurm.wait(jobs[-1][1])
    assert {state for _, job, _ in jobs for state in slurm.states(job)} == {"COMPLETED"}
    assert {f"worker {number} of 6 " in project.log("cache") for number in range(6)} == {True}
    assert (project.folder / "runs/a/metrics/test.json").exists()
    assert list((project.folder / "near").glob("*/shards/*")) and "no complete copy" not in project.log("train")
    assert "nothing of run.yaml is missing" in project.submit().stdout


def test_after_failures_the_same_command_builds_only_what_is_missing(
    make_project: Make, slurm: Slurm, undisturbed: Project
):
    """One task fails, the other is cancelled; cancelled jobs stay cancelled."""
    project = make_project("failing", site="LOOKONCE_TASKS=2\n", like=undisturbed).empty()
    project.set_knobs(encode_s=2, fails="1")
    jobs = re.findall(r"job (\d+)", project.submit().stdout)
    cache, finalize, train, evaluation = jobs
    slurm.until(lambda: slurm.states(f"{cache}_1") == {"FAILED"} and len(project.shards) >= 2)
    slurm.ask("scancel", f"{cache}_0")
    slurm.wait(finalize, train, evaluation)
    assert slurm.states(f"{cache}_0") == {"CANCELLED"} and slurm.states(train) == {"CANCELLED"}
    assert "slurm/submit.sh run.yaml" in project.log("finalize")
    before = project.shards
    assert 2 <= len(before) < 10

    project.set_knobs()
    done = project.submit()
    assert f"missing: cache ({10 - len(before)} shards), train, eval" in done.stdout
    cache, finalize, *others = re.findall(r"job (\d+)", done.stdout)
    slurm.wait(finalize)
    slurm.ask("scancel", *others)
    assert slurm.states(finalize) == {"COMPLETED"}
    assert before.items() <= project.shards.items() and len(project.shards) == 10
    assert project.has_features_of(undisturbed)


@SAME_RESULT
def test_the_last_task_of_an_array_is_requeued_alone(make_project: Make, slurm: Slurm, undisturbed: Project):
    """Its SLURM_JOB_ID is that of the whole array."""
    project = make_project("last", like=undisturbed).empty()
    project.set_knobs(encode_s=3)
    job = project.sbatch("cache", "run.yaml", "2", options="--array=0-1")
    slurm.until(lambda: len(list(project.folder.glob("encoded-*"))) == 2)
    slurm.ask("scancel", "--batch", "-s", "USR1", f"{job}_1")
    slurm.until(lambda: "USR1: stopping" in project.log("cache"))
    project.set_knobs()
    slurm.wait(job)
    assert slurm.states(job) == {"COMPLETED"}
    restarts = {facts["ArrayTaskId"]: facts["Restarts"] for facts in slurm.jobs(job)}
    assert restarts == {"0": "0", "1": "1"}
    assert project.has_features_of(undisturbed)


@SAME_RESULT
def test_after_a_node_failure_its_task_continues_beside_the_old_process(
    make_project: Make, slurm: Slurm, undisturbed: Project
):
    project = make_project("lost", like=undisturbed).empty()
    project.set_knobs(encode_s=3)
    job = project.sbatch("cache", "run.yaml", "1", options=f"--array=0 --nodelist={TWO}")
    [notes] = slurm.until(lambda: list(project.folder.glob("encoded-*")))
    os.kill(slurm.slurmd(TWO), signal.SIGKILL)
    slurm.ask("scontrol", "update", f"nodename={TWO}", "state=down", "reason=test")
    try:
        slurm.ask("scontrol", "update", f"jobid={job}", "NodeList=")
        _, other = slurm.until(lambda: len(found := sorted(project.folder.glob("encoded-*"))) == 2 and found)
        assert is_alive(notes) and is_alive(other), "two writers for a while"
        slurm.wait(job)
        slurm.until(lambda: not is_alive(notes))
    finally:
        slurm.ask("/usr/sbin/slurmd", "-N", TWO)
        slurm.until(lambda: "down" not in slurm.ask("sinfo", "-h", "-n", TWO, "-o", "%t"))
    assert slurm.states(job) == {"COMPLETED"}
    assert "restart 1" in project.log("cache")
    assert project.has_features_of(undisturbed)


@SAME_RESULT
def test_a_training_on_two_nodes_is_preempted_and_resumes(
    make_project: Make, slurm: Slurm, undisturbed: Project, on_two_nodes: tuple[Project, str]
):
    project = make_project("preempted", like=undisturbed, steps=8, save_steps=100)
    project.set_knobs(step_s=2)
    preempted = project.sbatch("train", "run.yaml", options=TWO_NODES)
    slurm.until(lambda: "step 2/8" in project.log("train"))
    urgent = ["--partition=urgent", f"--nodelist={TWO}", "--gres=gpu:2", "--output=/dev/null", "--wrap=true"]
    slurm.wait(slurm.ask("sbatch", "--parsable", *urgent))
    project.set_knobs()
    alone, job = on_two_nodes
    slurm.wait(preempted, job)
    log = project.log("train")
    assert slurm.jobs(preempted)[0]["Restarts"] == "1" and slurm.states(preempted) == {"COMPLETED"}, log
    assert "2 processes on 127.0.1.[1-2], restart 1" in log and re.search(r"resuming from checkpoint-\d+", log), log
    assert slurm.states(job) == {"COMPLETED"}, alone.log("train")
    assert project.has_adapter_of(alone)


def test_an_evaluation_is_requeued_and_continues(make_project: Make, slurm: Slurm, undisturbed: Project):
    project = make_project("scored", like=undisturbed, steps=30, save_steps=100)
    shutil.copytree(undisturbed.folder / "runs", project.folder / "runs")
    answers, metrics = (project.folder / "runs/a" / name for name in ("predictions/test.jsonl", "metrics/test.json"))
    expected = answers.read_text()
    answers.unlink()
    metrics.unlink()
    project.set_knobs(answer_s=3)
    job = project.sbatch("eval", "run.yaml", options="--gres=none")
    slurm.until(lambda: "batch" in text(answers.with_name("test.partial-0.jsonl")))
    slurm.ask("scancel", "--batch", "-s", "USR1", job)
    slurm.until(lambda: "USR1: stopping" in project.log("eval"))
    project.set_knobs()
    slurm.wait(job)
    log = project.log("eval")
    assert slurm.states(job) == {"COMPLETED"} and slurm.jobs(job)[0]["Restarts"] == "1", log
    assert "continuing an evaluation" in log and answers.read_text() == expected and metrics.exists()


def test_a_study_on_a_node_is_requeued_until_nothing_is_missing(make_project: Make, slurm: Slurm):
    project = make_project("study")
    variants = {"a": {"train.steps": 150}, "b": {"starts_from": "a", "train.steps": 2}}
    study = {"base": "run.yaml", "seeds": [1], "output": "runs/study", "variants": variants}
    (project.folder / "study.yaml").write_text(yaml.safe_dump(study))
    job = project.sbatch("study", "study.yaml", "--parallel", "2", options="--gres=gpu:2")
    output = project.folder / "runs" / "study"
    slurm.until(lambda: "/150  loss" in text(output / "logs" / "a-1.log"))
    slurm.ask("scancel", "--batch", "-s", "USR1", job)
    slurm.wait(job)
    assert slurm.jobs(job)[0]["ExitCode"] == "0:0" and slurm.jobs(job)[0]["Restarts"] == "1"
    assert "USR1 sent to the jobs" in project.log("study") and "2 of 2 runs complete" in project.log("study")
    assert "resuming from checkpoint-" in text(output / "logs" / "a-1.log")


@SAME_RESULT
def test_at_a_real_time_limit_cache_and_training_stop_resume_and_give_the_same_result(slurm: Slurm, limited: Limited):
    slurm.wait(limited.cache_job, limited.train_job)
    for project, kind, job in (
        (limited.caching, "cache", limited.cache_job),
        (limited.training, "train", limited.train_job),
    ):
        assert slurm.states(job) == {"COMPLETED"}, project.log(kind)
        assert int(slurm.jobs(job)[0]["Restarts"]) >= 1
        assert "USR1: stopping, to resume later" in project.log(kind)
    assert limited.caching.has_features_of(limited.undisturbed)
    assert limited.training.has_adapter_of(limited.undisturbed)


def is_alive(notes: Path) -> bool:
    """Whether the worker that wrote these notes is running."""
    return Path(f"/proc/{notes.name.rpartition('-')[2]}/cmdline").exists()


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
