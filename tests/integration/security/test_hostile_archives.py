"""Archives and images that are small and claim to be large, or lead elsewhere: refused at once and in little memory."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from support.fuzzing.cases import memory_mb, reset_peak

from lookonce.cache.format import read_header
from lookonce.cache.model.pixels import decode
from lookonce.datasets.archives import read_members
from lookonce.datasets.images import read_bytes
from lookonce.datasets.records import RecordsFile, read_records
from lookonce.errors import BadImage, ImageError, RecordsError

pytestmark = pytest.mark.guarantee(
    "A damaged or hostile file is read, or refused with an error message, in bounded time and memory."
)

HUGE = 1 << 36


@contextmanager
def bounded(megabytes: int = 100, seconds: float = 5.0) -> Iterator[None]:
    before, began = reset_peak(), time.perf_counter()
    yield
    assert (time.perf_counter() - began < seconds, memory_mb("VmHWM") - before < megabytes) == (True, True)


def reason(archive: Path, name: str = "a.jpg") -> str:
    with bounded():
        [(_, found)] = read_members(archive, [archive / name])
    assert isinstance(found, ImageError), f"{len(found)} bytes were read"
    return str(found)


def member(name: str = "a.jpg", **fields: object) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(found, field, value)
    return found


def blocks(*headers: tarfile.TarInfo, format: int = tarfile.GNU_FORMAT) -> bytes:
    return b"".join(header.tobuf(format) for header in headers)


def test_a_compressed_tar_file_is_not_decompressed(tmp_path):
    with gzip.open(tmp_path / "x.tar", "wb", compresslevel=9) as file:
        file.write(blocks(member(size=300_000_000)))
        for _ in range(300):
            file.write(b"\0" * 1_000_000)
    assert (tmp_path / "x.tar").stat().st_size < 1_000_000
    assert "it is compressed; decompress it once, with `gunzip`" in reason(tmp_path / "x.tar")


def test_a_member_is_as_long_as_the_file_at_most(tmp_path):
    (tmp_path / "x.tar").write_bytes(blocks(member(size=HUGE)) + b"few")
    assert "unexpected end of data" in reason(tmp_path / "x.tar")
    with (tmp_path / "y.tar").open("wb") as file:
        file.write(blocks(member(size=HUGE)))
        file.truncate(2 * HUGE)  # takes no place on the disk
    assert "'a.jpg' has 68,719,476,736 bytes; the limit is" in reason(tmp_path / "y.tar")


def test_sparse_members_are_refused(tmp_path):
    (tmp_path / "x.tar").write_bytes(blocks(member(size=512, type=tarfile.GNUTYPE_SPARSE)) + b"\0" * 1024)
    assert "sparse member" in reason(tmp_path / "x.tar")
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(HUGE)}
    headers = blocks(member(size=512, pax_headers=pax), format=tarfile.PAX_FORMAT)
    (tmp_path / "y.tar").write_bytes(headers + b"\0" * 1024)
    assert "that no archive of images has" in reason(tmp_path / "y.tar")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_long_headers_are_refused(tmp_path, kind):
    with (tmp_path / "x.tar").open("wb") as file:
        file.write(blocks(member(size=1 << 32, type=kind)))
        file.truncate(1 << 33)
    assert "it has a header of 4,294,967,296 bytes" in reason(tmp_path / "x.tar")


def test_a_header_of_digits_takes_no_time(tmp_path):
    """Python 3.11.7 looks for a character set in it for as many steps as the square of its length."""
    digits = b"1" * 1_000_000
    (tmp_path / "x.tar").write_bytes(blocks(member(size=len(digits), type=tarfile.XHDTYPE)) + digits)
    assert "that no archive of images has" in reason(tmp_path / "x.tar")


def test_a_tar_file_cannot_lead_backwards(tmp_path):
    """By a negative size, with which Python would read the same header without end."""
    header = bytearray(blocks(member(size=0)))
    header[124:136] = b"\xff" * 10 + b"\xfc\x00"  # -1024
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "x.tar").write_bytes(bytes(header) * 3)
    assert "cut off or damaged" in reason(tmp_path / "x.tar", "none.jpg")


def test_links_and_names_in_a_tar_file_lead_nowhere(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    kinds = {"a.jpg": tarfile.SYMTYPE, "b.jpg": tarfile.LNKTYPE}
    links = [member(name, type=kind, linkname=str(tmp_path / "secret")) for name, kind in kinds.items()]
    escape = member("../secret", size=3)
    (tmp_path / "x.tar").write_bytes(blocks(*links, escape) + b"new".ljust(512, b"\0") + b"\0" * 1024)
    for name in ("a.jpg", "b.jpg"):
        assert "no such member" in reason(tmp_path / "x.tar", name)
    for path in (tmp_path / "x.tar" / ".." / "secret", tmp_path / "x.tar" / "../../etc/passwd"):
        with pytest.raises(ImageError, match="leads out of the image root"):
            read_bytes(path)
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_a_text_that_many_rows_share_is_not_written_out(tmp_path):
    """A file of a thousand bytes with 1,024 texts of four megabytes."""
    rows = pa.array([0] * 1024, pa.int32())
    texts = {
        name: pa.DictionaryArray.from_arrays(rows, pa.array([text]))
        for name, text in {"image": "a.png", "question": "x" * 4_000_000, "answer": "y"}.items()
    }
    parquet.write_table(pa.table(texts), tmp_path / "x.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "x.parquet").stat().st_size < 3000
    with bounded(megabytes=1500, seconds=60):
        next(iter(RecordsFile(tmp_path / "x.parquet")))


def test_a_row_of_many_empty_values_is_refused(tmp_path):
    values = pa.array([[None] * 20_000_000], pa.list_(pa.int8()))
    table = pa.table({"images": [["a.png"]], "turns": values})
    parquet.write_table(table, tmp_path / "x.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "x.parquet").stat().st_size < 3000
    with bounded(megabytes=600), pytest.raises(RecordsError, match=r"cannot read .*16,777,216 values"):
        read_records(tmp_path / "x.parquet")


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.json"])
def test_a_file_of_nothing_but_zeros_is_not_read_as_a_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr("lookonce.datasets.text_files.MAX_LINE_BYTES", 1 << 20)
    with (path := tmp_path / name).open("wb") as file:
        file.write({"x.json": b"[", "x.csv": b"image,question,answer\n"}.get(name, b"") + b" " * 4096)
        file.truncate(1 << 42)
    with bounded(), pytest.raises(RecordsError, match="longer than 1,048,576 bytes|expected at most"):
        read_records(path)


def test_deep_json_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"turns": ' + "[" * 200_000)
    with bounded(), pytest.raises(RecordsError, match="not JSON that can be read"):
        read_records(tmp_path / "x.jsonl")


def test_a_header_cannot_ask_for_more_than_safetensors_allows(tmp_path):
    (tmp_path / "x").write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(tmp_path / "x", 1 << 42)
    with bounded(), pytest.raises(ValueError, match="its header claims 1,099,511,627,776 bytes"):
        read_header(tmp_path / "x")


def test_an_image_of_too_many_pixels_is_not_decoded():
    target = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(target, "PNG")
    assert len(target.getvalue()) < 100_000
    with bounded(), pytest.raises(BadImage, match="exceeds limit"):
        decode(target.getvalue(), Path("a.png"))
