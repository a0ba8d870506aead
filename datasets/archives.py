"""Images inside of archives: tar files, and parquet files in which they are embedded.

An image's path may lead into an archive:

    /data/frames-000.tar/polyp/a.jpg    the member polyp/a.jpg of a tar file
    /data/train-0000.parquet/17         row 17, counted from 0
    /data/train-0000.parquet/a.jpg      the row whose image is named a.jpg

In a parquet file images are a struct column with `bytes` and `path`, as Hugging Face's Image feature writes it, or a
plain binary column. Where a name occurs twice, the first is meant. A folder that is called `x.tar` is a folder.

Design: an archive is streamed through once, by webdataset and by pyarrow, and only what is wanted is kept. It is not
unpacked, and no table of its members is stored that could be wrong. The cost: a tar file is read from its beginning to
the last member wanted, each time that members are asked for, about half a second a gigabyte that the system still has
in memory; so ask for many at once. Parquet skips row groups in which nothing is wanted, and takes two to three times
the memory of one row group. Compressed tar files are refused: they would be decompressed from the beginning each time,
and images hardly shrink.

Both libraries take long to import and are imported when the first such archive is met.
"""

from __future__ import annotations

import os
import posixpath
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from lookonce.errors import ImageError

ARCHIVE = re.compile(r"[^/]\.(?:tar|tar\.gz|tgz|parquet)(?=/)", re.IGNORECASE)
"""Ends where a folder of a path has the name of an archive."""
ROW = re.compile(r"0|[1-9][0-9]{0,17}")
"""A row number; `007` is a name."""
BUFFER_BYTES = 1 << 20
IMAGE_ROWS = 8
PATH_ROWS = 1024
"""Rows of a parquet file that are decoded at once."""


def find_archive(path: Path, is_file: Callable[[str], bool] = os.path.isfile) -> Path | None:
    """The archive that a path leads into, or None if it leads into none.

    The disk is not asked about a path that leads out of the image root.
    """
    name = str(path)
    ends = [match.end() for match in ARCHIVE.finditer(name)]
    if not ends or leads_out(path):
        return None
    return next((Path(name[:end]) for end in ends if is_file(name[:end])), None)


def by_archive(paths: Iterable[Path]) -> tuple[list[Path], dict[Path, list[Path]]]:
    """Single files, and the members of each archive; paths that occur twice once, all in the order given."""
    is_file = cache(os.path.isfile)
    files: list[Path] = []
    members_of: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        archive = find_archive(path, is_file)
        (files if archive is None else members_of.setdefault(archive, [])).append(path)
    return files, members_of


def leads_out(path: Path) -> bool:
    """Whether a record's image lies outside of the image root: then, and only then, its path keeps `..` parts."""
    return os.pardir in path.parts


def unreadable(path: Path, reason: str) -> ImageError:
    """The error for an image that gives no bytes; what can not be printed of its name is shown with escapes."""
    message = f"can not read image {path}: {reason}"
    return ImageError("".join(char if char.isprintable() else ascii(char)[1:-1] for char in message))


def read_members(archive: Path, paths: Iterable[Path]) -> Iterator[tuple[Path, bytes | ImageError]]:
    """The bytes of some members of an archive, in their order in it, then the errors of those that can not be had."""
    waiting = {path.relative_to(archive).as_posix(): path for path in paths}
    reason = "the archive has no such member, or is cut short before it"
    try:
        with closing(_open(archive, waiting.keys())) as members:
            for name, data in members:
                path = waiting.pop(name)
                yield path, data if isinstance(data, bytes) else unreadable(path, data)
                if not waiting:
                    return
    except ImageError as error:
        reason = str(error)
    except ImportError:  # the installation is damaged, and not the archive
        raise
    except Exception as error:  # what tarfile, zlib and pyarrow raise for damaged files has no base of its own
        reason = _damage(error)
    for path in waiting.values():
        yield path, unreadable(path, reason)


def _open(archive: Path, wanted: Collection[str]) -> Any:
    """A generator of names in `wanted` and their bytes, or the reason why there are none."""
    suffix = archive.suffix.lower()
    if suffix in (".gz", ".tgz"):
        raise ImageError(f"compressed tar files are not read; decompress it once, with `gunzip {archive}`")
    return _read_parquet(archive, wanted) if suffix == ".parquet" else _read_tar(archive, wanted)


def _damage(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"the archive can not be read ({error.strerror})"
    text = str(error).partition(" @ <")[0]  # webdataset adds the repr of the open file
    return f"the archive is cut short or damaged ({text.partition(chr(10))[0] or type(error).__name__})"


def _normal(name: str) -> str:
    """A member's name as it ends a path; `tar` itself writes `./a.jpg`."""
    return posixpath.normpath(name).lstrip("/")


def _read_tar(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    from webdataset.tariterators import tar_file_iterator

    with archive.open("rb", buffering=BUFFER_BYTES) as file:
        for member in tar_file_iterator(file, skip_meta=None, select_files=lambda name: _normal(name) in wanted):
            yield _normal(member["fname"]), member["data"]


def _read_parquet(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, bytes | str]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(archive, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        bytes_column, path_column = image_columns(file.schema_arrow)
        rows = _find_rows(file, path_column, wanted)
        for group, names_of in _by_row_group(file, rows):
            try:
                for row, value in enumerate(_values(file, bytes_column, IMAGE_ROWS, [group])):
                    for name in names_of.pop(row, ()):
                        yield name, _image_bytes(value.as_py())
                    if not names_of:
                        break
            except Exception as error:  # as in `read_members`; the other row groups may be sound
                yield from ((name, _damage(error)) for names in names_of.values() for name in names)


def image_columns(schema: Any) -> tuple[str, str | None]:
    """The columns with the bytes of the images and, where there is one, with their paths.

    Raises:
        ImageError: there is none, or there are several and none is called `image`.
    """
    from pyarrow import types

    structs = {field.name: field.type for field in schema if types.is_struct(field.type)}
    structs = {name: kind for name, kind in structs.items() if kind.get_field_index("bytes") >= 0}
    plain = [field.name for field in schema if types.is_binary(field.type) or types.is_large_binary(field.type)]
    columns = list(structs) or plain
    name = "image" if "image" in columns else columns[0] if len(columns) == 1 else None
    if name is None:
        raise ImageError(
            "the archive must have one column of images (a struct with `bytes`, or binary), or one of that kind that "
            f"is called `image`; its columns are {schema.names}"
        )
    if name not in structs:
        return name, None
    return f"{name}.bytes", f"{name}.path" if structs[name].get_field_index("path") >= 0 else None


def _find_rows(file: Any, path_column: str | None, wanted: Collection[str]) -> dict[str, int]:
    """The rows of those names that are row numbers or stand in the column of paths."""
    rows = {name: int(name) for name in wanted if ROW.fullmatch(name)}
    names = set(wanted) - rows.keys()
    if names and path_column:
        for row, value in enumerate(_values(file, path_column, PATH_ROWS)):
            name = _normal((value.as_py() or {}).get("path") or "")
            if name in names:
                rows.setdefault(name, row)
    return rows


def _by_row_group(file: Any, rows: dict[str, int]) -> list[tuple[int, dict[int, list[str]]]]:
    """The row groups in which something is wanted: for each, the names of the rows, counted from its start."""
    num_groups = file.metadata.num_row_groups
    starts = list(accumulate((file.metadata.row_group(group).num_rows for group in range(num_groups)), initial=0))
    groups: dict[int, dict[int, list[str]]] = {}
    for name, row in rows.items():
        group = bisect_right(starts, row) - 1
        if group < num_groups:
            groups.setdefault(group, {}).setdefault(row - starts[group], []).append(name)
    return sorted(groups.items())


def _values(file: Any, column: str, batch_rows: int, groups: list[int] | None = None) -> Iterator[Any]:
    """The values of a column, as pyarrow's scalars, a few rows decoded at a time."""
    for batch in file.iter_batches(batch_rows, row_groups=groups, columns=[column], use_threads=False):
        yield from batch.column(0)


def _image_bytes(value: Any) -> bytes | str:
    data = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(data, bytes):
        return data
    return "its row holds no image bytes; write the archive with the images embedded"
