"""Records: conversations about images, read from and written to the record formats in use elsewhere (formats/).

The default format is canonical, in JSONL:

    {"images": ["images/a.jpg"], "turns": [{"question": "Is there text?", "answer": "yes"}],
     "system": "Answer briefly.", "metadata": {"source": "polyps"}}

A file may be JSONL, a JSON array, CSV or parquet, recognised by its first bytes and, for CSV, by its name. The keys of
its first record tell the format.

Design: a malformed record is an error that names file and line, because a record that is silently skipped is missing
from the training set. A caller that reports all of them passes `broken`. A written file is read back before it gets
its name, so a format that cannot hold a record refuses it; that costs as much as reading does.

Images are not opened here. Links inside the image root are followed. A path that leads out of the root keeps its `..`
components, which no other path has; it is never opened, and counts as an image that cannot be read.

Malformed records are counted by kind: the message without its values, so 5,000 records with one mistake are one line.
The kind is made from the message, because errors are raised in fifty places. A value that is not recognised as one
splits a kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lookonce.datasets.formats.image_references import Finder, Keep, image_name
from lookonce.datasets.formats.record import Context, Record, Row, Turn, check_values, shown
from lookonce.datasets.formats.registry import FORMATS, FormatName, Reader, format_of, read_row
from lookonce.datasets.parquet import left_out_columns, read_parquet, without_nulls, write_parquet
from lookonce.datasets.text_files import (
    TABLES,
    Broken,
    Kind,
    Named,
    Rows,
    as_cell,
    kind_of_file,
    read_array,
    read_jsonl,
    read_table,
    refuse,
    write_array,
    write_csv,
    write_jsonl,
)
from lookonce.errors import RecordsError, UsageError, explain_os_error
from lookonce.files import atomic_write
from lookonce.text import listed, located

__all__ = ["Context", "Record", "RecordsFile", "Turn", "format_of_file", "read_records", "write_records"]

READERS: dict[Kind, Callable[..., Rows]] = {
    "jsonl": read_jsonl,
    "array": read_array,
    "table": read_table,
    "parquet": read_parquet,
}


class FileType(NamedTuple):
    kind: Kind
    write: Callable[[Path, Named], None]
    reading: Mapping[str, Any] = {}
    """What the function that reads it must know."""


JSONL = FileType("jsonl", write_jsonl)
FILE_TYPES = {
    ".json": FileType("array", write_array),
    ".csv": FileType("table", write_csv, {"delimiter": ","}),
    ".tsv": FileType("table", partial(write_csv, delimiter="\t"), {"delimiter": "\t"}),
    ".parquet": FileType("parquet", write_parquet),
}
"""The type of file by suffix; all others are JSONL."""
PROGRESS_DELAY_S = 1.0
EXPECTED = "expected one JSON object per line, an array of them, CSV with a header, or parquet"


def read_records(
    path: Path | str,
    image_root: Path | str | None = None,
    *,
    format: FormatName | None = None,
    keep: Keep | None = None,
    coerce_answers: bool = False,
) -> list[Record]:
    """The records of a file, in order.

    Image paths are relative to `image_root` and may not lead out of it; by default they are relative to the folder of
    the records file. `format` is the expected format instead of that of the first record. `keep` stores the bytes of
    embedded images without a path, and returns the path of the new file. `coerce_answers` reads answers that are
    numbers or booleans as text.

    Raises:
        RecordsError: the file is missing, empty, or a record of it is malformed or has another format.
    """
    root = None if image_root is None else Path(image_root)
    return list(RecordsFile(Path(path), root, format=format, keep=keep, coerce_answers=coerce_answers))


class RecordsFile:
    """The records of a file, one at a time; each iteration reads the file again."""

    def __init__(
        self,
        path: Path,
        image_root: Path | None = None,
        *,
        format: FormatName | None = None,
        keep: Keep | None = None,
        coerce_answers: bool = False,
        unanswered: bool = False,
        broken: Broken = refuse,
    ) -> None:
        """`broken` takes malformed records and their errors; by default the first one is raised.

        With `unanswered` the last question of a record may lack its answer, which is then empty.
        """
        self.path, self.format, self.num_coerced = path, format, 0
        """Without an expected format it is that of the first record, once that was read."""
        self.left_out_columns: tuple[str, ...] = ()
        """The columns of bytes that are not read, such as masks; known once reading has begun."""
        self._new_finder = partial(Finder, path, image_root, keep, coerce=coerce_answers, unanswered=unanswered)
        self._expected_format, self._broken = format, broken

    def __iter__(self) -> Iterator[Record]:
        reader, self._is_empty = Reader(self._new_finder(), self._expected_format), True
        for origin, value in self._values():
            self._is_empty = False
            try:
                record = reader.read(value, origin)
            except RecordsError as error:
                self._report(origin, error)
                continue
            finally:
                self.format, self.num_coerced = reader.format, reader.finder.num_coerced
            yield record
        if self._is_empty:
            empty = "" if self.path.stat().st_size else "; the file is empty"
            self._broken(str(self.path), RecordsError(f"{self.path} has no records; {EXPECTED}{empty}"))

    def note(self) -> str:
        """What of the file was left out, for the user; empty if nothing was."""
        if not self.left_out_columns:
            return ""
        columns = listed([f"`{name}`" for name in self.left_out_columns])
        return f"{self.path}: left out {columns}, which hold bytes: metadata cannot have them"

    def _report(self, origin: str, error: RecordsError) -> None:
        self._is_empty = False
        self._broken(origin, error)

    def _values(self) -> Rows:
        path = self.path
        try:
            kind = kind_of_file(path)
            self.left_out_columns = tuple(left_out_columns(path)) if kind == "parquet" else ()
            yield from READERS[kind](path, broken=self._report)
        except FileNotFoundError:
            raise RecordsError(missing_file(path)) from None
        except PermissionError as error:
            raise RecordsError(explain_os_error(error)) from None
        except OSError as error:
            raise RecordsError(f"cannot read {path}: {error}") from None


def missing_file(path: Path) -> str:
    """What to say of a records file that does not exist."""
    return f"no records file at {located(path)}; check the path, or the `data` section of the run file"


def check_target(target: Path, source: Path | None, suffixes: Sequence[str], *, overwrite: bool) -> None:
    """Raise UsageError if `target` has none of these suffixes, is `source`, or exists and must stay."""
    if target.suffix.lower() not in suffixes:
        raise UsageError(f"{target}: the suffix decides the type of file to write; name one with {', '.join(suffixes)}")
    if source and target.exists() and source.exists() and target.samefile(source):
        raise UsageError(f"{target} is also the file to read; name another file to write")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; name another file, or replace it with --overwrite")


def write_records(
    path: Path | str,
    records: Iterable[Record],
    image_root: Path | str | None = None,
    *,
    format: FormatName | None = None,
    absolute: bool = False,
) -> None:
    """Write records, with image paths relative to `image_root` or to the file's own folder.

    The suffix chooses the type of file: .json, .csv, .tsv, .parquet, else JSONL. The format is canonical by default,
    and flat in CSV. With `absolute`, images outside the file's folder get absolute paths.

    Raises:
        RecordsError: an image lies outside the folder, or the format cannot hold a record; names the record. The old
            content of `path` is kept.
        UsageError: another format than flat was requested for CSV.
    """
    path, root = Path(path), None if image_root is None else Path(image_root)
    file_type = FILE_TYPES.get(path.suffix.lower(), JSONL)
    format = format_of_file(path, format)
    named_records = [(record.origin or f"record {number}", record) for number, record in enumerate(records, start=1)]
    name_of = partial(image_name, root=root or path.parent, absolute=absolute and root is None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, _errors_name(path, temporary):
        rows = ((name, _row(record, name, format, name_of)) for name, record in _bar(named_records, "write records"))
        file_type.write(temporary, rows)
        finder = Finder(path, root)
        read = READERS[file_type.kind]
        with closing(read(temporary, **file_type.reading)) if named_records else nullcontext(()) as reread:
            for (name, record), (_, value) in zip(_bar(named_records, "read them back"), reread, strict=True):
                if lost := _lost_content(record, value, name, format, finder, file_type.kind):
                    raise RecordsError(f"{name}: the format {format}, in {path.name}, cannot hold this record: {lost}")


@contextlib.contextmanager
def _errors_name(path: Path, temporary: Path) -> Iterator[None]:
    """Within this context, errors name the file that is written, and not the temporary one."""
    try:
        yield
    except RecordsError as error:
        message = str(error).replace(str(temporary), str(path))
        raise RecordsError(message.replace(temporary.name, path.name)) from None


def _bar(records: list[tuple[str, Record]], description: str) -> Any:
    """A progress bar, if it takes longer than a moment."""
    return tqdm(records, desc=description, unit="record", leave=False, disable=None, delay=PROGRESS_DELAY_S)


def format_of_file(path: Path, format: FormatName | None) -> FormatName:
    """The format to write to a file of that name; raises UsageError if it cannot hold the requested one."""
    if path.suffix.lower() not in TABLES:
        return format or "canonical"
    if format not in (None, "flat"):
        raise UsageError(f"{path}: CSV holds flat records, not the format {format}; write JSONL or parquet")
    return "flat"


def _row(record: Record, name: str, format: FormatName, name_of: Callable[[Path, str], str]) -> Row:
    check_values(record.metadata, name)
    images = [name_of(image, name) for image in record.images]
    try:
        return FORMATS[format].write(record, images)
    except RecordsError as error:
        raise RecordsError(f"{name}: the format {format} cannot hold this record: {error}") from None


def _lost_content(record: Record, value: Any, name: str, format: FormatName, finder: Finder, kind: Kind) -> str:
    """What of a record would be lost when it is read back; empty if nothing."""
    if (read_format := format_of(value)) != format:
        return f"with its metadata it would be read as the format {read_format}"
    try:
        reread = read_row(format, value, finder, name)
    except RecordsError as error:
        return str(error).removeprefix(f"{name}: ")
    paths, expected_paths = [str(image) for image in reread.images], [os.path.abspath(image) for image in record.images]
    for part, read, original in (
        ("images", paths, expected_paths),
        ("turns", reread.turns, record.turns),
        ("system text", reread.system, record.system),
    ):
        if read != original:
            return f"its {part} would be read back as {shown(read)}"
    if reread.metadata != record.metadata and not _is_same(reread.metadata, record.metadata, kind, name):
        return f"its metadata would be read back as {shown(reread.metadata)}"
    return ""


def _is_same(read: Mapping[str, Any], metadata: Mapping[str, Any], kind: Kind, name: str) -> bool:
    """Whether metadata was read back: in the types of JSON, in parquet without nulls, in CSV as texts."""
    if kind == "table":
        cells = {key: as_cell(value, name) for key, value in metadata.items()}
        return read == {key: cell for key, cell in cells.items() if cell}
    written = without_nulls(metadata) if kind == "parquet" else metadata
    return bool(_as_json(read) == _as_json(written))


def _as_json(value: Any) -> Any:
    """A value as JSON would return it, with NaN as text, which equals itself."""
    return json.loads(json.dumps(value), parse_constant=str)


NUM_PLACES = 3
VALUES = (
    (re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""), "..."),
    (re.compile(r"(?<=, got ).*?(?=; |$)", re.S), "..."),
    (re.compile(r"\d+"), "N"),
)
"""What in a message is a value, and what stands for it in a kind."""


class Malformed(NamedTuple):
    """A record that cannot be read, or a file whose end cannot be."""

    place: str
    """The record: "train.jsonl:12"; or the file."""
    reason: str


@dataclass(frozen=True)
class MalformedKind:
    """Malformed records with the same mistake."""

    kind: str
    """The message, with dots for its values."""
    reason: str
    """The message of the first of them."""
    places: tuple[str, ...]

    def text(self) -> str:
        times = f"{len(self.places):,} times: " if len(self.places) > 1 else ""
        return f"{times}{self.reason} ({listed(self.places, NUM_PLACES)})"


class Collector(list[Malformed]):
    """Collects malformed records: pass it as `broken` to `RecordsFile`."""

    def __call__(self, origin: str, error: RecordsError) -> None:
        self.append(Malformed(origin, str(error).removeprefix(f"{origin}: ")))


def by_kind(malformed: Iterable[Malformed]) -> list[MalformedKind]:
    """The kinds of malformed records, the most frequent first."""
    by_name: dict[str, list[Malformed]] = {}
    for record in malformed:
        by_name.setdefault(kind_of(record.reason), []).append(record)
    kinds = [
        MalformedKind(kind, records[0].reason, tuple(record.place for record in records))
        for kind, records in by_name.items()
    ]
    return sorted(kinds, key=lambda kind: -len(kind.places))


def kind_of(reason: str) -> str:
    """A message without its values."""
    for value, sign in VALUES:
        reason = value.sub(sign, reason)
    return reason
