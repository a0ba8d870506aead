"""The rows of a source's files: parquet, CSV, JSON and JSONL, WebDataset tars, and text with a line a question.

Design: files are read in portions of about two thousand rows, the unit in which an interrupted run goes on: some row
groups of a parquet file, a tar file, a stretch of another file. Portions are named before they are read, and a parquet
portion that is done is not opened. Embedded images are bytes as they lie in the file, never decoded. Kvasir-VQA's
parquet repeats an image in each of its rows, 15 GB in all: a repeated image is told by comparing it with the last few,
at memory's speed, and given as the same object, so nothing behind hashes or copies it again.

In memory are one portion's text, a few rows' images, and of a parquet file what pyarrow needs for a page of compressed
images. A JSON file that is one list is read whole.
"""

from __future__ import annotations

import csv
import json
import re
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.definition import Definition, TextSection
from lookonce.errors import RecordsError

PORTION_ROWS = 2000
BATCH_ROWS = 32
"""Of a parquet file, decoded at once."""
NUM_PEEKED = 16
"""Members of a tar file among which a sample's questions are."""
NUM_RECENT = 4
"""Images that a row's is compared with."""
BUFFER_BYTES = 1 << 20
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif")
"""Of members of a tar file that are images."""


@dataclass(frozen=True)
class RawRow:
    """One row as it lies there."""

    values: dict[str, Any]
    image: bytes | None
    """The embedded image."""
    origin: str


@dataclass(frozen=True)
class Portion:
    """Some rows that are read together."""

    name: str
    read: Callable[[], Iterable[RawRow]]
    num_rows: int | None = None
    """None if only reading tells."""


Reader = Callable[[Path, str, Definition], Iterator[Portion]]
"""The portions of a file, given its path, its name for messages, and the set's definition."""


def broken(name: str, error: object) -> RecordsError:
    """The error for a file that can not be read."""
    text = str(error).partition("\n")[0] or type(error).__name__
    return RecordsError(f"{name} can not be read ({text}); is it whole? Download or copy it again")


# Parquet.


def read_parquet(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """Row groups, as many together as make a portion."""
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    except Exception as error:  # what pyarrow raises for damaged files has no base of its own
        raise broken(name, error) from None
    groups: list[int] = []
    first_row = num_rows = 0
    for group, size in enumerate(sizes):
        groups.append(group)
        num_rows += size
        if num_rows >= PORTION_ROWS or group == len(sizes) - 1:
            read = partial(_read_groups, path, name, definition.columns.image, groups, first_row)
            yield Portion(f"{name}, row {first_row}", read, num_rows)
            groups, first_row, num_rows = [], first_row + num_rows, 0


def _read_groups(path: Path, name: str, image_names: list[str], groups: list[int], first_row: int) -> Iterator[RawRow]:
    from pyarrow.parquet import ParquetFile

    same = _Repeated()
    row = first_row
    with ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        embedded = _embedded_column(file.schema_arrow, image_names)
        batches = file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # as above
                raise broken(name, error) from None
            if batch is None:
                return
            images = _image_bytes(batch, embedded, same)
            plain = [column for column in batch.schema.names if column != embedded]
            for values, (image, image_path) in zip(batch.select(plain).to_pylist(), images, strict=True):
                if embedded:
                    values[embedded] = image_path
                yield RawRow(values, image, f"{name}/{row}")
                row += 1


def _embedded_column(schema: Any, names: Iterable[str]) -> str:
    """The column with images in it, or empty."""
    from pyarrow import types

    for name in names:
        if name in schema.names:
            kind = schema.field(name).type
            if types.is_binary(kind) or types.is_large_binary(kind):
                return name
            if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
                return name
    return ""


def _image_bytes(batch: Any, column: str, same: _Repeated) -> list[tuple[bytes | None, str | None]]:
    """Bytes and path of each row's image."""
    import pyarrow.compute as pc
    from pyarrow import types

    if not column:
        return [(None, None)] * batch.num_rows
    array = batch.column(column)
    if not types.is_struct(array.type):
        return [(same.bytes_of(value), None) for value in array]
    data = pc.struct_field(array, "bytes")
    has_path = array.type.get_field_index("path") >= 0
    paths = pc.struct_field(array, "path").to_pylist() if has_path else [None] * len(data)
    return [(same.bytes_of(value), path) for value, path in zip(data, paths, strict=True)]


class _Repeated:
    """Gives the same object for a buffer that equals one of the last few."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Any, bytes]] = deque(maxlen=NUM_RECENT)

    def bytes_of(self, value: Any) -> bytes | None:
        from pyarrow import py_buffer

        if not value.is_valid:
            return None
        buffer = value.as_buffer()
        for known, data in self._recent:
            if known.equals(buffer):
                return data
        data = bytes(buffer)
        self._recent.appendleft((py_buffer(data), data))
        return data


# Text files.


def read_csv(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """A CSV file with a header."""

    def rows() -> Iterator[RawRow]:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file, strict=True)
            for values in lines:
                if None in values or None in values.values():
                    wanted = f"{len(lines.fieldnames or [])} columns as its header has"
                    raise RecordsError(f"{name}:{lines.line_num}: expected {wanted}, got {list(values.values())!r}")
                yield RawRow(dict(values), None, f"{name}:{lines.line_num}")

    return _cut(name, rows())


def read_json(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """JSONL, or one JSON list of objects."""

    def rows() -> Iterator[RawRow]:
        with path.open(encoding="utf-8-sig") as file:
            start = file.read(1)
            while start.isspace():
                start = file.read(1)
            file.seek(0)
            if start == "[":
                yield from (_row(value, f"{name}, entry {number}") for number, value in enumerate(json.load(file), 1))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(_parse(line, f"{name}:{number}"), f"{name}:{number}")

    return _cut(name, rows())


def _parse(line: str, origin: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"{origin}: not JSON ({error}); expected one object a line") from None


def _row(value: Any, origin: str) -> RawRow:
    if not isinstance(value, dict):
        raise RecordsError(f"{origin}: expected a JSON object, got {type(value).__name__}")
    return RawRow(value, None, origin)


def _cut(name: str, rows: Iterator[RawRow]) -> Iterator[Portion]:
    """Portions of a stream; errors of the file are told with its name."""
    first = 0
    while True:
        try:
            some = list(islice(rows, PORTION_ROWS))
        except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
            raise error if isinstance(error, RecordsError) else broken(name, error) from None
        if not some:
            return
        yield Portion(f"{name}, row {first}", some.copy, len(some))
        first += len(some)


def read_text(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """A file of `question|answer` lines about one image, which the path names."""
    section = definition.text
    assert section is not None
    fields = field_values(section, name)

    def rows() -> Iterator[RawRow]:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield RawRow(
                        fields | _question_and_answer(line, section, f"{name}:{number}"), None, f"{name}:{number}"
                    )

    return _cut(name, rows())


def field_values(section: TextSection, name: str) -> dict[str, str]:
    """What a file's path says, with the image and its name that follow from it; empty if it is no such file."""
    pieces = re.split(r"\{(\w+)\}", section.files)
    expression = "".join(
        re.escape(piece).replace(r"\*", "[^/]*") if number % 2 == 0 else f"(?P<{piece}>[^/]+?)"
        for number, piece in enumerate(pieces)
    )
    found = re.fullmatch(f"(?:.*/)?{expression}", name)
    if found is None:
        return {}
    fields = found.groupdict()
    start = name[: len(name) - len(_tail(name, section.files))]
    return fields | {"image": start + section.image.format(**fields), "image_id": section.image_id.format(**fields)}


def _tail(name: str, pattern: str) -> str:
    return "/".join(name.split("/")[-len(pattern.split("/")) :])


def _question_and_answer(line: str, section: TextSection, origin: str) -> dict[str, str]:
    parts = line.rstrip("\r\n").split(section.separator)
    if len(parts) != 2:
        raise RecordsError(f"{origin}: expected question{section.separator}answer, got {line.strip()!r}")
    return {"question": parts[0], "answer": parts[1]}


# Tar files.


def read_tar(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """A WebDataset tar: samples of an image and a JSON file that holds its questions."""
    yield Portion(name, lambda: _read_samples(path, name, definition))


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
    value = _parse(sample["json"].decode("utf-8", "replace"), f"{origin}.json")
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
