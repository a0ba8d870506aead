"""The format of a cache: its version, how features are stored, and the header of a safetensors file. Imports no torch.

Features are stored unchanged, or as fp8_e4m3: 8 bits, 4 of exponent and 3 of mantissa, up to 448. The vector of each
token and level is divided by a scale of its own that maps its largest absolute value to 448, because the outlier tokens
of a tower would cost all other tokens their precision. This takes half the bytes of bfloat16, with a relative error of
about 2.6 % of a vector's length (`benchmarks/fp8_2026-11-20.md`).

Headers are read here where the tensors are wanted without the library, which maps whole files. The length of a header
is the file's own claim, and bounded as in the library (https://github.com/safetensors/safetensors, MAX_HEADER_SIZE).
Features are `[num_tokens, num_levels, hidden]`, scales `[num_tokens, num_levels]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lookonce.files import parse_json

if TYPE_CHECKING:
    import torch


FORMAT_VERSION = 2

Backend = Literal["pil", "torchvision"]
"""The library that the image processor resizes with."""
DtypeName = Literal["bfloat16", "float32", "fp8_e4m3"]
"""How features are stored. float16 is left out on purpose: the outliers of a tower overflow it."""
Grid = tuple[int, int, int]
"""The patch grid of an image (t, h, w): frames, rows and columns of patches."""
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
MAX_RECORDS_BYTES = 1 << 30
"""The most bytes of a receipt or a plan file; one about a million images has 150 MB."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors for the header of a file."""
BUILD_COMMAND = "lookonce cache build RUN.yaml"
REPAIR_COMMAND = "lookonce cache repair RUN.yaml"


SCALE_SUFFIX = ".scale"
"""Follows the image key in the name of a tensor of scales in a shard."""
LEN_SIZE = 8
"""A safetensors file begins with the length of its header, in that many bytes."""


class StoredTensor(NamedTuple):
    """A tensor of each image in a shard: features or scales."""

    suffix: str
    """Follows the image key in its name."""
    code: str
    """The name of its dtype in a safetensors header."""
    dtype_name: str
    value_bytes: int
    of_token: tuple[int, ...]
    """The shape of what it has for each token."""

    @property
    def bytes_per_token(self) -> int:
        return self.value_bytes * math.prod(self.of_token)

    @property
    def dtype(self) -> torch.dtype:
        return _dtype(self.dtype_name)


@dataclass(frozen=True)
class Storage:
    """A storage dtype, described by names so that counting bytes does not import torch."""

    compute_name: str
    stored_name: str
    stored_bytes: int
    code: str
    """The name of the stored dtype in a safetensors header."""

    @property
    def compute(self) -> torch.dtype:
        """The dtype in which the tower computes and a reader returns features."""
        return _dtype(self.compute_name)

    @property
    def stored(self) -> torch.dtype:
        return _dtype(self.stored_name)

    @property
    def is_scaled(self) -> bool:
        return self.stored_name != self.compute_name

    def tensors(self, num_levels: int, hidden: int) -> list[StoredTensor]:
        """The tensors of an image, in their order."""
        tensors = [StoredTensor("", self.code, self.stored_name, self.stored_bytes, (num_levels, hidden))]
        if self.is_scaled:
            tensors.append(StoredTensor(SCALE_SUFFIX, "F32", "float32", 4, (num_levels,)))
        return tensors

    def bytes_per_token(self, num_levels: int, hidden: int) -> int:
        return sum(tensor.bytes_per_token for tensor in self.tensors(num_levels, hidden))

    def quantize(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors to write, in this order: the features, or quantized features and their scales."""
        if not self.is_scaled:
            return (features.contiguous(),)
        scale = scales(features)
        return (features.float() / scale.unsqueeze(-1)).to(self.stored), scale

    def dequantize(self, stored: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The features in the compute dtype, from the tensors that `quantize` gives."""
        if scale is None:
            return stored
        return (stored.float() * scale.unsqueeze(-1)).to(self.compute)


def scales(features: torch.Tensor) -> torch.Tensor:
    """The float32 scale of each token and level, which maps its largest absolute value to the dtype's largest."""
    import torch

    largest = features.abs().amax(dim=-1).float()
    return torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


STORAGE: dict[DtypeName, Storage] = {
    "bfloat16": Storage("bfloat16", "bfloat16", 2, "BF16"),
    "float32": Storage("float32", "float32", 4, "F32"),
    "fp8_e4m3": Storage("bfloat16", "float8_e4m3fn", 1, "F8_E4M3"),
}


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file, and the offset of the data behind it.

    Raises:
        ValueError: it is not a header.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LEN_SIZE), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header claims {length:,} bytes; safetensors allows {MAX_HEADER_BYTES:,}")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, LEN_SIZE + length
