"""The fingerprint of a cache: everything that changes features, and nothing else.

Design: the tower is identified by its *tensors* (names, shapes, dtypes, bytes), never by a name or a path: a moved or
renamed model folder keeps its fingerprint, one with a retrained tower gets another. What changes only the rounding (GPU
model, attention kernel, library versions) is recorded as provenance in the manifest and not hashed. The configuration
of the tower is hashed as transformers resolves it, with defaults filled in; a release that adds a field or changes a
default needs a new cache, which is the safe side. The cost is reading the tower once per run: 1.2 GB and about a
second for Qwen3-VL-8B.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lookonce.cache.constants import FORMAT_VERSION, DtypeName
from lookonce.cache.store.dtypes import STORAGE, Storage, StoredTensor
from lookonce.differences import Difference, differences
from lookonce.families.lookup import family_of_tower

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from lookonce.cache.model.model_folder import ModelFolder
    from lookonce.cache.model.pixels import ImageProcessor

FOLDER_DIGITS = 16


@dataclass(frozen=True)
class Fingerprint:
    """What a cache was made from; two caches with the same fingerprint hold the same features."""

    format_version: int
    tower_sha256: str
    tower_config: dict[str, Any]
    image_processor: dict[str, Any]
    num_levels: int
    dtype: DtypeName

    @classmethod
    def of(cls, model_folder: ModelFolder, processor: ImageProcessor, dtype: DtypeName) -> Fingerprint:
        """The fingerprint of features from this tower, image processor and dtype."""
        return cls(
            format_version=FORMAT_VERSION,
            tower_sha256=hash_tensors(model_folder.tower_tensors()),
            tower_config=_meaningful(model_folder.vision_config),
            image_processor=processor.settings,
            num_levels=model_folder.family.num_levels(model_folder.vision_config),
            dtype=dtype,
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Fingerprint:
        if value["dtype"] not in STORAGE:
            raise ValueError(f"dtype {value['dtype']!r} is not one of {', '.join(STORAGE)}")
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @cached_property
    def sha256(self) -> str:
        """The sha256 of the canonical JSON of all fields, 64 hexadecimal digits."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        return self.sha256[:FOLDER_DIGITS]

    @property
    def hidden_size(self) -> int:
        return int(self.tower_config[family_of_tower(self.tower_config).feature_size])

    @property
    def storage(self) -> Storage:
        return STORAGE[self.dtype]

    @cached_property
    def tensors(self) -> list[StoredTensor]:
        """The tensors of each image in a shard, in their order."""
        return self.storage.tensors(self.num_levels, self.hidden_size)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a stored token."""
        return self.storage.bytes_per_token(self.num_levels, self.hidden_size)

    def differences(self, other: Fingerprint) -> list[Difference]:
        """The fields that differ, each as (dotted name, value here, value in `other`)."""
        return differences(self.to_json(), other.to_json())


def hash_tensors(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    """The sha256 over names, dtypes, shapes and bytes of tensors, in the given order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous; numpy has no bfloat16."""
    import torch

    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _meaningful(config: PreTrainedConfig) -> dict[str, Any]:
    """The configuration without the fields of every transformers configuration and those that only training uses."""
    from transformers import PreTrainedConfig

    ignored = PreTrainedConfig().to_dict().keys() | {"initializer_range"}
    values = {name: value for name, value in config.to_dict().items() if name not in ignored}
    normalised: dict[str, Any] = json.loads(json.dumps(values | {"model_type": config.model_type}), parse_float=_number)
    return normalised


def _number(text: str) -> float:
    """10000.0 as 10000: equal numbers must have the same hash."""
    value = float(text)
    return int(value) if value.is_integer() else value
