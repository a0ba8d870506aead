"""Atomic file writes: after a crash or on a full disk there is either the old file or the new one.

Design: a file is written under a unique temporary name in its own folder, flushed to the disk and renamed, and then the
folder is flushed, so a name never leads to half a file even after a power cut: two fsyncs, a few milliseconds. File
modes follow the umask, because safetensors 0.8 writes 0600, which colleagues on a cluster cannot read
(https://github.com/safetensors/safetensors/issues/782).

What others may have written is read whole only if it is a file, not a device or a FIFO, and has a bounded size, so a
hostile folder cannot make a command wait or fill the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from os import open as open_descriptor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from lookonce.environment import machine
from lookonce.errors import FULL, REFUSALS, LookonceError, NoRoom, system_code
from lookonce.errors import TEMPORARY_MARK as TEMPORARY_MARK
from lookonce.text import size

MAX_JSON_BYTES = 1 << 26
"""The most bytes of a JSON file, where its reader has no other limit. Trainer's state has a few million."""
SCRATCH = "lookonce-"
"""The prefix of the names of scratch folders."""


@contextlib.contextmanager
def atomic_write(path: Path, num_bytes: int = 0, *, flushes: bool = True, replaces: bool = True) -> Iterator[Path]:
    """A temporary path to write to; it is renamed to `path` on success and removed on an error.

    `num_bytes` is the size of the file, if it is known before. Without `flushes` a power cut may leave part of a file.
    If it `replaces` no file, one at `path` is a FileExistsError.

    Raises:
        NoRoom: the disk is full.
    """
    temporary = temporary_name(path)
    try:
        with naming_full_disk(path, num_bytes, temporary):
            yield temporary
            follow_umask(temporary)
            if flushes:
                flush(temporary)
            (os.replace if replaces else os.link)(temporary, path)
            if flushes:
                flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming_full_disk(path: Path, num_bytes: int = 0, temporary: Path | None = None) -> Iterator[None]:
    """Within the block, a full disk is an error that names `path`, of which `num_bytes` are written to `temporary`.

    The system's own error names no file, and those of libraries are of other types.

    Raises:
        NoRoom: the disk is full.
        OSError: the system refuses to write, and a library has raised an error of its own.
    """
    try:
        yield
    except (LookonceError, NoRoom):
        raise
    except Exception as error:
        if (code := system_code(error)) not in FULL:
            if code in REFUSALS and not isinstance(error, OSError):
                raise OSError(code, os.strerror(code), str(path)) from error
            raise
        needed = size(num_bytes) if num_bytes else ""
        if temporary and not num_bytes:
            with contextlib.suppress(OSError):
                written = sum(file.stat().st_size for file in (temporary, *temporary.rglob("*")) if file.is_file())
                needed = f"more than {size(written)}"
        raise NoRoom(code, path, needed) from error


def files_below(folder: Path) -> Iterator[Path]:
    """The files in a folder and its subfolders, through links, each folder once; hidden names are left out."""
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process on any machine chooses."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{writer_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def writer_host() -> str:
    """This host in temporary names, with a checksum that tells machines and containers of one name apart."""
    return f"{socket.gethostname()}.{xxhash.xxh3_64_hexdigest(machine().encode())[:8]}"


@contextlib.contextmanager
def scratch_folder(parent: Path, purpose: str) -> Iterator[Path]:
    """A temporary folder below `parent`, removed on leaving the context.

    Its name identifies the process, so `cache gc` recognises what a killed one left.
    """
    prefix = f"{SCRATCH}{purpose}{TEMPORARY_MARK}{writer_host()}-{os.getpid()}-"
    with naming_full_disk(parent), tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        yield Path(folder)


def create_text(path: Path, text: str) -> bool:
    """Create `path` with `text`; False if it exists. Of several processes that try, exactly one succeeds.

    The file is a hard link to a finished temporary one, so it appears whole or not at all, on network filesystems too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode("utf-8")
    try:
        with atomic_write(path, len(data), replaces=False) as temporary:
            temporary.write_bytes(data)
    except FileExistsError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode("utf-8")
    with atomic_write(path, len(data)) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically, making its folder."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_limited(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a file of at most `max_bytes`.

    Raises:
        ValueError: it is larger, or a device or a FIFO, which might never end.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


def open_regular(path: Path) -> BinaryIO:
    """An opened file; raises ValueError for a device or a FIFO, opening which could wait forever."""
    file = open(path, "rb", opener=lambda name, flags: open_descriptor(name, flags | os.O_NONBLOCK))
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError(f"{path} is a FIFO or a device; expected a file")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file; the arguments and errors are those of `read_limited`."""
    return parse_json(read_limited(path, max_bytes).decode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises ValueError if it is not JSON, or is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is absent, damaged, or holds something else."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def hash_file(path: Path) -> str:
    """The xxh3 of a whole file, 32 hexadecimal digits; raises ValueError for a device or a FIFO."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def follow_umask(path: Path) -> None:
    """Set the mode of a file, or of all files below a folder, to what the umask allows."""
    umask = _umask()
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def _umask() -> int:
    """The umask, read where possible without setting it, which would affect files that other threads create."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Umask:")), 8)
    umask = os.umask(0)
    os.umask(umask)
    return umask


def is_full(error: OSError) -> bool:
    """Whether the error means no space left: on the disk, in the quota, or below the file size limit."""
    return error.errno in FULL


def flush_files(folder: Path) -> None:
    """Wait until all files below a folder, and their names, are on the disk."""
    for path in (folder, *folder.rglob("*")):
        flush(path)


def flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


NUM_THREADS = 8
"""For reading, hashing and checksums, which release Python's lock."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def threaded_map(
    function: Callable[[Item], Result], items: Iterable[Item], stop: threading.Event | None = None
) -> Iterator[Result]:
    """The result of `function` for each item, in order; at most about 2 * `NUM_THREADS` are computed ahead.

    `stop` is set after a failure or Ctrl-C, before running calls are waited for, so that `function` can end them early.
    """
    waiting: deque[Future[Result]] = deque()
    threads = ThreadPoolExecutor(NUM_THREADS)
    try:
        for item in items:
            waiting.append(threads.submit(function, item))
            if len(waiting) > 2 * NUM_THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BaseException:
        if stop:
            stop.set()
        raise
    finally:
        threads.shutdown(cancel_futures=True)
