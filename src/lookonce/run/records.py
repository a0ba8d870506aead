"""A run's records, the contexts in their prompts, and its distinct images. Imports no torch.

Contexts join answers by images and not by paths, so they are made when the image keys are known; building a cache needs
no answers. An evaluation makes its own (`eval.staged`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from lookonce.cache.build.progress import index_from_plan
from lookonce.cache.format import BUILD_COMMAND
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import MANIFEST, read_plan, read_quarantine
from lookonce.cache.store.reader import find_cache
from lookonce.datasets.balance import record_weights
from lookonce.datasets.context import counted, with_given
from lookonce.datasets.curriculum import hold_out, read_stage_map, select_training, with_stages
from lookonce.datasets.images import ImageIndex, index_images, is_gone
from lookonce.datasets.records import Record, RecordsFile, missing_file
from lookonce.datasets.text_files import read_jsonl
from lookonce.environment import without_garbage_collection
from lookonce.errors import FeaturesMissing, LookonceError, RecordsError
from lookonce.hub import check_name
from lookonce.run.config import RunFile
from lookonce.run.folder import RECORD, RunFolder
from lookonce.text import Notify, count, first_line, quiet

SPLITS = ("train", "val", "test")
HELD_OUT = "held_out"
"""The split of the training records that `data.held_out` leaves out; it has no files of its own."""
GONE_ADVICE = f"there is no such file either; correct the records or `data.image_root`, then run: {BUILD_COMMAND}"
UNUSABLE_ADVICE = "repair the file, or remove its records, which this lists: lookonce data audit RECORDS --decode"


def read_splits(run: RunFile, notify: Notify = quiet) -> dict[str, list[Record]]:
    """The records of a run, by split: train, val, test.

    `notify` gets the training records that are left out.

    Raises:
        LookonceError: records are missing or broken, have no stage, or none is selected.
    """
    with without_garbage_collection():
        records = {split: list(read_split(run, split, notify)) for split in SPLITS}
        return for_training(run, records, notify)


def for_training(run: RunFile, records: dict[str, list[Record]], notify: Notify = quiet) -> dict[str, list[Record]]:
    """The records with `data.system` and the stages of `data.stage_map`; those of training as `data.where` and
    `data.replay` select.

    Raises:
        LookonceError: records have no stage, or none is selected; or all have a system text of their own;
            or answers cannot be balanced.
    """
    data, order = run.data, run.batch.stage_order
    if data.system:
        records = with_system(records, data.system, notify)
    if data.stage_map:
        records = with_stages(records, data.stage_map, notify)
    if data.where:
        selected = select_training(records["train"], data.where, data.replay, run.train.seed, notify)
        records = records | {"train": selected}
    if order:
        notify(f"each epoch trains on {order.check(records['train'])}")
    if run.batch.balance:
        record_weights(records["train"], run.batch.balance, notify)
    return records


def with_system(records: dict[str, list[Record]], system: str, notify: Notify = quiet) -> dict[str, list[Record]]:
    """The records with this system text unless they have one; raises RecordsError if all have one."""
    has_own = [record.system is not None for each in records.values() for record in each]
    if has_own and all(has_own):
        raise RecordsError(
            f"`data.system` is in no prompt: each of {count(len(has_own), 'record')} has a system text of its own; "
            "leave the key out, or remove theirs"
        )
    if any(has_own):
        notify(f"{sum(has_own):,} of {count(len(has_own), 'record')} have their own system text, not `data.system`")
    return {split: [record.with_system(system) for record in each] for split, each in records.items()}


def without_fold(
    run: RunFile, records: dict[str, list[Record]], images: ImageIndex, notify: Notify = quiet
) -> dict[str, list[Record]]:
    """The records, those that `data.held_out` leaves out as a split; raises RecordsError with too few images."""
    if not run.data.held_out:
        return records
    used, left_out = hold_out(records["train"], run.data.held_out, run.train.seed, images.keys_of)
    num_images = len({key for record in left_out for key in images.keys_of(record)})
    notify(
        f"`data.held_out` leaves out {len(left_out):,} of {count(len(records['train']), 'train record')} "
        f"({count(num_images, 'image')})"
    )
    return records | {"train": used, HELD_OUT: left_out}


def read_split(run: RunFile, split: str, notify: Notify = quiet) -> Iterator[Record]:
    """The records of one split, as its files have them."""
    for path in getattr(run.data, split):
        file = RecordsFile(path, run.data.image_root)
        yield from file
        if note := file.note():
            notify(note)


def check_paths(run: RunFile) -> None:
    """Check that the records files exist, and the model folder unless it may be on the Hub; takes no time.

    Raises:
        UsageError: the file of `data.stage_map` is missing or wrong.
        RecordsError: a records file is missing.
        ModelError: the model folder is missing.
    """
    for split in SPLITS:
        for path in getattr(run.data, split):
            if not path.exists():
                raise RecordsError(missing_file(path))
    if run.data.stage_map:
        read_stage_map(run.data.stage_map)
    check_name(run.model.path)


def find_images(folder: Path, records: dict[str, list[Record]], *, trust_plan: bool) -> ImageIndex:
    """The images of a run's records; with `trust_plan` those that the plan in the cache `folder` names are not read."""
    everything = list(chain.from_iterable(records.values()))
    paths = (path for record in everything for path in record.images)
    return index_images(everything, index_from_plan(read_plan(folder), paths) if trust_plan else None)


def cached_images(
    run: RunFile, fingerprint: Fingerprint, records: dict[str, list[Record]], notify: Notify = quiet
) -> ImageIndex:
    """The images of a run's records by the plan of its cache, as training and evaluation need them.

    No planned image is read, and none need exist. Files that the plan does not name, or that have changed since, are
    hashed; `notify` gets their number.

    Raises:
        CacheError: there is no such cache.
        FeaturesMissing: the plan does not know an image; names the first one and a record with it.
    """
    folder = run.cache.dir / fingerprint.folder_name
    if not (folder / MANIFEST).exists():
        find_cache(run.cache.dir, fingerprint)  # its error says which caches there are, and how they differ
    plan = read_plan(folder)
    everything = list(chain.from_iterable(records.values()))
    paths = dict.fromkeys(path for record in everything for path in record.images)
    known = index_from_plan(plan, paths, without_files=True)
    unknown = [path for path in paths if path not in known.key_of]
    _refuse([path for path in unknown if is_gone(path)], everything, folder, GONE_ADVICE)
    images = index_images(everything, known)
    keys = {key for key, _ in plan.files().values()}
    unplanned = [path for path in unknown if images.key_of.get(path) not in keys | {None}]
    _refuse(unplanned, everything, folder, f"run: {BUILD_COMMAND}")
    if unknown:
        notify(
            f"{count(len(unknown), 'image')} hashed, because the cache's plan, which lists its images, lacks them or "
            f"they have changed since; to record them, run: {BUILD_COMMAND}"
        )
    return images


def _refuse(unknown: list[Path], records: list[Record], folder: Path, advice: str) -> None:
    """Refuse images that the plan of a cache does not know; `advice` is what to do unless they are quarantined."""
    if unknown:
        path = unknown[0]
        origin = next(record.origin for record in records if path in record.images)
        num_images = len({path for record in records for path in record.images})
        if reason := read_quarantine(folder).get(str(path)):
            advice = f"the last build could not read it ({reason}); {UNUSABLE_ADVICE}"
        raise FeaturesMissing(
            f"the plan of {folder}, which lists its images, does not know {len(unknown)} of {num_images} images, "
            f"the first being {path} ({origin}); {advice}"
        )


def with_contexts(
    run: RunFile, records: dict[str, list[Record]], images: ImageIndex, notify: Notify
) -> dict[str, list[Record]]:
    """The records, train and val with contexts; `notify` gets how many; raises RecordsError if answers are wrong."""
    form = run.data.context
    if form is None:
        return records
    form.check(chain.from_iterable(records.values()))
    trained = {split: records[split] for split in ("train", "val")}
    trained = with_given(trained, form, form.prediction_files, images.keys_of)
    for split, of_split in trained.items():
        if of_split:
            notify(counted(of_split, split))
    for path in form.prediction_files:
        if note := overlap_note(path, trained["train"], images):
            notify(note)
    return records | trained


def overlap_note(path: Path, records: Iterable[Record], images: ImageIndex) -> str:
    """How many images whose answers a predictions file has for these records its model was trained on, as text.

    Empty if it has no answers for them.
    """
    answered = {key for _, row in read_jsonl(path) for key in row["image_keys"]}
    shown = {key for record in records if record.context for key in images.keys_of(record)} & answered
    folder = path.absolute().parent.parent
    if not shown:
        return ""
    if not (folder / RECORD).exists():
        return f"{path} is not in a run folder, so it is unknown which images its model was trained on"
    try:
        run = RunFolder(folder).read_run()
        trained = read_splits(run)
        known = index_images(trained["train"], images, needs_one=False)
        trained = without_fold(run, trained, known)
        seen = {key for record in trained["train"] for key in known.keys_of(record)}
    except LookonceError as error:
        return f"{path}: it is unknown which images its model was trained on: {first_line(error)}"
    if both := shown & seen:
        return (
            f"{path}: its model was trained on {len(both):,} of {count(len(shown), 'image')} for which training "
            "prompts have its answers; about these images it answers better than in an evaluation, so cross-fit them "
            "(docs/training.md#cross-fitting)"
        )
    return f"{path}: its model was trained on none of {count(len(shown), 'image')} for which prompts have its answers"
