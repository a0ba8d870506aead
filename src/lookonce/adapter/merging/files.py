"""Safetensors files read and written a block at a time, so that a file of any size needs no memory.

Design: blocks are read with `os.pread` and not through a memory map, whose pages would count as this process's memory.
A file is written header first, which is possible because the types and shapes of all tensors are known before. Tensors
of larger values come first, as the library sorts them, so that every tensor is aligned. A torn write leaves no file: it
is written under another name, flushed and renamed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lookonce.cache.format import PARSE_ERRORS
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.cache.store.shards import read_header
from lookonce.errors import ModelError, explain_os_error
from lookonce.files import atomic_write

BLOCK_BYTES = 1 << 22
"""What is copied at once."""
FLOATING = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""The types of numbers that LoRA can be added to, by their names in a header."""
CODES = {dtype: code for code, dtype in FLOATING.items()}
METADATA = "__metadata__"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, or one to be written."""

    name: str
    code: str
    """The name of its type in the header."""
    shape: tuple[int, ...]
    num_bytes: int
    offset: int = 0
    """Where its bytes begin in the file."""

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def value_bytes(self) -> int:
        return self.num_bytes // max(self.num_values, 1)

    def in_type(self, dtype: torch.dtype) -> Stored:
        """The same tensor with values of another type."""
        return Stored(self.name, CODES[dtype], self.shape, self.num_values * dtype.itemsize)


class TensorFile:
    """A safetensors file that is open for reading; a context manager."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: the file cannot be read, or is not whole.
        """
        self.path = path
        try:
            header, start = read_header(path)
            self.metadata: dict[str, str] = header.pop(METADATA, {})
            found = [_stored(name, about, start) for name, about in header.items()]
            self._descriptor = os.open(path, os.O_RDONLY)
        except PermissionError as error:
            raise ModelError(explain_os_error(error)) from None
        except (OSError, *PARSE_ERRORS) as error:
            raise ModelError(f"cannot read {path}: {error!r}; copy or download it again") from None
        self.tensors = {one.name: one for one in sorted(found, key=lambda one: one.offset)}
        """In the order of their bytes."""
        self._check_size(max((one.offset + one.num_bytes for one in found), default=start))

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _check_size(self, expected: int) -> None:
        if (size := os.fstat(self._descriptor).st_size) != expected:
            os.close(self._descriptor)
            raise ModelError(f"{self.path} has {size:,} of {expected:,} bytes; copy or download it again")

    def read(self, name: str, first: int = 0, num_values: int | None = None) -> torch.Tensor:
        """Some values of a tensor, flat, in the type in which they are stored; by default all.

        Raises:
            ModelError: they are no floating-point numbers, or the file ended.
        """
        one = self.tensors[name]
        num_values = one.num_values if num_values is None else num_values
        content = self._read(one.offset + first * one.value_bytes, num_values * one.value_bytes)
        return torch.frombuffer(content, dtype=FLOATING[one.code]) if content else torch.empty(0)

    def blocks(self, name: str) -> Iterator[bytearray]:
        """The bytes of a tensor."""
        one = self.tensors[name]
        for start in range(0, one.num_bytes, BLOCK_BYTES):
            yield self._read(one.offset + start, min(BLOCK_BYTES, one.num_bytes - start))

    def _read(self, offset: int, num_bytes: int) -> bytearray:
        content, done = bytearray(num_bytes), 0
        while done < num_bytes:
            got = os.preadv(self._descriptor, [memoryview(content)[done:]], offset + done)
            if not got:
                raise ModelError(f"{self.path} became shorter while it was read; run the same command again")
            done += got
        return content


def _stored(name: str, about: Mapping[str, Any], start: int) -> Stored:
    begin, end = about["data_offsets"]
    return Stored(name, about["dtype"], tuple(about["shape"]), end - begin, start + begin)


Content = Callable[[Stored], Iterable[bytes | bytearray | memoryview]]
"""The bytes of a tensor, in blocks."""


def write_tensors(path: Path, tensors: Sequence[Stored], metadata: Mapping[str, str], content: Content) -> None:
    """Write a safetensors file atomically, one block after another."""
    tensors = sorted(tensors, key=lambda one: -one.value_bytes)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(_header(tensors, metadata))
        for one in tensors:
            written = sum(file.write(block) for block in content(one))
            assert written == one.num_bytes, one.name


def _header(tensors: Iterable[Stored], metadata: Mapping[str, str]) -> bytes:
    """The length of the JSON, then the JSON, padded with blanks to a multiple of 8 bytes."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for one in tensors:
        header[one.name] = {
            "dtype": one.code,
            "shape": list(one.shape),
            "data_offsets": [end, end := end + one.num_bytes],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def as_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a tensor's values."""
    return raw_bytes(values)
