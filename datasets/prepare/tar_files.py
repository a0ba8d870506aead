"""The rows of WebDataset tars: samples of an image and a JSON file that holds its questions.

Design: read by webdataset itself, streamed through once, one sample in memory. The JSON file may be one question, a
list of them, or an object that holds such a list beside what they have in common.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.chunks import BUFFER_BYTES, Portion, RawRow, broken
from lookonce.datasets.prepare.definition import Definition
from lookonce.datasets.prepare.text_files import parse_json
from lookonce.errors import RecordsError

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif")
"""Of members that are images."""
NUM_PEEKED = 16
"""Members among which a sample's questions are."""


def read_tar(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """A WebDataset tar: samples of an image and a JSON file that holds its questions."""
    yield Portion(name, partial(_read_samples, path, name, definition))


def holds_questions(path: Path) -> bool:
    """Whether a tar file is of samples with questions, and not of images alone; one that is damaged counts as such."""
    try:
        with tarfile.open(path, "r:") as archive:
            return any(member.name.endswith(".json") for member in islice(archive, NUM_PEEKED))
    except (tarfile.TarError, OSError):
        return True


def _read_samples(path: Path, name: str, definition: Definition) -> Iterator[RawRow]:
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    with path.open("rb", buffering=BUFFER_BYTES) as file:
        members = ({**member, "__url__": name} for member in tar_file_iterator(file, skip_meta=None))
        samples = group_by_keys(members)
        with closing(samples):
            while True:
                try:
                    sample = next(samples, None)
                except (ValueError, KeyError, OSError, EOFError, tarfile.TarError) as error:
                    raise broken(name, error) from None
                if sample is None:
                    return
                yield from _sample_rows(sample, f"{name}/{sample['__key__']}", definition)


def _sample_rows(sample: dict[str, Any], origin: str, definition: Definition) -> Iterator[RawRow]:
    image = next((sample[suffix] for suffix in sample if suffix.lower() in IMAGE_SUFFIXES), None)
    if "json" not in sample:
        raise RecordsError(
            f"{origin}: expected a .json member with its questions, got {sorted(set(sample) - {'__key__', '__url__'})}"
        )
    value = parse_json(sample["json"].decode("utf-8", "replace"), f"{origin}.json")
    own_id = {definition.columns.image_id[0]: sample["__key__"].rpartition("/")[2]}
    for values in _questions_in(value, definition.columns.question, f"{origin}.json"):
        yield RawRow(own_id | values, image, f"{origin}.json")


def _questions_in(value: Any, question: list[str], origin: str) -> list[dict[str, Any]]:
    """One question, a list of them, or an object that holds such a list beside what they have in common."""
    if isinstance(value, dict) and not set(question) & set(value):
        lists = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
        if len(lists) == 1:
            common = {key: item for key, item in value.items() if key != lists[0]}
            return [common | item for item in value[lists[0]]]
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(row, dict) for row in rows):
        raise RecordsError(f"{origin}: expected an object with `{question[0]}`, or a list of such objects")
    return rows
