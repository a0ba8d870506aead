"""Tar files, parquet files and records of every format, damaged: each is read, or refused in our words."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from random import Random

import pyarrow as pa
from pyarrow import parquet
from support.fuzzing import cases, mutations

from lookonce.datasets.archives import read_members
from lookonce.datasets.images import index_images
from lookonce.datasets.prepare.definition import find_definition
from lookonce.datasets.prepare.sources import find_source
from lookonce.datasets.records import RecordsFile
from lookonce.errors import ImageError

KINDS = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
NAMES = ("a.jpg", "a.json", "e" * 120 + "/" + "b" * 90 + ".jpg", "../../x.jpg", "/etc/passwd", "c.png")
KVASIR = find_definition("kvasir-vqa")
JSON = b'{"question": "Why?", "answer": "so", "img_id": "a"}'


def tar(random: Random, format: int) -> bytes:
    target, long = io.BytesIO(), 90 if format == tarfile.USTAR_FORMAT else 300
    with tarfile.open(fileobj=target, mode="w", format=format) as file:
        for name in (*NAMES, "n" * long):
            member = tarfile.TarInfo(name)
            member.type = random.choice((tarfile.REGTYPE, tarfile.REGTYPE, *KINDS))
            member.linkname = random.choice(("", "a.jpg", "/etc/passwd", "x" * long))
            content = JSON if name.endswith("json") else b"image"
            member.size = len(content) if member.isreg() else 0
            member.pax_headers = {"comment": "x" * random.choice((0, 9, 600))} if format == tarfile.PAX_FORMAT else {}
            file.addfile(member, io.BytesIO(content))
    return target.getvalue()


def make_tar(random: Random) -> bytes:
    content = tar(random, random.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT)))
    if random.random() < 0.7:
        content = _headers_damaged(content, random)
    return mutations.damaged(content, random) if random.random() < 0.6 else content


def _headers_damaged(content: bytes, random: Random) -> bytes:
    """Other values in fields of headers, each with the checksum that fits, else Python stops at the header."""
    changed = bytearray(content)
    for start in range(0, len(changed) - 511, 512):
        if changed[start + 257 : start + 262] != b"ustar" or random.random() < 0.5:
            continue
        field, width = random.choice(
            ((0, 100), (124, 12), (124, 12), (136, 12), (156, 1), (156, 1), (157, 100), (345, 155))
        )
        new = random.choice(
            (b"7777777777", b"-1", b"\x80" + b"\0" * 3 + b"\xff" * 8, b"\xff" * 12, b"xgLKSXV3"[random.randrange(8) :])
        )
        changed[start + field : start + field + width] = new[:width].ljust(width, b"\0")
        changed[start + 148 : start + 156] = b" " * 8
        changed[start + 148 : start + 156] = b"%06o\0 " % sum(changed[start : start + 512])
    return bytes(changed)


def read_tar(path: Path) -> None:
    found = dict(read_members(path, [path / name for name in (*NAMES, "none") if name[0] != "/"]))
    assert all(isinstance(data, bytes) or str(data) for data in found.values())
    if isinstance(error := found[path / "a.jpg"], ImageError):
        raise error


def test_damaged_tar_files_are_read_or_refused(tmp_path):
    assert cases.fuzz("tar", make_tar, read_tar, tmp_path / "x.tar").holds


def parquet_files() -> list[bytes]:
    image = pa.array([{"bytes": b"image", "path": f"{n}.png"} for n in range(20)])
    texts = {"question": [f"Why {n % 3}?" for n in range(20)], "answer": ["so"] * 20, "stage": range(20)}
    turns = pa.array([[{"question": "Why?", "answer": "so"}] * 3] * 20)
    tables = [
        pa.table({"image": image, **texts}),
        pa.table({"images": [["a.png"]] * 20, "turns": turns, "metadata": ['{"a": [1]}'] * 20}),
        pa.table({"pixels": [b"image"] * 20}),
    ]
    files = []
    for table in tables:
        for compression in ("none", "snappy", "zstd", "gzip"):
            target = io.BytesIO()
            parquet.write_table(table, target, compression=compression, row_group_size=7, data_page_version="2.0")
            files.append(target.getvalue())
    return files


def make_parquet(files: list[bytes], random: Random) -> bytes:
    """Mostly of the same length, since a parquet file is read from its end."""
    content = random.choice(files)
    if random.random() < 0.3:
        return mutations.damaged(content, random)
    return random.choice((mutations.flip, mutations.number))(content, random)[: len(content)]


def read_parquet(path: Path) -> None:
    broken = []
    for _, data in read_members(path, [path / name for name in ("0", "19", "none")]):
        assert isinstance(data, bytes) or str(data)
    records = RecordsFile(path, broken=lambda origin, error: broken.append(error))
    cases.each(lambda: records, lambda: find_source(path, KVASIR).rows(KVASIR))


def test_damaged_parquet_files_are_read_or_refused(tmp_path):
    files = parquet_files()
    assert cases.fuzz("parquet", lambda random: make_parquet(files, random), read_parquet, tmp_path / "x.parquet").holds


TURN = {"question": "Is there text?", "answer": "yes"}
CHAT = [{"role": "user", "content": "<image>Is there text?"}, {"role": "assistant", "content": "yes"}]
PARTS = [{"type": "image"}, {"type": "text", "text": "Is there text?"}]
ROWS = (
    {
        "images": ["a.png", "b.tar/c.png"],
        "turns": [TURN, TURN],
        "system": "Be brief.",
        "metadata": {"stage": 1, "x": None},
    },
    {"image_filename": "a.png", **TURN, "stage": 1},
    {
        "id": "1",
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhy?"}, {"from": "gpt", "value": "No."}],
    },
    {"messages": CHAT, "images": ["a.png"]},
    {"messages": [{"role": "user", "content": PARTS}, CHAT[1]], "images": ["a.png"]},
    {"instruction": "Is there text?", "input": "", "output": "yes", "images": ["a.png"], "history": []},
)
CSV = b'image_filename,question,answer,stage\na.png,"Is there, ""now"", text?",yes,1\nb.png,Why?,no,2\n'


def make_records(random: Random) -> bytes:
    if random.random() < 0.15:
        return mutations.damaged(CSV, random)
    row = random.choice(ROWS)
    rows = [mutations.several(row, random) for _ in range(random.choice((1, 1, 3)))]
    if random.random() < 0.3:
        return mutations.as_json(rows, random)
    return b"\n".join(mutations.as_json(one, random) for one in rows)


def read_records(path: Path) -> None:
    broken = []
    file = RecordsFile(path, path.parent, broken=lambda origin, error: broken.append(error))
    index_images(list(file), needs_one=False)
    path.rename(table := path.with_suffix(".csv"))
    cases.each(lambda: RecordsFile(table))


def test_damaged_records_are_read_or_refused(tmp_path):
    assert cases.fuzz("records", make_records, read_records, tmp_path / "records.jsonl").holds
