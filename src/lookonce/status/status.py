"""What of a run is done and what is missing: plan, cache, training, evaluation.

Design: everything is read from what the stages leave behind, so nobody keeps a list of what was submitted, and after a
crash of anything the answer is right. Images are known by the plan and its stamps; none is read but those that the plan
does not know, and of these only as many as show that it must grow. A finished run lacks nothing, whatever has become of
its cache since. A look costs about 0.1 ms an image, half of it for the images' stamps, which are looked at once.
"""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lookonce.cache.build.planner import Settled, index_of_plan, missing_shards, pending_shards
from lookonce.cache.build.status import status
from lookonce.cache.constants import REPAIR_COMMAND
from lookonce.cache.store.claims import age
from lookonce.cache.store.manifest import QUARANTINE, read_plan
from lookonce.cache.store.plan import Plan, PlannedImage
from lookonce.cache.store.receipts import read_receipts
from lookonce.cache.store.shards import SHARDS
from lookonce.datasets.images import ImageIndex, bytes_key, index_images, read_many
from lookonce.datasets.records import Record
from lookonce.environment import program
from lookonce.errors import ImageError, RunFolderError
from lookonce.eval.scores.metrics import Score
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.model_ref import find_fingerprint
from lookonce.run.progress_file import Progress, read_progress
from lookonce.run.records import Content, read_splits
from lookonce.status.report import CacheStage, State, TrainingStage, TrainingState
from lookonce.status.summary import Summary
from lookonce.text import count, duration

NUM_PROBED = 64
"""How many images that a plan does not know are read, to see whether it must grow, before all of them are."""
SUBMIT = Path("slurm/submit.sh")
LOGS = Path("logs")
"""Where the jobs of slurm/ write what they say, each to NAME-JOB.out."""


@dataclass
class Pipeline:
    """A run whose stages may be looked at again and again; its records and its model stay as they were, and its images
    once all are planned."""

    run: RunFile
    content: Content
    """With no image yet."""
    _known: tuple[int, ImageIndex] | None = None
    """The images, if all are planned, and the number of the plan's parts then."""

    @classmethod
    def open(cls, run: RunFile) -> Pipeline:
        """Read the records, and hash the tower if its files are not known; reads no image and downloads nothing.

        Raises:
            LookonceError: whatever of it is missing or broken.
        """
        records, fingerprint = read_splits(run), find_fingerprint(run, is_local=True)
        return cls(run, Content(run, fingerprint, records, ImageIndex({}, {})))

    def look(self) -> State:
        """How far it is now.

        Raises:
            CacheCorrupt: a receipt or the plan is not what was written.
        """
        plan = read_plan(self.content.cache_folder)
        images, covers = self._images(plan)
        content, folder, split = replace(self.content, images=images), RunFolder(self.run.output), self.run.eval.split
        cache = find_cache_stage(content, plan, covers)
        conflict = _conflict(content, folder, cache.is_planned)
        training = TrainingStage("another run") if conflict else find_training(folder, self.run.cache.claim_s)
        scores = {} if conflict else find_scores(folder, split)
        return State(
            output=self.run.output,
            cache=cache,
            training=training,
            scores=scores,
            split=split,
            is_trained=folder.trained.exists() and not conflict,
            is_evaluated=split in scores or not (conflict or content.records[split]),
            notes=[*conflict, *_trouble(cache, images)],
            logs=list(_logs(cache, training)),
        )

    def _images(self, plan: Plan) -> tuple[ImageIndex, bool]:
        """Those that the plan knows, and whether these are all."""
        if self._known and self._known[0] == plan.num_parts:
            return self._known[1], True
        records = [record for part in self.content.records.values() for record in part]
        images, covers = known_images(plan, records)
        self._known = (plan.num_parts, images) if covers else None
        return images, covers


def known_images(plan: Plan, records: Iterable[Record]) -> tuple[ImageIndex, bool]:
    """The images of some records as far as a plan knows them, and whether it knows all that can be read."""
    records = list(records)
    paths = dict.fromkeys(path for record in records for path in record.images)
    known = index_of_plan(plan, paths)
    unknown = [path for path in paths if path not in known.key_of]
    if unknown and (not plan.shards or _is_new(plan, unknown)):
        return known, False
    return index_images(records, known), True


def _is_new(plan: Plan, paths: Iterable[Path]) -> bool:
    """Whether the first few of these images hold one that is not planned under any name."""
    planned = {image.key for image in plan.images()}
    looked = itertools.islice(read_many(paths), NUM_PROBED)
    return any(not isinstance(data, ImageError) and bytes_key(data) not in planned for _, data in looked)


def find_cache_stage(content: Content, plan: Plan, covers: bool) -> CacheStage:
    """How far the cache is; `covers` says that the plan knows all images by name."""
    folder, images = content.cache_folder, content.images
    receipts = list(read_receipts(folder))
    report = status(folder, images.path_of, content.run.cache.claim_s, receipts)
    settled = Settled.by(receipts)
    files = {path.stem for path in (folder / SHARDS).glob("*.safetensors")}  # after the receipts, which come later
    shards = [shard for shard in plan.shards if not images.path_of.keys().isdisjoint(shard.keys)]
    wanted = [PlannedImage(key, 0, ()) for key in images.path_of]
    new = missing_shards(plan, settled, wanted, content.fingerprint, content.shard_bytes, images.former)
    return CacheStage(
        is_planned=covers and not new,
        num_files=len({path for part in content.records.values() for record in part for path in record.images}),
        num_shards=len(shards),
        num_pending=len(pending_shards(plan, settled, images.path_of, images.former)),
        report=report,
        lost=[shard.name for shard in shards if shard.name in settled.shards and shard.name not in files],
    )


def _conflict(content: Content, folder: RunFolder, has_all: bool) -> list[str]:
    """Why the output folder is not this run's; of what was read, as far as that is known without the model."""
    identity = {"cache": content.fingerprint.sha256}
    if has_all and not content.images.unusable:
        identity = content.cheap_identity()
    try:
        folder.check(content.run, identity)
    except RunFolderError as error:
        return [str(error)]
    return []


def find_training(folder: RunFolder, expiry_s: float) -> TrainingStage:
    """How far the training in a folder is; one that was not heard of for `expiry_s` is dead."""
    progress, last = read_progress(folder.progress), folder.last_checkpoint
    checkpoint = last.name if last else None
    num_steps = json.loads(folder.trained.read_text())["num_steps"] if folder.trained.exists() else 0
    if progress is None:
        state: TrainingState = "trained" if num_steps else "stopped" if last else "not begun"
        step = int(last.name.rpartition("-")[2]) if last else 0
        return TrainingStage("finished" if folder.is_finished else state, step=step, checkpoint=checkpoint)
    silent_s = max(age(folder.progress), 0.0)
    state = _state(progress, silent_s > expiry_s)
    if state != "running" and num_steps:
        state = "finished" if folder.is_finished else "trained"
    return TrainingStage(
        state=state,
        phase=progress.phase,
        step=progress.step,
        num_steps=num_steps or progress.num_steps,
        loss=progress.loss,
        validation_loss=progress.validation_loss,
        ms_per_sample=progress.ms_per_sample,
        eta_s=max(progress.eta_s - silent_s, 0.0) if progress.eta_s is not None else None,
        silent_s=round(silent_s, 1),
        stepped_s=progress.stepped_s,
        job=progress.worker.job,
        host=progress.worker.host,
        checkpoint=checkpoint,
        reason=progress.reason,
    )


def _state(progress: Progress, is_silent: bool) -> TrainingState:
    if progress.end:
        return progress.end
    return "dead" if is_silent or progress.worker.is_gone() else "running"


def find_scores(folder: RunFolder, first: str) -> dict[str, Score]:
    """The scores of all evaluations in a folder, by split; that of `first` comes first."""
    paths = sorted((folder.folder / "metrics").glob("*.json"), key=lambda path: (path.stem != first, path.stem))
    return {path.stem: Score(**json.loads(path.read_text())["overall"]) for path in paths}


def _trouble(cache: CacheStage, images: ImageIndex) -> Iterator[str]:
    """What a person has to mend before the training can be."""
    if cache.lost:
        yield (
            f"{count(len(cache.lost), 'finished shard')} of {cache.report.folder} have lost their files, the first is "
            f"{cache.lost[0]}; run: {REPAIR_COMMAND}"
        )
    advice = "training refuses that: mend the files or remove their records"
    if images.unusable:
        number, reason = count(len(images.unusable), "image"), next(iter(images.unusable.values()))
        yield f"{number} can not be read, the first: {reason}; {advice}"
    if cache.is_planned and cache.report.num_quarantined:
        number = count(cache.report.num_quarantined, "image")
        yield f"{number} could not be encoded (see {cache.report.folder / QUARANTINE}); {advice}"


def _logs(cache: CacheStage, training: TrainingStage) -> Iterator[str]:
    """Where to read why something is slow or dead."""
    for worker in cache.report.workers:
        if worker.state:
            what = f"worker {worker.worker} is {worker.state}, {duration(worker.age_s)} after it began {worker.shard}"
            yield f"{what}: {_log_of(worker.job, worker.host)}"
    if training.state in ("dead", "failed"):
        yield f"the training is {training.state}: {_log_of(training.job, training.host)}"


def _log_of(job: str, host: str) -> str:
    log = find_log(job)
    return f"read {log}" if log else f"job {job}, no log in {LOGS}/" if job else f"it was on {host}"


def find_log(job: str) -> Path | None:
    """The newest log of a Slurm job or of a task of an array, "12" or "12_3 (restart 1)"."""
    number = job.partition(" ")[0]
    if not number:
        return None
    patterns = [f"*-{number}.out"] if "_" in number else [f"*-{number}.out", f"*-{number}_*.out"]
    found = [path for pattern in patterns for path in LOGS.glob(pattern)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def next_command(run: RunFile, state: State, run_file: Path, assignments: tuple[str, ...]) -> str:
    """What to type next."""
    mine = " ".join(["", shlex.quote(str(run_file)), *(f"--set {shlex.quote(text)}" for text in assignments)])
    missing = state.missing()
    if not missing:
        folder = RunFolder(run.output)
        return Summary.read(folder).next_command if folder.is_finished else f"{program()} eval {run.output}"
    if state.is_under_way:
        return f"{program()} status{mine} --watch 10"
    if state.cache.lost:
        return f"{program()} cache repair{mine}"
    if state.training.state != "another run" and not assignments and shutil.which("sbatch") and SUBMIT.exists():
        return f"{SUBMIT}{mine}"
    if missing[0] in ("plan", "cache") or missing[0].startswith("cache "):
        return f"{program()} cache build{mine}"
    if missing[0] == "eval" and state.training.state == "finished":
        return f"{program()} eval {run.output} --split {state.split}"
    flag = " --restart" if state.training.state == "another run" else ""
    resumes = state.is_trained or state.training.checkpoint
    return f"{program()} train{mine}{flag or (' --resume' if resumes else '')}"
