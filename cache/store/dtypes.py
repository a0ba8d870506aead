"""How features are stored: as they are, or in 8 bits with a scale for each token and level.

fp8_e4m3 has 4 bits of exponent and 3 of mantissa and ends at 448, so each token's vector of each level is divided by
its own scale, which takes its largest value there. Half the bytes of bfloat16, and a relative error of about 2.6 % of
a vector's length; logits and LoRA gradients are then 0.9 and 1.0 % from those of float32, bfloat16's 0.4 %
(`benchmarks/fp8_2026-11-20.md`). The scale is per token because a tower's outlier tokens would otherwise cost all
others their precision.
Features are `[num_tokens, num_levels, hidden]`, scales `[num_tokens, num_levels]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookonce.cache.constants import DtypeName

if TYPE_CHECKING:
    import torch

SCALE_SUFFIX = ".scale"
"""Of a scale's name in a shard, after the image key."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class Storage:
    """A storage dtype, known by names: who counts bytes needs no torch."""

    compute_name: str
    stored_name: str
    stored_bytes: int
    """Of a number."""
    code: str
    """In the header of a safetensors file."""

    @property
    def compute(self) -> torch.dtype:
        """Of the tower, and of the features that a reader is given."""
        return _dtype(self.compute_name)

    @property
    def stored(self) -> torch.dtype:
        return _dtype(self.stored_name)

    @property
    def is_scaled(self) -> bool:
        return self.stored_name != self.compute_name

    def bytes_per_token(self, num_levels: int, hidden: int) -> int:
        return num_levels * (hidden * self.stored_bytes + (SCALE_BYTES if self.is_scaled else 0))

    def pack(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is written one after the other: features, or quantised features and their scales."""
        if not self.is_scaled:
            return (features.contiguous(),)
        scale = scales(features)
        return (features.float() / scale.unsqueeze(-1)).to(self.stored), scale

    def unpack(self, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """The features again, in the compute dtype."""
        if scale is None:
            return stored
        return (stored.float() * scale.unsqueeze(-1)).to(self.compute)


def scales(features: torch.Tensor) -> torch.Tensor:
    """The scale of each token and level, float32: what takes its largest value to the end of the range."""
    import torch

    largest = features.abs().amax(dim=-1).float()
    return torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)


def _dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


STORAGE: dict[DtypeName, Storage] = {
    "bfloat16": Storage("bfloat16", "bfloat16", 2, "BF16"),
    "float32": Storage("float32", "float32", 4, "F32"),
    "fp8_e4m3": Storage("bfloat16", "float8_e4m3fn", 1, "F8_E4M3"),
}
