"""What a model was trained on whose answers contexts have: its answers about these images are better than others.

Design: a predictions file lies in the folder of its run, which records the run. So its training records are read again,
and their images compared by keys. A file that was moved elsewhere has no known origin.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.readers.text import read_jsonl
from lookonce.datasets.records import Record
from lookonce.errors import LookonceError
from lookonce.run.folder import RECORD, RunFolder
from lookonce.run.records import read_splits, without_fold
from lookonce.text import count, first_line


def trained_on(path: Path, records: Iterable[Record], images: ImageIndex) -> str:
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
            f"{path}: its model was trained on {len(both):,} of {count(len(shown), 'image')} about which training "
            "records have its answers, so these are better than in an evaluation; cross-fit them"
        )
    return f"{path}: its model was trained on none of {count(len(shown), 'image')} about which records have its answers"
