"""Records: conversations about images, read from and written to the forms that people have them in.

The canonical form, which is the one written if no other is asked for, is JSONL:

    {"images": ["images/a.jpg"], "turns": [{"question": "Is there text?", "answer": "yes"}],
     "system": "Answer briefly.", "metadata": {"source": "polyps"}}

The others are in forms/. A form says what keys a record has, and is known by those of a file's first record. The file
may be JSONL, a JSON array, CSV or parquet, which is known by its first bytes and, for CSV, by its name.

Design: strict. A line that is not just so is an error that names file, line and what was expected, because a record
skipped in silence is a hole in somebody's training set. What is written is read back before it takes its name, so a
form that can not hold a record refuses it, whatever the reason; that costs as much as reading does.

Image paths are relative to the records file or to an image root, or absolute (forms/places.py), and may lead into an
archive (archives.py); links inside the root are followed, since shared image folders are often links. Whether an image
can be read is not asked here. A path that leads out of the root keeps its `..` parts, which no other path has; it is
never opened, and counts as an image that can not be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from lookonce.datasets.formats.checks import Row, shown
from lookonce.datasets.formats.image_refs import Finder, Keep, Namer
from lookonce.datasets.formats.parquet import read_parquet, without_nulls, write_parquet
from lookonce.datasets.formats.record import Record, Turn
from lookonce.datasets.formats.registry import FORMS, FormName, Reader, form_of
from lookonce.datasets.formats.text_files import (
    Named,
    Rows,
    as_cell,
    read_array,
    read_csv,
    read_jsonl,
    write_array,
    write_csv,
    write_jsonl,
)
from lookonce.errors import RecordsError, UsageError
from lookonce.files import atomic_write

__all__ = ["Record", "RecordsFile", "Turn", "form_of_file", "read_records", "write_records"]

Container = Literal["jsonl", "array", "csv", "tsv", "parquet"]
SUFFIXES: dict[str, Container] = {".json": "array", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
"""All other files are JSONL."""
TABLES = (".csv", ".tsv")
READ: dict[Container, Callable[[Path], Rows]] = {
    "jsonl": read_jsonl,
    "array": read_array,
    "csv": read_csv,
    "tsv": partial(read_csv, delimiter="\t"),
    "parquet": read_parquet,
}
WRITE: dict[Container, Callable[[Path, Named], None]] = {
    "jsonl": write_jsonl,
    "array": write_array,
    "csv": write_csv,
    "tsv": partial(write_csv, delimiter="\t"),
    "parquet": write_parquet,
}
HEAD_BYTES = 4096
MOMENT_S = 1.0
EXPECTED = "expected one JSON object a line, an array of them, CSV with a head, or parquet"


def read_records(
    path: Path, image_root: Path | None = None, *, form: FormName | None = None, keep: Keep | None = None
) -> list[Record]:
    """The records of a file, in order.

    `image_root` is what image paths are relative to and may not lead out of; without it, relative ones begin at the
    records file's own folder. `form` is what to expect, instead of what the first record is. `keep` is given the bytes
    of embedded images that no path leads to, and gives the place where it has put them.

    Raises:
        RecordsError: the file is missing, empty, or a record of it is broken or of another form.
    """
    return list(RecordsFile(path, image_root, form=form, keep=keep))


class RecordsFile:
    """The records of a file, one at a time; each iteration reads it anew."""

    def __init__(
        self, path: Path, image_root: Path | None = None, *, form: FormName | None = None, keep: Keep | None = None
    ) -> None:
        self.path, self.form = path, form
        """If no form was named, it is known after the first record."""
        self._new_reader = partial(Reader, Finder(path, image_root, keep), form)

    def __iter__(self) -> Iterator[Record]:
        reader, is_empty = self._new_reader(), True
        for origin, value in self._values():
            record, is_empty = reader.read(value, origin), False
            self.form = reader.form
            yield record
        if is_empty:
            raise RecordsError(f"{self.path} holds no records; {EXPECTED}")

    def _values(self) -> Rows:
        path = self.path
        try:
            yield from READ[_container(path)](path)
        except FileNotFoundError:
            where = path.absolute()
            raise RecordsError(f"no records file at {where}; check the `data` section of the run file") from None
        except (OSError, UnicodeDecodeError) as error:
            kind = "CSV" if path.suffix.lower() in TABLES else "JSONL"
            raise RecordsError(f"can not read {path}: {error}; expected a {kind} file in UTF-8") from None


def _container(path: Path) -> Container:
    """What kind of file it is: by its name if it is CSV, else by how it begins."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return "parquet"
    named = SUFFIXES.get(path.suffix.lower())
    if named in ("csv", "tsv"):
        return named
    return "array" if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else "jsonl"


def write_records(
    path: Path,
    records: Iterable[Record],
    image_root: Path | None = None,
    *,
    form: FormName | None = None,
    absolute: bool = False,
) -> None:
    """Write records, images relative to `image_root` or to the file's own folder.

    The suffix says what file it is: .json, .csv, .tsv, .parquet, else JSONL. The form is canonical if none is named,
    and flat in CSV. `absolute` names images by their whole path that lie outside of the file's folder.

    Raises:
        RecordsError: an image lies outside of the folder, or the form can not hold a record; names it. What was at
            `path` before is still there.
        UsageError: a CSV file is to hold another form than flat.
    """
    container = SUFFIXES.get(path.suffix.lower(), "jsonl")
    form = form_of_file(path, form)
    everything = [(record.origin or f"record {number}", record) for number, record in enumerate(records, start=1)]
    namer = Namer(path, image_root, absolute=absolute)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        rows = ((name, _row(record, name, form, namer)) for name, record in _bar(everything, "write records"))
        WRITE[container](temporary, rows)
        finder, again = Finder(path, image_root), READ[container](temporary) if everything else iter(())
        for (name, record), (_, value) in zip(_bar(everything, "read them back"), again, strict=True):
            if lost := _lost(record, value, name, form, finder, container):
                raise RecordsError(f"{name}: the form {form}, in {path.name}, can not hold this record: {lost}")


def _bar(everything: list[tuple[str, Record]], what: str) -> Any:
    """Shown where it takes longer than a moment."""
    return tqdm(everything, desc=what, unit="record", leave=False, disable=None, delay=MOMENT_S)


def form_of_file(path: Path, form: FormName | None) -> FormName:
    """The form that is written to a file of that name, where `form` is asked for.

    Raises:
        UsageError: such a file can not hold it.
    """
    if path.suffix.lower() not in TABLES:
        return form or "canonical"
    if form not in (None, "flat"):
        raise UsageError(f"{path}: CSV holds flat records, and not the form {form}; write JSONL or parquet")
    return "flat"


def _row(record: Record, name: str, form: FormName, namer: Namer) -> Row:
    images = [namer.name(image, name) for image in record.images]
    try:
        return FORMS[form].write(record, images)
    except RecordsError as error:
        raise RecordsError(f"{name}: the form {form} can not hold this record: {error}") from None


def _lost(record: Record, value: Any, name: str, form: FormName, finder: Finder, container: Container) -> str:
    """What of a record is not read back from what was written; nothing if all is."""
    if (found := form_of(value)) != form:
        return f"with its metadata it would be read as the form {found}"
    try:
        again = FORMS[form].read(value, finder, name)
    except RecordsError as error:
        return str(error).removeprefix(f"{name}: ")
    if again.images != tuple(Path(os.path.abspath(image)) for image in record.images):
        return f"its images would be read back as {shown([str(image) for image in again.images])}"
    if again.turns != record.turns:
        return f"its turns would be read back as {shown(again.turns)}"
    if again.system != record.system:
        return f"its system text would be read back as {shown(again.system)}"
    if again.metadata != record.metadata and not _is_same(again.metadata, record.metadata, container, name):
        return f"its metadata would be read back as {shown(again.metadata)}"
    return ""


def _is_same(found: Mapping[str, Any], metadata: Mapping[str, Any], container: Container, name: str) -> bool:
    """Whether a file holds metadata as well as it can: in JSON's types, in parquet without nulls, in CSV as texts."""
    if container in ("csv", "tsv"):
        cells = {key: as_cell(value, name) for key, value in metadata.items()}
        return found == {key: cell for key, cell in cells.items() if cell}
    expected = without_nulls(metadata) if container == "parquet" else metadata
    return bool(_as_json(found) == _as_json(expected))


def _as_json(value: Any) -> Any:
    """A value as JSON would give it back, but NaN as text, which equals itself."""
    return json.loads(json.dumps(value), parse_constant=str)
