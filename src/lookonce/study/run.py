"""`lookonce study run`: build the caches that are missing, then train and evaluate what is missing.

Design: each job is a command that a person could give, with the run file of its run: `lookonce cache build`, `lookonce
train --resume`, and `lookonce eval` where a trained run lacks the split. What is missing is read from the run folders
and the cache, again right before a job is started. One build serves all runs whose images it has (builds.py), and a run
waits for its own only. Several builds may write to one cache: they are workers, which share its shards.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

from lookonce.claim_file import holder, is_living
from lookonce.errors import LookonceError
from lookonce.report.contexts import OPTIONS, asked_beside
from lookonce.run.config import RunFile
from lookonce.run.folder import CLAIM
from lookonce.run.records import check_paths
from lookonce.status import RunStatus
from lookonce.study.builds import find_builders, read_contents
from lookonce.study.expand import LOGS, StudyRun, expand, write_run_files
from lookonce.study.file import read_study
from lookonce.study.jobs import Job
from lookonce.study.pool import Outcome, Pool, slots
from lookonce.study.routing import RoutedRun, routed_runs, write_routed
from lookonce.study.state import Runs, differs, in_chains, read_state, refuse_outdated
from lookonce.text import Notify


def run_study(path: Path, again: Iterable[str], num_parallel: int | None, notify: Notify) -> Outcome:
    """Run what is missing of a study; `again` names outdated runs or arms that are trained again.

    Raises:
        Stopped: a signal asked this process to stop; what the runs have done is saved.
        LookonceError: the study file, a run file or records are wrong, or runs are outdated.
    """
    study = read_study(path)
    runs = expand(study)
    routed = routed_runs(study, runs)
    jobs = prepare(path, runs, routed, again)
    pool = Pool(slots(visible_gpus() if jobs else [], num_parallel), notify, lambda name: _achieved(runs.get(name)))
    outcome = pool.run(jobs)
    for name in (name for name in outcome.done if name in runs and not read_state(runs[name]).is_complete):
        outcome.failed[name] = f"trained, but not evaluated, see {runs[name].log}"  # for lack of memory
    write_routed(routed.values())
    return outcome


def prepare(path: Path, runs: Runs, routed: Mapping[str, RoutedRun], again: Iterable[str]) -> list[Job]:
    """Check a study, and write its run files; the jobs of what is missing.

    Raises:
        LookonceError: a run file or records are wrong, or runs are outdated.
    """
    for one in runs.values():
        check_paths(one.run)
    for arm in routed.values():
        arm.check()
    jobs = find_jobs(runs, refuse_outdated(runs, again, path))
    write_run_files(list(runs.values()), path)
    return jobs


def find_jobs(runs: Runs, outdated: Collection[str]) -> list[Job]:
    """The jobs of what is missing: builds of caches, runs, and their answers with true and with no context.

    Raises:
        LookonceError: records are missing or broken.
    """
    states = {name: read_state(one) for name, one in runs.items()}
    missing = {name for name, state in states.items() if name in outdated or not state.is_complete}
    left = [one for one in in_chains(runs) if one.name in missing or states[one.name].not_asked]
    contents = read_contents(left)
    builders = find_builders(left, contents)
    builds = {one.name: _build(one, len(contents[one.name].images)) for one in left if builders[one.name] is one}
    jobs = []
    for one in left:
        cost = _cost(one.run, contents[one.name].num_train)
        build = builds[builders[one.name].name].name
        if one.name in missing:
            jobs.append(_job(one, cost, build, one.name in outdated, missing))
        if asked_beside(one.run):
            jobs.append(_context_job(one, (one.name if one.name in missing else build,)))
    return [*builds.values(), *jobs]


def _build(one: StudyRun, num_images: int) -> Job:
    """The job of a build; images that cannot be encoded do not stop runs that leave them out."""
    log = one.run.output.parent / LOGS / "cache.log"
    options = ("--max-quarantined", str(num_images)) if one.run.data.skip_unusable else ()
    command = ("cache", "build", *options, str(one.run_file))
    return Job(f"cache of {one.name}", command, log, is_done=lambda: _is_built(one))


def _is_built(one: StudyRun) -> bool:
    try:
        cache = RunStatus.open(one.run).read().cache
    except LookonceError:
        return False  # the build says what is wrong
    return cache.is_planned and not cache.num_pending


def _cost(run: RunFile, num_train: int) -> float:
    """About how many samples a run trains on; without the sampler, which is slow to import."""
    return run.train.steps * run.batch.samples_per_step if run.train.steps else run.train.epochs * num_train


def _job(one: StudyRun, cost: float, build: str, is_outdated: bool, missing: Collection[str]) -> Job:
    """The job of a run; it waits for its features, and for the runs that it needs if these are missing too."""
    train = ("train", "--restart" if is_outdated else "--resume", str(one.run_file))
    is_finished = one.folder.is_finished and not is_outdated
    return Job(
        one.name,
        ("eval", "--split", one.run.eval.split, str(one.run_file)) if is_finished else train,
        one.log,
        cost,
        tuple(name for name in (build, *one.needs) if name in {build, *missing}),
        lambda: read_state(one).is_complete and not (is_outdated and differs(one)),
        partial(_used_by, one),
    )


def _context_job(one: StudyRun, after: tuple[str, ...]) -> Job:
    """The job of a run's answers with true and with no context, in one process that loads the model once."""
    options = [OPTIONS[kind] for kind in asked_beside(one.run)]
    return Job(
        f"{one.name}-contexts",
        ("eval", *options, "--split", one.run.eval.split, str(one.run_file)),
        one.log,
        after=after,
        is_done=lambda: not read_state(one).not_asked,
        used_by=partial(_used_by, one),
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
