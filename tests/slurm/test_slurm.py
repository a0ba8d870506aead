"""What slurm/ promises, under a real Slurm. What meets its real time limit is begun first and looked at last."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ONE, TWO = "127.0.1.1", "127.0.1.2"
TWO_NODES = "--nodes=2 --ntasks-per-node=1"
MEGABYTE = 20_000
"""As slow_lookonce.py has it."""
Make = Callable[..., Any]
Slurm = Work = Any  # of conftest.py


BY_HAND = """
from pathlib import Path
from lookonce.run import records as content
from lookonce.run.inputs import Inputs
from lookonce.workflow.train import train
from lookonce.run.config import read_run_file
content.MEGABYTE = {megabyte}
run = read_run_file(Path("run.yaml"))
Inputs.open(run).build()
train(run)
"""
"""Cache and training in one process, which takes half as long as in two."""


@dataclass(frozen=True)
class Limited:
    """A cache and a training that need longer than the minute that they get, and what they have to come to."""

    whole: Work
    caching: Work
    cache_job: str
    training: Work
    train_job: str


@pytest.fixture(scope="session")
def whole(make_work: Make, root: Path) -> Work:
    """A run done by hand, without Slurm and without interruption."""
    work = make_work("whole", steps=30, save_steps=100)
    program = [sys.executable, "-c", BY_HAND.format(megabyte=MEGABYTE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    subprocess.run(program, cwd=work.folder, env=environment, check=True, capture_output=True)
    return work


@pytest.fixture(scope="session", autouse=True)
def limited(make_work: Make, whole: Work) -> Limited:
    minute = f"--time=1 --signal=B:USR1@10 --nodelist={ONE} --gres=none"  # GPUs are left to the others
    caching, training = (make_work(name, like=whole, steps=30, save_steps=100) for name in ("caching", "training"))
    caching.empty().turn(encode_s=8)
    training.turn(step_s=2.5)
    cache_job = caching.sbatch("cache", "run.yaml", "1", options=f"--array=0 {minute}")
    return Limited(whole, caching, cache_job, training, training.sbatch("train", "run.yaml", options=minute))


@pytest.fixture(scope="session", autouse=True)
def on_two_nodes(make_work: Make, whole: Work, limited: Limited) -> tuple[Work, str]:
    """A training on two nodes that nobody interrupts, and its job."""
    work = make_work("alone", like=whole, steps=8, save_steps=100)
    return work, work.sbatch("train", "run.yaml", options=f"{TWO_NODES} --gres=none")


def test_shellcheck_finds_nothing(root):
    scripts = [path for path in (root / "slurm").iterdir() if path.suffix in (".sh", ".sbatch", ".example")]
    scripts += [root / "tests" / "slurm" / "cluster.sh"]
    done = subprocess.run(["shellcheck", *map(str, scripts)], cwd=root, capture_output=True, text=True)
    assert len(scripts) > 8 and done.returncode == 0, done.stdout


def test_slurm_takes_the_directives_as_they_are(slurm: Slurm, root: Path):
    for script in sorted((root / "slurm").glob("*.sbatch")) + [root / "slurm" / "experiments.sh"]:
        options = ["--gres=gpu:2"] if script.stem == "experiments" else []
        slurm.ask("sbatch", "--test-only", *options, str(script), "run.yaml")
        assert not re.search(r"(account|partition|qos)=|^ *module", script.read_text(), re.M)


def test_all_jobs_are_submitted_or_none(make_work: Make, slurm: Slurm):
    work = make_work("refused", site='LOOKONCE_EVAL_OPTIONS="--partition=absent"\n')
    (work.folder / "bin" / "lookonce").write_text("#!/bin/sh\nprintf 'cache 3\\ntrain\\neval\\n'\n")
    done = work.submit()
    jobs = re.findall(r"job (\d+)", done.stdout)
    assert done.returncode == 1 and len(jobs) == 3
    assert f"nothing is left in the queue (cancelled: {' '.join(jobs)})" in done.stderr
    slurm.wait(*jobs)
    assert {state for job in jobs for state in slurm.states(job)} == {"CANCELLED"}


def test_one_command_makes_a_run_and_says_what_is_missing(make_work: Make, slurm: Slurm):
    """More tasks than an array may have; nothing of the environment passed on; a copy on the node's own disk."""
    work = make_work("fresh", site="export SBATCH_EXPORT=NONE LOOKONCE_TASKS=6\nexport LOOKONCE_STAGE=$PWD/near\n")
    done = work.submit()
    assert done.returncode == 0, done.stderr
    assert "missing: cache (10 shards), train, eval" in done.stdout
    jobs = re.findall(r"^  (\w+) +job (\d+) +(.*)$", done.stdout, re.M)
    assert [kind for kind, _, _ in jobs] == ["cache", "cache", "finalize", "train", "eval"]
    assert [note for _, _, note in jobs[:2]] == ["--array=0-4", "--array=0-0"]
    assert "lookonce status run.yaml --watch 10" in done.stdout

    again = work.submit()
    assert again.returncode == 1 and "still in the queue" in again.stderr
    assert f"{jobs[-1][1]} lookonce-eval: PENDING (Dependency)" in again.stderr

    slurm.wait(jobs[-1][1])
    assert {state for _, job, _ in jobs for state in slurm.states(job)} == {"COMPLETED"}
    assert {f"worker {number} of 6 " in work.log("cache") for number in range(6)} == {True}
    assert (work.folder / "runs/a/metrics/test.json").exists()
    assert list((work.folder / "near").glob("*/shards/*")) and "no complete copy" not in work.log("train")
    assert "nothing of run.yaml is missing" in work.submit().stdout


def test_after_failures_the_same_command_makes_just_what_is_missing(make_work: Make, slurm: Slurm, whole: Work):
    """One task fails, the other is cancelled; cancelled jobs stay so."""
    work = make_work("failing", site="LOOKONCE_TASKS=2\n", like=whole).empty()
    work.turn(encode_s=2, fails="1")
    jobs = re.findall(r"job (\d+)", work.submit().stdout)
    cache, finalize, train, evaluation = jobs
    slurm.until(lambda: slurm.states(f"{cache}_1") == {"FAILED"} and len(work.shards) >= 2)
    slurm.ask("scancel", f"{cache}_0")
    slurm.wait(finalize, train, evaluation)
    assert slurm.states(f"{cache}_0") == {"CANCELLED"} and slurm.states(train) == {"CANCELLED"}
    assert "slurm/submit.sh run.yaml" in work.log("finalize")
    before = work.shards
    assert 2 <= len(before) < 10

    work.turn()
    done = work.submit()
    assert f"missing: cache ({10 - len(before)} shards), train, eval" in done.stdout
    cache, finalize, *others = re.findall(r"job (\d+)", done.stdout)
    slurm.wait(finalize)
    slurm.ask("scancel", *others)
    assert slurm.states(finalize) == {"COMPLETED"}
    assert before.items() <= work.shards.items() and len(work.shards) == 10
    assert work.has_features_of(whole)


def test_the_last_task_goes_into_the_queue_again_alone(make_work: Make, slurm: Slurm, whole: Work):
    """Its SLURM_JOB_ID is the whole array's."""
    work = make_work("last", like=whole).empty()
    work.turn(encode_s=3)
    job = work.sbatch("cache", "run.yaml", "2", options="--array=0-1")
    slurm.until(lambda: len(list(work.folder.glob("encoded-*"))) == 2)
    slurm.ask("scancel", "--batch", "-s", "USR1", f"{job}_1")
    slurm.until(lambda: "USR1: stopping" in work.log("cache"))
    work.turn()
    slurm.wait(job)
    assert slurm.states(job) == {"COMPLETED"}
    restarts = {facts["ArrayTaskId"]: facts["Restarts"] for facts in slurm.jobs(job)}
    assert restarts == {"0": "0", "1": "1"}
    assert work.has_features_of(whole)


def test_a_node_is_lost_and_its_task_goes_on_elsewhere_beside_the_old_one(make_work: Make, slurm: Slurm, whole: Work):
    work = make_work("lost", like=whole).empty()
    work.turn(encode_s=3)
    job = work.sbatch("cache", "run.yaml", "1", options=f"--array=0 --nodelist={TWO}")
    [notes] = slurm.until(lambda: list(work.folder.glob("encoded-*")))
    os.kill(slurm.slurmd(TWO), signal.SIGKILL)
    slurm.ask("scontrol", "update", f"nodename={TWO}", "state=down", "reason=test")
    try:
        slurm.ask("scontrol", "update", f"jobid={job}", "NodeList=")
        _, other = slurm.until(lambda: len(found := sorted(work.folder.glob("encoded-*"))) == 2 and found)
        assert is_alive(notes) and is_alive(other), "two writers for a while"
        slurm.wait(job)
        slurm.until(lambda: not is_alive(notes))
    finally:
        slurm.ask("/usr/sbin/slurmd", "-N", TWO)
        slurm.until(lambda: "down" not in slurm.ask("sinfo", "-h", "-n", TWO, "-o", "%t"))
    assert slurm.states(job) == {"COMPLETED"}
    assert "turn 1" in work.log("cache")
    assert work.has_features_of(whole)


def test_a_training_on_two_nodes_gives_way_to_a_better_partition_and_goes_on(
    make_work: Make, slurm: Slurm, whole: Work, on_two_nodes: tuple[Work, str]
):
    work = make_work("preempted", like=whole, steps=8, save_steps=100)
    work.turn(step_s=2)
    preempted = work.sbatch("train", "run.yaml", options=TWO_NODES)
    slurm.until(lambda: "step 2/8" in work.log("train"))
    urgent = ["--partition=urgent", f"--nodelist={TWO}", "--gres=gpu:2", "--output=/dev/null", "--wrap=true"]
    slurm.wait(slurm.ask("sbatch", "--parsable", *urgent))
    work.turn()
    alone, job = on_two_nodes
    slurm.wait(preempted, job)
    log = work.log("train")
    assert slurm.jobs(preempted)[0]["Restarts"] == "1" and slurm.states(preempted) == {"COMPLETED"}, log
    assert "2 processes on 127.0.1.[1-2], turn 1" in log and re.search(r"going on from checkpoint-\d+", log), log
    assert slurm.states(job) == {"COMPLETED"}, alone.log("train")
    assert work.has_adapter_of(alone)


def test_experiments_share_a_node_follow_each_other_and_go_on(make_work: Make, slurm: Slurm):
    work = make_work("experiments")
    run = yaml.safe_load((work.folder / "run.yaml").read_text())
    for name in ("a", "b"):
        (work.folder / f"{name}.yaml").write_text(yaml.safe_dump(run | {"output": f"runs/{name}"}))
    work.turn(step_s=5)
    chains = ["a.yaml", "b.yaml,absent.yaml,never.yaml"]
    job = work.sbatch("experiments", *chains, options="--gres=gpu:2")
    logs = work.folder / "logs"
    slurm.until(lambda: all("step 1/3" in text(logs / f"experiments-{job}-{name}.out") for name in "ab"))
    slurm.ask("scancel", "--batch", "-s", "USR1", job)
    slurm.until(lambda: "run file (75: unfinished" in work.log("experiments"))
    work.turn()
    slurm.wait(job)
    first, second = work.log("experiments").split("run file (75: unfinished, -: not begun)")[1:]
    ended = [sorted(re.findall(r"^ *(\S+) .*  (\w+)\.yaml$", part, re.M)) for part in (first, second)]
    assert ended[0] == [("-", "absent"), ("-", "never"), ("75", "a"), ("75", "b")]
    assert ended[1] == [("-", "never"), ("0", "a"), ("0", "b"), ("2", "absent")]
    assert slurm.jobs(job)[0]["ExitCode"] == "2:0"
    assert all((work.folder / f"runs/{name}/summary.json").exists() for name in "ab")


def test_at_the_real_time_limit_cache_and_training_stop_and_go_on_to_the_same_end(slurm: Slurm, limited: Limited):
    slurm.wait(limited.cache_job, limited.train_job)
    for work, kind, job in (
        (limited.caching, "cache", limited.cache_job),
        (limited.training, "train", limited.train_job),
    ):
        assert slurm.states(job) == {"COMPLETED"}, work.log(kind)
        assert int(slurm.jobs(job)[0]["Restarts"]) >= 1
        assert "USR1: stopping, to go on later" in work.log(kind)
    assert limited.caching.has_features_of(limited.whole)
    assert limited.training.has_adapter_of(limited.whole)


def is_alive(notes: Path) -> bool:
    """Whether the worker that left these notes is at work."""
    return Path(f"/proc/{notes.name.rpartition('-')[2]}/cmdline").exists()


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
