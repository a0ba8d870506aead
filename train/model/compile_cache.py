"""Compiled code that is kept for later processes, in a folder that processes on all machines may share.

Design: what torch.compile made or used in a process, as `torch.compiler.save_cache_artifacts` gives it, is one file.
Its name begins with a hash of the GPU, the versions and the model, by which others are not read, and ends with the
checksum of its content, by which a damaged one is found and removed. Within a file PyTorch finds code by the graph, the
GPU, the settings and its own source, so code that does not fit is not found. A file gets its name when it is whole, and
is never changed, so any number of processes can write. PyTorch's own folder (TORCHINDUCTOR_CACHE_DIR) has no checksums;
it is left where it is, by default on the machine's own disk, and gets what the files have.

The cost: each file has all that its process used, some megabytes, also what others have. The newest files are kept.
They hold pickled objects and machine code, so those of other users, or that others may write to, are not read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import xxhash
from torch._dynamo.utils import counters

from lookonce.environment import device_name, library_version
from lookonce.files import atomic_write, open_regular
from lookonce.text import Notify, first_line, size

SUFFIX = ".compiled"
MAX_FILES = 64
"""Number of files that are kept in a folder."""
CACHE_COUNTERS = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
"""PyTorch's counters of graphs that were found, not found, and not looked up."""


class CompileCache:
    """The compiled code of one model on one kind of GPU, with one set of versions."""

    def __init__(self, folder: Path, model_config: Path, notify: Notify) -> None:
        """`model_config` is the model's configuration file."""
        self._folder, self._notify = folder, notify
        about = (device_name(), torch.__version__, torch.version.cuda, library_version("triton"))
        self._prefix = xxhash.xxh3_64_hexdigest(repr(about).encode() + model_config.read_bytes())
        self._loaded: set[str] = set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Use what is kept within the block, and then keep what is new."""
        self.load()
        yield
        self.save()

    def load(self) -> None:
        """Give the compiler what earlier processes have kept; a file that cannot be used is said and left out."""
        for path in self._folder.glob(f"{self._prefix}-*{SUFFIX}"):
            try:
                self._load(path)
            except FileNotFoundError:  # another process has removed it
                continue
            except Exception as error:  # of PyTorch, whose code for this must not end a training
                self._notify(f"cannot use {path} ({first_line(error)}); compiling what it has")

    def _load(self, path: Path) -> None:
        with open_regular(path) as file:
            if not _is_only_ours(os.fstat(file.fileno())):
                return
            content = file.read()
        if path != self._path(content):
            path.unlink()
            self._notify(f"removed {path}, which is damaged; compiling what it had")
        elif found := torch.compiler.load_cache_artifacts(content):
            self._loaded |= names_of(found.artifacts.values())

    def save(self) -> None:
        """Keep what the compiler has made or used, unless all of it was loaded; says how many graphs were found."""
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            return
        content, made = saved
        hits, *others = (counters["aot_autograd"][name] for name in CACHE_COUNTERS)
        self._notify(f"compiled graphs: {hits + sum(others)}, {hits} of them from earlier processes")
        if names_of(made.artifacts.values()) <= self._loaded:
            return
        try:
            self._write(content)
        except OSError as error:
            self._notify(f"compiled code is not kept in {self._folder} ({error.strerror}); see train.compile_cache")

    def _write(self, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path(content)) as temporary:
            temporary.write_bytes(content)
        path = self._path(content)
        path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))  # else it would not be read
        self._notify(f"kept {size(len(content))} of compiled code in {self._folder}")
        with contextlib.suppress(FileNotFoundError):  # another process removes them too
            everything = self._folder.glob(f"*{SUFFIX}*")  # also what killed processes left
            newest = sorted(everything, key=lambda path: -path.stat().st_mtime)
            for path in newest[MAX_FILES:]:
                path.unlink()

    def _path(self, content: bytes) -> Path:
        return self._folder / f"{self._prefix}-{xxhash.xxh3_128_hexdigest(content)}{SUFFIX}"


def _is_only_ours(found: os.stat_result) -> bool:
    """Whether a file belongs to this user and no other user may write to it."""
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def names_of(artifacts: Iterable[Iterable[str]]) -> set[str]:
    """The keys of artifacts of all types, which are hashes."""
    return {key for keys in artifacts for key in keys}
