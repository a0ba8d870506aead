"""Writing files so that a crash, a full disk or a colleague's account finds either the old file or the new one.

Every file is written under a unique temporary name in its own folder, flushed to the disk, renamed, and the folder
flushed: after a power cut a name never points at half a file. Modes follow the umask, because safetensors 0.8 writes
0600, which colleagues on a cluster can not read (https://github.com/safetensors/safetensors/issues/782). The cost is
two fsyncs a file, some milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

TEMPORARY_MARK = ".tmp-"


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on leaving without an error it becomes `path`, else it is removed."""
    temporary = path.with_name(
        f"{path.name}{TEMPORARY_MARK}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    )
    try:
        yield temporary
        follow_umask(temporary)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically, making its folder."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def hash_file(path: Path) -> str:
    """The xxh3 of a whole file, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def follow_umask(path: Path) -> None:
    """Give a file, or all files below a folder, the mode that the umask asks for."""
    umask = os.umask(0)
    os.umask(umask)
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
