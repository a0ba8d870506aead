"""The run that a command names by its folder or its run file; or a model, of which no run is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lookonce.errors import UsageError
from lookonce.run.config import RunFile, read_run_file
from lookonce.run.folder import RECORD, RunFolder
from lookonce.run.sections.data import DataSection
from lookonce.run.sections.model import ModelSection
from lookonce.settings import checked, set_key
from lookonce.text import shell


def find_run(run_dir: Path, assignments: Sequence[str] = (), *, needs_run: bool) -> tuple[RunFolder, RunFile]:
    """The folder and the run file; unless it is needed, the folder of a run file need not hold a run.

    `assignments` such as "eval.max_new_tokens=8" replace values of the run file, or of the record in the folder. With
    "output=runs/b" a run file that does not lie in a run folder stands for the run in that folder; a run folder, or the
    copy of the run file in it, stands for that run alone.

    Raises:
        LookonceError: the folder holds no run that can be read, or another one than the run file describes; or
            `assignments` name another folder.
    """
    if not run_dir.is_file():
        folder = RunFolder(run_dir)
        if not assignments:
            return folder, folder.read_run()
        run = _changed(folder, assignments)
    else:
        run = read_run_file(run_dir, assignments)
        folder = RunFolder(run_dir.parent if (run_dir.parent / RECORD).exists() else run.output)
        if needs_run:
            folder.read_run()
    if _sets_output(assignments) and run.output.resolve() != folder.folder.resolve():
        raise UsageError(_other_output(run_dir, folder, run))
    folder.check(run, {})
    return folder, run


def _changed(folder: RunFolder, assignments: Sequence[str]) -> RunFile:
    """The run that the folder records, with some values replaced."""
    values = folder.read_run().model_dump(mode="json")
    for assignment in assignments:
        set_key(values, assignment)
    return checked(values, RunFile, f"the run of {folder.folder} with --set")


def _sets_output(assignments: Sequence[str]) -> bool:
    return any(assignment.partition("=")[0].strip() == "output" for assignment in assignments)


def _other_output(place: Path, folder: RunFolder, run: RunFile) -> str:
    """Why the folder that --set names does not count, and what to do."""
    if place.is_file():
        means = f"{place} lies in the run folder {folder.folder} and stands for the run there"
    else:
        means = f"{place} is a run folder and stands for the run in it"
    return (
        f"--set output={run.output} cannot be used here: {means}, into which answers and scores are written; leave it "
        f"out, or name the other run: {shell('lookonce', 'eval', run.output)}"
    )


def find_untuned(place: Path) -> RunFile:
    """The run file of a run, which need not be trained; or one for a model folder or a model of the Hub.

    Raises:
        LookonceError: the place is a run that cannot be read. Whether there is such a model is not checked.
    """
    if place.is_file() or (place / RECORD).exists():
        return find_run(place, needs_run=False)[1]
    no_data = DataSection.model_construct(train=[])  # a run file must name records, and none are read here
    return RunFile(model=ModelSection(path=str(place)), data=no_data, output=Path("runs"))
