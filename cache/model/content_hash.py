"""Hashes of a model folder's content, by which a run recognises the model that it was trained on.

Design: a fingerprint covers the vision tower, so training hashes all but the tower, whose tensors it never reads. The
weights are read once for that, several files at a time; loading them afterwards is served from the page cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from lookonce.cache.constants import PARSE_ERRORS
from lookonce.cache.model.tensor_header import read_tensor_header
from lookonce.errors import ModelError
from lookonce.families.lookup import family_in
from lookonce.files import hash_file
from lookonce.hub import FILES
from lookonce.text import shown
from lookonce.threads import threaded_map

BLOCK_BYTES = 1 << 24


def hash_language_model(folder: Path) -> str:
    """The xxh3 over names and bytes of a model's files: weights without the vision tower, configurations, tokenizer.

    Raises:
        ModelError: a file of weights is broken, or the model's family is not known.
    """
    tower, digest = family_in(folder).tower_prefixes, xxhash.xxh3_128()

    def hash_one(path: Path) -> str:
        return _hash_weights(path, tower) if path.suffix == ".safetensors" else hash_file(path)

    paths = sorted({path for pattern in FILES for path in folder.glob(pattern)})
    for path, found in zip(paths, threaded_map(hash_one, paths), strict=True):
        digest.update(f"{path.name} {found}\n".encode())
    return digest.hexdigest()


def _hash_weights(path: Path, without: tuple[str, ...]) -> str:
    """The xxh3 over names, types, shapes and bytes of a file's tensors whose names do not begin with `without`."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        try:
            for name, about, begin, end in _tensors(file):
                if not name.startswith(without):
                    digest.update(about.encode())
                    for block in _blocks(file, begin, end - begin):
                        digest.update(block)
        except PARSE_ERRORS as error:
            raise ModelError(f"cannot read {path}: {shown(repr(error))}; copy or download it again") from None
    return digest.hexdigest()


def _tensors(file: BinaryIO) -> list[tuple[str, str, int, int]]:
    """The tensors in the order of their data: name, a text that describes it, and where it begins and ends."""
    header, start = read_tensor_header(file)
    found = []
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = map(int, tensor["data_offsets"])
            if not 0 <= begin <= end < 1 << 62:
                raise ValueError(f"the tensor {name} cannot lie from {begin} to {end}")
            found.append((begin, name, end, json.dumps([name, tensor["dtype"], tensor["shape"]])))
    return [(name, about, start + begin, start + end) for begin, name, end, about in sorted(found)]


def _blocks(file: Any, offset: int, num_bytes: int) -> Iterator[bytes]:
    file.seek(offset)
    while num_bytes > 0 and (block := file.read(min(BLOCK_BYTES, num_bytes))):
        num_bytes -= len(block)
        yield block
