"""The header of a safetensors file: the dtype, the shape and the place of each tensor, as JSON behind its length.

Design: read here where the tensors are wanted without the library, which maps whole files. Its length is the file's own
claim, and is bounded as in the library (https://github.com/safetensors/safetensors, MAX_HEADER_SIZE).
"""

from __future__ import annotations

from typing import Any, BinaryIO

from lookonce.cache.constants import MAX_HEADER_BYTES
from lookonce.files import parse_json

LEN_SIZE = 8
"""A safetensors file begins with the length of its header, in that many bytes."""


def read_tensor_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header at the beginning of a file, and the offset of the data behind it.

    Raises:
        ValueError: it is not a header.
    """
    length = int.from_bytes(file.read(LEN_SIZE), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {length:,} bytes; safetensors allows {MAX_HEADER_BYTES:,}")
    header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, LEN_SIZE + length
