"""Find the state of a run's phases: plan, cache, training, evaluation.

Design: everything is read from the files that the phases write, so no list of submitted jobs is kept and the answer is
right after any crash. Images are identified by the plan and its stamps; only images that the plan does not know are
read, and of these only enough to see that the plan must grow. A finished run has nothing missing, even if its cache is
gone. It costs about 0.1 ms per image, half of it for the images' stamps, which are read once.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.cache.build.progress import Finished, index_from_plan, new_shards, pending_shards, status
from lookonce.cache.format import REPAIR_COMMAND
from lookonce.cache.store.metadata import QUARANTINE, Plan, PlannedImage, read_plan, read_receipts
from lookonce.cache.store.shards import SHARDS
from lookonce.claim_file import age
from lookonce.datasets.images import ImageIndex, bytes_key, index_images, read_many
from lookonce.datasets.records import Record
from lookonce.environment import program
from lookonce.errors import ImageError, RunFolderError
from lookonce.eval.answers.files import unfinished
from lookonce.eval.scores.metrics import read_metrics
from lookonce.eval.scores.prediction import Score
from lookonce.run.claim import find_trainer
from lookonce.run.config import LENGTH, RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import Needs, OpenRun, open_run, records_identity
from lookonce.run.progress_file import Progress, read_progress
from lookonce.run.records import UNUSABLE_ADVICE, find_unusable, leave_out_unusable, without_fold
from lookonce.run.start_adapter import start_identity
from lookonce.status.report import CachePhase, State, TrainingPhase, TrainingState
from lookonce.status.summary import Summary, question_of
from lookonce.text import count, duration, shell

NUM_PROBED = 64
"""How many images that a plan does not know are read first; if one of them is new, the rest is not read."""
SUBMIT = Path("slurm/submit.sh")
LOGS = Path("logs")
"""The jobs of slurm/ write their logs here, each to NAME-JOB.out."""


@dataclass
class RunStatus:
    """A run whose state can be read repeatedly; records and model are read once, and images once all are planned."""

    opened: OpenRun
    """The run with its records, without images."""
    _known: tuple[int, ImageIndex] | None = None
    """The number of the plan's files when all images were planned, and these images."""

    @classmethod
    def open(cls, run: RunFile) -> RunStatus:
        """Read the records, and hash the tower if its fingerprint is not recorded; reads no image, downloads nothing.

        Raises:
            LookonceError: records or model are missing or broken.
        """
        return cls(open_run(run, Needs("lookonce status", records="all", model="fingerprint", is_local=True)))

    def read(self) -> State:
        """The state now.

        Raises:
            CacheCorrupt: a receipt or the plan differs from what was written.
        """
        opened, run, folder, split = self.opened, self.opened.run, self.opened.folder, self.opened.run.eval.split
        plan = read_plan(opened.cache_folder)
        images, covers = self._images(plan)
        cache = find_cache_phase(opened, images, plan, covers)
        notes = [*opened.notes]
        unusable = find_unusable(run, opened.cache_folder, opened.fingerprint.sha256, opened.records)
        records = leave_out_unusable(opened.records, unusable, notes.append)
        records = without_fold(run, records, images, notes.append)
        conflict = _conflict(opened, records, images, cache.is_planned)
        training = TrainingPhase("another run") if conflict else find_training(folder, run.cache.claim_s)
        scores = {} if conflict else find_scores(folder, split)
        return State(
            output=run.output,
            cache=cache,
            training=training,
            scores=scores,
            unfinished={} if conflict else find_unfinished(folder, records),
            split=split,
            is_trained=folder.trained.exists() and not conflict,
            is_evaluated=split in scores or not (conflict or records[split]),
            notes=[*conflict, *notes, *_problems(cache, images, run.data.skip_unusable)],
            logs=list(_logs(cache, training)),
        )

    def _images(self, plan: Plan) -> tuple[ImageIndex, bool]:
        """The images that the plan knows, and whether these are all."""
        if self._known and self._known[0] == plan.num_files:
            return self._known[1], True
        images, covers = known_images(plan, self.opened.all_records())
        self._known = (plan.num_files, images) if covers else None
        return images, covers


def known_images(plan: Plan, records: Iterable[Record]) -> tuple[ImageIndex, bool]:
    """The images of `records` that a plan knows, and whether it knows all that can be read."""
    records = list(records)
    paths = dict.fromkeys(path for record in records for path in record.images)
    known = index_from_plan(plan, paths, without_files=True)
    unknown = [path for path in paths if path not in known.key_of]
    if unknown and (not plan.shards or _is_new(plan, unknown)):
        return known, False
    return index_images(records, known), True


def _is_new(plan: Plan, paths: Iterable[Path]) -> bool:
    """Whether one of the first few images is not planned under any name."""
    planned = {image.key for image in plan.images()}
    probed = itertools.islice(read_many(paths), NUM_PROBED)
    return any(not isinstance(data, ImageError) and bytes_key(data) not in planned for _, data in probed)


def find_cache_phase(opened: OpenRun, images: ImageIndex, plan: Plan, covers: bool) -> CachePhase:
    """The state of plan and cache; `covers` says that the plan knows all images by name."""
    folder = opened.cache_folder
    receipts = list(read_receipts(folder))
    report = status(folder, images.path_of, opened.run.cache.claim_s, receipts)
    finished = Finished.from_receipts(receipts)
    files = {
        path.stem for path in (folder / SHARDS).glob("*.safetensors")
    }  # after the receipts, which are written later
    shards = [shard for shard in plan.shards if not images.path_of.keys().isdisjoint(shard.keys)]
    wanted = [PlannedImage(key, 0, ()) for key in images.path_of]
    new = new_shards(plan, finished, wanted, opened.fingerprint, opened.shard_bytes, images.former)
    return CachePhase(
        is_planned=covers and not new,
        num_files=len({path for record in opened.all_records() for path in record.images}),
        num_shards=len(shards),
        num_pending=len(pending_shards(plan, finished, images.path_of, images.former)),
        report=report,
        lost=[shard.name for shard in shards if shard.name in finished.shards and shard.name not in files],
    )


def _conflict(opened: OpenRun, records: dict[str, list[Record]], images: ImageIndex, has_all: bool) -> list[str]:
    """Why the output folder belongs to another run; compares what is known without opening the model."""
    run, folder = opened.run, opened.folder
    identity: dict[str, Any] = {"cache": opened.fingerprint.sha256}
    if has_all and all(path in images.key_of for some in records.values() for record in some for path in record.images):
        identity = records_identity(run, opened.fingerprint, records, images.key_of.__getitem__)
    try:
        folder.check(run, identity | start_identity(run, folder.recorded_inputs()))
    except RunFolderError as error:
        return [str(error)]
    return []


def find_training(folder: RunFolder, expiry_s: float) -> TrainingPhase:
    """The state of the training in a run folder; without a heartbeat for `expiry_s` it is dead."""
    progress, last = read_progress(folder.progress), folder.last_checkpoint
    checkpoint = last.name if last else None
    trained = folder.read_trained() if folder.trained.exists() else None
    num_steps, startup_seconds = (trained.num_steps, trained.startup_seconds) if trained else (0, {})
    trainer = find_trainer(folder.folder, expiry_s)
    if trainer and (progress is None or progress.worker != trainer):  # it has not begun to write its progress
        return TrainingPhase("running", phase="loading", job=trainer.job, host=trainer.host, checkpoint=checkpoint)
    if progress is None:
        state: TrainingState = "trained" if num_steps else "stopped" if last else "not begun"
        step = int(last.name.rpartition("-")[2]) if last else 0
        state = "finished" if folder.is_finished else state
        return TrainingPhase(state, step=step, checkpoint=checkpoint, startup_seconds=startup_seconds)
    silent_s = max(age(folder.progress), 0.0)
    state = _state(progress, silent_s > expiry_s)
    if state != "running" and num_steps:
        state = "finished" if folder.is_finished else "trained"
    return TrainingPhase(
        state=state,
        phase=progress.phase,
        step=progress.step,
        num_steps=num_steps or progress.num_steps,
        loss=progress.loss,
        validation_loss=progress.validation_loss,
        exact_match=progress.exact_match,
        ms_per_sample=progress.ms_per_sample,
        eta_s=max(progress.eta_s - silent_s, 0.0) if progress.eta_s is not None else None,
        silent_s=round(silent_s, 1),
        stepped_s=progress.stepped_s,
        job=progress.worker.job,
        host=progress.worker.host,
        checkpoint=checkpoint,
        reason=progress.reason,
        startup_seconds=startup_seconds,
    )


def _state(progress: Progress, is_silent: bool) -> TrainingState:
    if progress.end:
        return progress.end
    return "dead" if is_silent or progress.worker.is_gone() else "running"


def find_scores(folder: RunFolder, first: str) -> dict[str, Score]:
    """The scores of all evaluations in a run folder, by split; the split `first` comes first.

    Raises:
        RunFolderError: a file of them is broken.
    """
    names = sorted(
        (path.stem for path in (folder.folder / "metrics").glob("*.json")), key=lambda name: (name != first, name)
    )
    return {name: Score(**read_metrics(folder, name)["overall"]) for name in names}


def find_unfinished(folder: RunFolder, records: Mapping[str, Sequence[Record]]) -> dict[str, tuple[int, int]]:
    """The questions answered so far, of all, of each evaluation of these records that has no result."""
    asked = {split: sum(len(record.turns) for record in of_split) for split, of_split in records.items()}
    found = unfinished(folder.folder / "predictions")
    return {
        name: (number, asked[split]) for name, number in found.items() if (split := name.partition("-")[0]) in asked
    }


def _problems(cache: CachePhase, images: ImageIndex, skips: bool) -> Iterator[str]:
    """What a user has to fix before training, without unusable images if training `skips` their records."""
    if cache.lost:
        yield (
            f"{count(len(cache.lost), 'finished shard')} of {cache.report.folder} have no files, the first is "
            f"{cache.lost[0]}; run: {REPAIR_COMMAND}"
        )
    if skips:
        return
    advice = f"training needs all images: {UNUSABLE_ADVICE}"
    if images.unusable:
        number, reason = count(len(images.unusable), "image"), next(iter(images.unusable.values()))
        yield f"{number} cannot be read, the first: {reason}; {advice}"
    if cache.is_planned and cache.report.num_quarantined:
        number = count(cache.report.num_quarantined, "image")
        yield f"{number} could not be encoded (see {cache.report.folder / QUARANTINE}); {advice}"


def _logs(cache: CachePhase, training: TrainingPhase) -> Iterator[str]:
    """Where to find the logs of slow or dead processes."""
    for worker in cache.report.workers:
        if worker.state:
            what = f"worker {worker.worker} is {worker.state}, {duration(worker.age_s)} after it claimed {worker.shard}"
            yield f"{what}: {_log_of(worker.job, worker.host)}"
    if training.state in ("dead", "failed"):
        yield f"training is {training.state}: {_log_of(training.job, training.host)}"


def _log_of(job: str, host: str) -> str:
    log = find_log(job)
    return f"read {log}" if log else f"job {job}, no log in {LOGS}/" if job else f"it ran on {host}"


def find_log(job: str) -> Path | None:
    """The newest log of a Slurm job ("12") or of a task of an array ("12_3 (restart 1)")."""
    number = job.partition(" ")[0]
    if not number:
        return None
    patterns = [f"*-{number}.out"] if "_" in number else [f"*-{number}.out", f"*-{number}_*.out"]
    found = [path for pattern in patterns for path in LOGS.glob(pattern)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def next_command(run: RunFile, state: State, run_file: Path, assignments: tuple[str, ...]) -> str:
    """The command to run next."""
    arguments = (run_file, *(word for text in assignments for word in ("--set", text)))
    missing = state.missing()
    if not missing:
        folder = RunFolder(run.output)
        question = question_of(Summary.read(folder).next_command) if folder.is_finished else ()
        return shell(program(), *(question or ("eval", run.output)))
    if state.is_under_way:
        return shell(program(), "status", *arguments, "--watch", "10")
    if state.cache.lost:
        return shell(program(), "cache", "repair", *arguments)
    if state.training.state != "another run" and not assignments and shutil.which("sbatch") and SUBMIT.exists():
        return shell(SUBMIT, *arguments)
    if missing[0] in ("plan", "cache") or missing[0].startswith("cache "):
        return shell(program(), "cache", "build", *arguments)
    if missing[0] == "eval" and state.training.state == "finished":
        return shell(program(), "eval", run.output, "--split", state.split)
    if state.training.state == "another run":
        is_longer = differs_in_length(RunFolder(run.output), run)
        return shell(program(), "train", *arguments, "--resume" if is_longer else "--restart")
    resumes = state.is_trained or state.training.checkpoint
    return shell(program(), "train", *arguments, *(["--resume"] if resumes else []))


def differs_in_length(folder: RunFolder, run: RunFile) -> bool:
    """Whether a folder holds a run that differs from this one in nothing but its length."""
    try:
        folder.check(run, {}, may_differ=LENGTH)
    except RunFolderError:
        return False
    return folder.has_other_length(run)
