"""`lookonce study run`: build the caches that are missing, then train and evaluate what is missing.

Design: each job is a command that a person could give, with the run file of its run: `lookonce cache build`, `lookonce
train --resume`, and `lookonce eval` where a trained run lacks the split. What is missing is read from the run folders
and the cache, again right before a job is started. Runs with the same model, records and cache share one build, and a
run waits for its own only. Several builds may write to one cache: they are workers, which share its shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

from lookonce.claim_file import holder, is_living
from lookonce.errors import LookonceError
from lookonce.run.config import RunFile
from lookonce.run.folder import CLAIM
from lookonce.run.records import check_paths, read_splits
from lookonce.status.status import RunStatus
from lookonce.study.expand import LOGS, StudyRun, expand, write_run_files
from lookonce.study.file import read_study
from lookonce.study.jobs import Job
from lookonce.study.pool import Outcome, Pool, slots
from lookonce.study.routing import routed_runs, write_routed
from lookonce.study.state import in_chains, read_state, refuse_outdated
from lookonce.study.workload import num_samples
from lookonce.text import Notify


def run_study(path: Path, again: Iterable[str], num_parallel: int | None, notify: Notify) -> Outcome:
    """Run what is missing of a study; `again` names outdated runs or arms that are trained again.

    Raises:
        Stopped: a signal asked this process to stop; what the runs have done is saved.
        LookonceError: the study file, a run file or records are wrong, or runs are outdated.
    """
    study = read_study(path)
    runs = expand(study)
    for one in runs.values():
        check_paths(one.run)
    routed = routed_runs(study, runs)
    for arm in routed.values():
        arm.check()
    outdated = refuse_outdated(runs, again, path)
    jobs = find_jobs(runs, outdated)
    write_run_files(list(runs.values()), path)
    pool = Pool(slots(visible_gpus() if jobs else [], num_parallel), notify, lambda name: _achieved(runs.get(name)))
    outcome = pool.run(jobs)
    for name in (name for name in outcome.done if name in runs and not read_state(runs[name]).is_complete):
        outcome.failed[name] = f"trained, but not evaluated, see {runs[name].log}"  # for lack of memory
    write_routed(routed.values())
    return outcome


def find_jobs(runs: Mapping[str, StudyRun], outdated: Collection[str]) -> list[Job]:
    """The jobs of what is missing: builds of caches, and runs.

    Raises:
        LookonceError: records are missing or broken.
    """
    missing = [one for one in in_chains(runs) if one.name in outdated or not read_state(one).is_complete]
    builds: dict[str, Job] = {}
    counts: dict[str, int] = {}
    jobs = []
    for one in missing:
        if (key := _features(one.run)) not in builds:
            builds[key] = _build(one)
        if (records := one.run.data.model_dump_json()) not in counts:
            counts[records] = len(read_splits(one.run)["train"])
        _, cost = num_samples(one.run, counts[records])
        jobs.append(_job(one, cost, builds[key].name, one.name in outdated, {other.name for other in missing}))
    return [*builds.values(), *jobs]


def _features(run: RunFile) -> str:
    """What the features of a run depend on, and the records whose images have them."""
    return json.dumps([part.model_dump(mode="json") for part in (run.model, run.cache, run.data)])


def _build(one: StudyRun) -> Job:
    def is_built() -> bool:
        try:
            cache = RunStatus.open(one.run).read().cache
        except LookonceError:
            return False  # the build says what is wrong
        return cache.is_planned and not cache.num_pending

    name = f"cache of {one.arm}"
    log = one.run.output.parent / LOGS / "cache.log"
    return Job(name, ("cache", "build", str(one.run_file)), log, is_done=is_built)


def _job(one: StudyRun, cost: int, build: str, is_outdated: bool, missing: Collection[str]) -> Job:
    """The job of a run; it waits for its features, and for the run that it starts from if that is missing too."""
    train = ("train", str(one.run_file), "--restart" if is_outdated else "--resume")
    is_finished = one.folder.is_finished and not is_outdated
    return Job(
        one.name,
        ("eval", str(one.run.output), "--split", one.run.eval.split) if is_finished else train,
        one.log,
        cost,
        tuple(name for name in (build, one.start) if name and name in {build, *missing}),
        (lambda: False) if is_outdated else (lambda: read_state(one).is_complete),
        partial(_used_by, one),
    )


def _used_by(one: StudyRun) -> str:
    claim, expiry_s = one.run.output / CLAIM, one.run.cache.claim_s
    return holder(claim, expiry_s) if is_living(claim, expiry_s) else ""


def _achieved(one: StudyRun | None) -> str:
    score = read_state(one).score if one else None
    return f", {score.exact_match:.1%} exact match" if score else ""


def visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = torch.cuda.device_count()
    return names[:number] if len(names) >= number and names[0] else [str(index) for index in range(number)]
