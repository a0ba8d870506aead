"""Writing files so that a crash, a full disk or a colleague's account finds either the old file or the new one.

Every file is written under a unique temporary name in its own folder, flushed to the disk, renamed, and the folder
flushed: after a power cut a name never points at half a file. Modes follow the umask, because safetensors 0.8 writes
0600, which colleagues on a cluster can not read (https://github.com/safetensors/safetensors/issues/782). The cost is
two fsyncs a file, some milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from lookonce.environment import machine

TEMPORARY_MARK = ".tmp-"
SCRATCH = "lookonce-"
"""What the names of scratch folders begin with."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on leaving without an error it becomes `path`, else it is removed."""
    temporary = temporary_name(path)
    try:
        yield temporary
        follow_umask(temporary)
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process or machine chooses."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{writer_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def writer_host() -> str:
    """This host in temporary names, told from others that have its name or share it with containers."""
    return f"{socket.gethostname()}.{xxhash.xxh3_64_hexdigest(machine().encode())[:8]}"


@contextlib.contextmanager
def scratch_folder(place: Path, purpose: str) -> Iterator[Path]:
    """A folder below `place` for as long as this lasts.

    Its name says whose it is, so that `cache gc` finds what a killed process left.
    """
    prefix = f"{SCRATCH}{purpose}{TEMPORARY_MARK}{writer_host()}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as folder:
        yield Path(folder)


def create_text(path: Path, text: str) -> bool:
    """Write `text` to `path` unless there is such a file; of several processes that try, one is told True.

    A hard link from a finished temporary file: it appears whole or not at all, on network filesystems too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        follow_umask(temporary)
        flush(temporary)
        os.link(temporary, path)
        flush(path.parent)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


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
    umask = _umask()
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def _umask() -> int:
    """This process's, without setting it for a moment, which would show in what other threads write meanwhile."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Umask:")), 8)
    umask = os.umask(0)
    os.umask(umask)
    return umask


def is_full(error: OSError) -> bool:
    """Whether it says that there is no room: on the disk, in the quota, or below the limit on a file's size."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
