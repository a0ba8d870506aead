"""What is missing of a study, as jobs: run here (`lookonce study run`), or listed for a cluster (`study jobs`).

Each job is a command that a person could give, with the run file of its run: `lookonce cache build`, `lookonce train
--resume`, and `lookonce eval` where a trained run lacks the split. What is missing is read from the run folders and the
cache, again right before a job is started. A run waits for the build of its own features only. It needs no build of its
own if its images, compared by path, are among those of another run with the same features. Files are read once for all
runs.

For the scheduler of a cluster a job has the kind of its command and the options, and not the command, because the
scheduler's own scripts give it GPUs and requeue it. So `slurm/study.sh` knows nothing of variants, seeds and sequences.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lookonce.datasets.records import Record
from lookonce.environment import without_garbage_collection
from lookonce.errors import LookonceError, UsageError
from lookonce.report.contexts import OPTIONS, other_contexts
from lookonce.run.config import RunFile
from lookonce.run.open import FEATURE_SETTINGS
from lookonce.run.records import SPLITS, check_paths, for_training, read_split
from lookonce.status import find_state
from lookonce.study.file import LOGS, PAGE, StudyFile, StudyRun, expand, read_study, write_run_files
from lookonce.study.pool import Job, Outcome, Pool, by_urgency, slots
from lookonce.study.state import (
    RoutedRun,
    Runs,
    changed_settings,
    in_order,
    read_state,
    refuse_outdated,
    routed_runs,
    write_routed,
)
from lookonce.text import Notify

FILES = {*SPLITS, "image_root"}
SELECTION = {"stage_map", "where", "replay"}
"""Keys of `data` that say which files are read, and which of their training records are used."""


@dataclass(frozen=True)
class Content:
    """What a run trains on, and the images of all its splits."""

    num_train: int
    images: frozenset[Path]
    trained: frozenset[Path]
    """Those of the training records, which may have variants."""

    def is_part_of(self, other: Content) -> bool:
        """Whether the cache of the other content has all that this one needs."""
        return self.images <= other.images and self.trained <= other.trained


def read_contents(runs: Iterable[StudyRun]) -> dict[str, Content]:
    """The content of each run, by name; raises LookonceError if records are missing or broken, or none is selected."""
    files: dict[str, dict[str, list[Record]]] = {}
    contents: dict[str, Content] = {}
    content_of = {}
    with without_garbage_collection():
        for run in runs:
            data = run.settings.data
            if (named := data.model_dump_json(include=FILES)) not in files:
                files[named] = {split: list(read_split(run.settings, split)) for split in SPLITS}
            selected = named + data.model_dump_json(include=SELECTION) + (str(run.seed) if data.where else "")
            if selected not in contents:
                records = for_training(run.settings, files[named])
                images, trained = (
                    frozenset(path for rows in of for record in rows for path in record.images)
                    for of in (records.values(), [records["train"]])
                )
                contents[selected] = Content(len(records["train"]), images, trained)
            content_of[run.name] = contents[selected]
    return content_of


def find_builders(runs: Iterable[StudyRun], contents: Mapping[str, Content]) -> dict[str, StudyRun]:
    """For each run, by name, the run whose build has its images: of those that could, the one with the most."""
    builders: list[StudyRun] = []
    builder_of = {}
    for run in sorted(runs, key=lambda run: (-len(contents[run.name].images), -len(contents[run.name].trained))):
        content, features = contents[run.name], _features(run.settings)
        serving = ((other, contents[other.name]) for other in builders if _features(other.settings) == features)
        builder = next((other for other, built in serving if content.is_part_of(built)), run)
        if builder is run:
            builders.append(run)
        builder_of[run.name] = builder
    return builder_of


def _features(run: RunFile) -> dict[str, Any]:
    """What the features of an image depend on, and the folder that they are in."""
    keys = {"dir", "augment"} | FEATURE_SETTINGS
    return run.cache.model_dump(include=keys) | run.model.model_dump(include={"path", "revision"})


def run_study(path: Path, again: bool, num_parallel: int | None, notify: Notify) -> Outcome:
    """Run what is missing of a study; with `again` outdated runs are trained again.

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


def prepare(path: Path, runs: Runs, routed: Mapping[str, RoutedRun], again: bool) -> list[Job]:
    """Check a study, and write its run files; the jobs of what is missing. Raises LookonceError as `run_study` does."""
    for run in runs.values():
        check_paths(run.settings)
    for variant in routed.values():
        variant.check()
    jobs = find_jobs(runs, refuse_outdated(runs, again, path))
    write_run_files(list(runs.values()), path)
    return jobs


def find_jobs(runs: Runs, outdated: Collection[str]) -> list[Job]:
    """The jobs of what is missing: builds of caches, runs, and their answers with reference and with no context.

    Raises:
        LookonceError: records are missing or broken.
    """
    states = {name: read_state(run) for name, run in runs.items()}
    missing = {name for name, state in states.items() if name in outdated or not state.is_complete}
    left = [run for run in in_order(runs) if run.name in missing or states[run.name].not_asked]
    contents = read_contents(left)
    builders = find_builders(left, contents)
    builds = {run.name: _build(run) for run in left if builders[run.name] is run}
    jobs = []
    for run in left:
        train, num_train = run.settings.train, contents[run.name].num_train
        # About how many samples it trains on, without the sampler, which is slow to import.
        cost = train.steps * run.settings.batch.samples_per_step if train.steps else train.epochs * num_train
        build = builds[builders[run.name].name].name
        if run.name in missing:
            jobs.append(_job(run, cost, build, run.name in outdated, missing))
        if other_contexts(run.settings):
            jobs.append(_context_job(run, (run.name if run.name in missing else build,)))
    return [*builds.values(), *jobs]


def _build(run: StudyRun) -> Job:
    log = run.settings.output.parent / LOGS / "cache.log"
    return Job(f"cache of {run.name}", ("cache", "build", str(run.run_file)), log, is_done=lambda: _is_built(run))


def _is_built(run: StudyRun) -> bool:
    try:
        cache = find_state(run.settings).cache
    except LookonceError:
        return False  # the build says what is wrong
    return cache.is_planned and not cache.num_pending


def _job(run: StudyRun, cost: float, build: str, is_outdated: bool, missing: Collection[str]) -> Job:
    """The job of a run; it waits for its features, and for the runs that it needs if these are missing too."""
    train = ("train", "--restart" if is_outdated else "--resume", str(run.run_file))
    is_finished = run.folder.is_finished and not is_outdated
    return Job(
        run.name,
        ("eval", "--split", run.settings.eval.split, str(run.run_file)) if is_finished else train,
        run.log,
        cost,
        tuple(name for name in (build, *run.needs) if name in {build, *missing}),
        lambda: read_state(run).is_complete and not (is_outdated and changed_settings(run)),
    )


def _context_job(run: StudyRun, after: tuple[str, ...]) -> Job:
    """The job of a run's answers with reference and with no context, in one process that loads the model once."""
    options = [OPTIONS[kind] for kind in other_contexts(run.settings)]
    return Job(
        f"{run.name}-contexts",
        ("eval", *options, "--split", run.settings.eval.split, str(run.run_file)),
        run.log,
        after=after,
        is_done=lambda: not read_state(run).not_asked,
    )


def _achieved(run: StudyRun | None) -> str:
    score = read_state(run).score if run else None
    return f", {score.score:.1%} {score.name}" if score else ""


def visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = torch.cuda.device_count()
    return names[:number] if len(names) >= number and names[0] else [str(index) for index in range(number)]


NONE = "-"
"""What a line has in place of an empty field, which a shell would not see."""


def fields_of(job: Job) -> dict[str, Any]:
    """A job as a scheduler needs it. `kind` is cache, train, eval or report; the file of a report is the study file."""
    kind, *options, file = job.command
    return {"kind": kind, "name": job.name, "file": file, "after": list(job.after), "options": options}


def line_of(job: Job) -> str:
    """The fields with tabs between them; raises UsageError if the path of the run file has a tab or a line break."""
    kind, name, file, after, options = fields_of(job).values()
    if not file.isprintable():
        raise UsageError(
            f"the path {file!r} has a tab or a line break, which separate jobs and their fields; choose another "
            "`output` in the study file"
        )
    return "\t".join([kind, name, file, ",".join(after) or NONE, " ".join(options)])


def find_missing(path: Path) -> list[Job]:
    """The jobs that a study lacks, each after those that it waits for; writes the run files.

    A report comes last, and waits until all others have ended.

    Raises:
        LookonceError: the study file, a run file or records are wrong, or runs are outdated.
    """
    study = read_study(path)
    runs = expand(study)
    jobs = by_urgency(prepare(path, runs, routed_runs(study, runs), again=False))
    left = {job.name: job for job in jobs if not job.is_done()}
    missing_jobs = [replace(job, after=tuple(name for name in job.after if name in left)) for job in left.values()]
    if _has_report(study, runs) and (missing_jobs or not _is_reported(study, runs)):
        after = tuple(job.name for job in missing_jobs if job.command[0] != "cache")
        missing_jobs.append(Job("report", ("report", str(path)), study.output / LOGS / "report.log", after=after))
    return missing_jobs


def _has_report(study: StudyFile, runs: Runs) -> bool:
    """Whether there are variants to compare, and questions."""
    settings = [run.settings for run in runs.values()]
    return len(study.compared()) > 1 and all(getattr(run.data, run.eval.split) for run in settings)


def _is_reported(study: StudyFile, runs: Runs) -> bool:
    """Whether the page is newer than all scores."""
    page = study.output / PAGE
    folders = [run.folder.metrics(run.settings.eval.split).parent for run in runs.values()]
    scores = [path for folder in folders for path in folder.glob("*.json")]
    return page.exists() and all(path.stat().st_mtime <= page.stat().st_mtime for path in scores)
