"""Hashes of a model folder's content, by which a run recognises the model that it was trained on.

Design: a fingerprint covers the vision tower, so training hashes all but the tower, whose tensors it never reads. The
weights are read once for that, several files at a time; loading them afterwards is served from the page cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from lookonce.errors import ModelError
from lookonce.families.lookup import family_in
from lookonce.files import hash_file
from lookonce.hub import FILES
from lookonce.threads import threaded_map

LEN_SIZE = 8
"""A safetensors file begins with the length of its header, in that many bytes."""
BLOCK_BYTES = 1 << 24


def hash_model(folder: Path) -> str:
    """The xxh3 over the names and bytes of all files of a model: weights, configurations, tokenizer."""
    return _hash(folder, hash_file)


def hash_language_model(folder: Path) -> str:
    """The xxh3 over a model's files without the tensors of its vision tower.

    Raises:
        ModelError: a file of weights is broken, or the model's family is not known.
    """
    tower = family_in(folder).tower_prefixes
    return _hash(folder, lambda path: _hash_weights(path, tower) if path.suffix == ".safetensors" else hash_file(path))


def _hash(folder: Path, hash_one: Callable[[Path], str]) -> str:
    digest = xxhash.xxh3_128()
    paths = sorted({path for pattern in FILES for path in folder.glob(pattern)})
    for path, found in zip(paths, threaded_map(hash_one, paths), strict=True):
        digest.update(f"{path.name} {found}\n".encode())
    return digest.hexdigest()


def _hash_weights(path: Path, without: tuple[str, ...]) -> str:
    """The xxh3 over names, types, shapes and bytes of a file's tensors whose names do not begin with `without`."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        start, tensors = _read_header(path, file)
        for name, tensor in tensors:
            if name.startswith(without):
                continue
            digest.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode())
            begin, end = tensor["data_offsets"]
            for block in _blocks(file, start + begin, end - begin):
                digest.update(block)
    return digest.hexdigest()


def _read_header(path: Path, file: Any) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    """Where the data begins, and the tensors in the order of their data."""
    try:
        length = int.from_bytes(file.read(LEN_SIZE), "little")
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        tensors = [(name, value) for name, value in header.items() if name != "__metadata__"]
        return LEN_SIZE + length, sorted(tensors, key=lambda tensor: tensor[1]["data_offsets"])
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
        raise ModelError(f"cannot read {path}: {error!r}; copy or download it again") from None


def _blocks(file: Any, offset: int, num_bytes: int) -> Iterator[bytes]:
    file.seek(offset)
    while num_bytes > 0 and (block := file.read(min(BLOCK_BYTES, num_bytes))):
        num_bytes -= len(block)
        yield block
