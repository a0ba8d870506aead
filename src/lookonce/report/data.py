"""The records of a run: how many there are, and which images training has seen.

Design: image keys come from the plan of the run's cache, so no image is read. Without the plan images are compared by
their paths, which does not find a copy under another name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookonce.cache.store.fingerprint import FOLDER_DIGITS
from lookonce.cache.store.metadata import read_plan
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.prepare.extract import REPORT
from lookonce.datasets.records import Record
from lookonce.errors import LookonceError
from lookonce.eval.scores.prediction import Prediction
from lookonce.files import read_object
from lookonce.run.config import RunFile
from lookonce.run.records import read_splits, without_fold
from lookonce.text import first_line


@dataclass(frozen=True)
class SplitFacts:
    """How much is in a split."""

    num_records: int
    num_questions: int
    num_images: int
    """Distinct images, by their keys where these are known."""


@dataclass(frozen=True)
class DataFacts:
    """The records of a run."""

    splits: Mapping[str, SplitFacts] = field(default_factory=dict)
    """The splits that have records."""
    seen: frozenset[str] = frozenset()
    """The keys and the paths of the images of the training records."""
    has_keys: bool = False
    """Whether the keys of the training images are known."""
    problem: str = ""
    """Why nothing is known of the records."""
    prepared: Mapping[str, Any] = field(default_factory=dict)
    """The report of `lookonce data prepare` beside the training records."""

    @classmethod
    def of(cls, run: RunFile, records: Mapping[str, Sequence[Record]], key_of: Mapping[Path, str]) -> DataFacts:
        trained_on = {path for record in records["train"] for path in record.images}
        keys = {key_of[path] for path in trained_on if path in key_of}
        return cls(
            splits={split: _facts(some, key_of) for split, some in records.items() if some},
            seen=frozenset(keys | set(map(str, trained_on))),
            has_keys=all(path in key_of for path in trained_on),
            prepared=read_object(run.data.train[0].parent / REPORT),
        )

    @classmethod
    def read(cls, run: RunFile, fingerprint: str) -> DataFacts:
        """Read the records, and the image keys from the plan of the cache with this fingerprint."""
        try:
            planned = read_plan(run.cache.dir / fingerprint[:FOLDER_DIGITS]).files() if fingerprint else {}
            images = ImageIndex({Path(path): key for path, (key, _) in planned.items()}, {})
            records = without_fold(run, read_splits(run), images)
        except (LookonceError, OSError) as error:
            return cls(problem=first_line(error))
        return cls.of(run, records, images.key_of)

    def is_seen(self, prediction: Prediction) -> bool:
        """Whether training has seen an image of the question."""
        return not self.seen.isdisjoint((*prediction.image_keys, *prediction.images))


def _facts(records: Iterable[Record], key_of: Mapping[Path, str]) -> SplitFacts:
    records = list(records)
    return SplitFacts(
        num_records=len(records),
        num_questions=sum(len(record.turns) for record in records),
        num_images=len({key_of.get(path, path) for record in records for path in record.images}),
    )


def overlap(predictions: Sequence[Prediction], facts: DataFacts) -> dict[str, Any]:
    """How many questions and images of a split training has seen, and the exact match of all others."""
    seen = [one for one in predictions if facts.is_seen(one)]
    others = [one for one in predictions if not facts.is_seen(one)]
    return {
        "num_questions": len(seen),
        "num_images": len({one.sources for one in seen}),
        "exact_match_of_others": sum(one.is_right for one in others) / len(others) if others else None,
        "by_content": facts.has_keys and all(one.image_keys or not one.images for one in predictions),
    }
