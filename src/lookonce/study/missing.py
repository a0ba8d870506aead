"""`lookonce study jobs`: what is missing of a study, as jobs for the scheduler of a cluster.

Design: these are the jobs of `study run`, after its checks and in its order, and last the report. A job has the kind of
its command and the options, and not the command, because the scheduler's own scripts give it GPUs and requeue it. So
`slurm/study.sh` knows nothing of arms, seeds and chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lookonce.errors import UsageError
from lookonce.study.expand import expand
from lookonce.study.file import StudyFile, read_study
from lookonce.study.jobs import by_urgency
from lookonce.study.report.report import PAGE
from lookonce.study.routing import routed_runs
from lookonce.study.run import prepare
from lookonce.study.state import Runs

NONE = "-"
"""What a line has in place of an empty field, which a shell would not see."""


@dataclass(frozen=True)
class MissingJob:
    """A job that a scheduler can start when those before it have ended."""

    kind: str
    """cache, train, eval or report."""
    name: str
    file: Path
    """The run file; for a report the study file."""
    after: tuple[str, ...] = ()
    """The jobs that must have succeeded before; for a report, that must have ended."""
    options: tuple[str, ...] = ()
    """Options of the command."""

    def line(self) -> str:
        """The fields with tabs between them.

        Raises:
            UsageError: the path of the run file has a tab or a line break.
        """
        if not str(self.file).isprintable():
            raise UsageError(f"{str(self.file)!r} cannot be a field of a line; choose another `output` of the study")
        return "\t".join([self.kind, self.name, str(self.file), ",".join(self.after) or NONE, " ".join(self.options)])


def find_missing(path: Path) -> list[MissingJob]:
    """The jobs that a study lacks, each after those that it waits for; writes the run files.

    Raises:
        LookonceError: the study file, a run file or records are wrong, or runs are outdated.
    """
    study = read_study(path)
    runs = expand(study)
    jobs = by_urgency(prepare(path, runs, routed_runs(study, runs), ()))
    left = {job.name: job for job in jobs if not job.is_done()}
    found = []
    for name, job in left.items():
        kind, *options, file = job.command
        after = tuple(other for other in job.after if other in left)
        found.append(MissingJob(kind, name, Path(file), after, tuple(options)))
    if _has_report(study, runs) and (found or not _is_reported(study, runs)):
        found.append(MissingJob("report", "report", path, tuple(job.name for job in found if job.kind != "cache")))
    return found


def _has_report(study: StudyFile, runs: Runs) -> bool:
    """Whether there are arms to compare, and questions."""
    return len(study.compared()) > 1 and all(getattr(one.run.data, one.run.eval.split) for one in runs.values())


def _is_reported(study: StudyFile, runs: Runs) -> bool:
    """Whether the page is newer than all scores."""
    page = study.output / PAGE
    scores = [path for one in runs.values() for path in one.folder.metrics(one.run.eval.split).parent.glob("*.json")]
    return page.exists() and all(path.stat().st_mtime <= page.stat().st_mtime for path in scores)
