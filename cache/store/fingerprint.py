"""The fingerprint of a cache: everything that changes features, and nothing else; recorded once it is computed.

Design: the tower is identified by its *tensors* (names, shapes, dtypes, bytes), never by a name or a path. What changes
only the rounding (GPU model, attention kernel, library versions) is provenance in the manifest, and not hashed. The
configuration of the tower is hashed as transformers resolves it, with defaults filled in; a release that adds a field
or changes a default needs a new cache, which is the safe side.

Computing a fingerprint reads the whole tower (1.2 GB for 8B) and imports torch and transformers (6 s of CPU time). So
it is recorded in a small file beside the caches, which is read in 5 ms and which anyone may delete. It counts if all
files of the model have the same stamps, and settings, libraries and code are the same. The code is identified by a
checksum of its files. Builds compute the fingerprint from the tower all the same.

A run recognises the model that it was trained on by a hash of all but the tower, whose tensors training never reads.
Computing it reads all weights (16 GB for 8B); it is recorded in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

import lookonce.families
from lookonce.cache.format import FORMAT_VERSION, PARSE_ERRORS, STORAGE, DtypeName, Storage, StoredTensor
from lookonce.datasets.images import Stamp, stamp
from lookonce.environment import library_versions
from lookonce.families.lookup import family_in, family_of_tower
from lookonce.files import hash_file, read_json, threaded_map, write_json
from lookonce.hub import FILES
from lookonce.settings import Difference, differences

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from lookonce.cache.model.model_folder import ModelFolder
    from lookonce.cache.model.pixels import ImageProcessor


FOLDER_DIGITS = 16
"""Digits of the hash in the name of a cache folder, and of a note."""
NOTES = "fingerprints"


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


def hash_language_model(folder: Path) -> str:
    """The xxh3 over a model's files: weights without the tower, configurations, tokenizer; may raise ModelError."""
    tower, digest = family_in(folder).tower_prefixes, xxhash.xxh3_128()

    def hash_path(path: Path) -> str:
        return _hash_weights(path, tower) if path.suffix == ".safetensors" else hash_file(path)

    paths = _model_files(folder)
    for path, file_hash in zip(paths, threaded_map(hash_path, paths), strict=True):
        digest.update(f"{path.name} {file_hash}\n".encode())
    return digest.hexdigest()


def _model_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in FILES for path in folder.glob(pattern)})


def _hash_weights(path: Path, without: tuple[str, ...]) -> str:
    """The xxh3 over names, types, shapes and bytes of a file's tensors whose names do not begin with `without`."""
    from lookonce.cache.model.model_folder import open_tensors

    digest = xxhash.xxh3_128()
    with open_tensors(path) as file:
        for name in file.offset_keys():  # in the order of their data
            if not name.startswith(without):
                about = file.get_slice(name)
                digest.update(json.dumps([name, about.get_dtype(), about.get_shape()]).encode())
                digest.update(raw_bytes(file.get_tensor(name)))
    return digest.hexdigest()


@dataclass(frozen=True)
class Source:
    """What a fingerprint is computed from; taken before the model is read."""

    folder: Path
    settings: dict[str, Any]
    stamps: dict[str, Stamp | None]
    """For each file of the model; None if it was changed just now."""
    libraries: dict[str, str | None]
    code: str
    """The sha256 of the modules that compute fingerprints."""

    @classmethod
    def of(cls, folder: Path, settings: dict[str, Any]) -> Source:
        """`settings` are all values of the run file that change a fingerprint, except for the model."""
        stamps = {path.name: stamp(path) for path in _model_files(folder)}
        code = hashlib.sha256(b"".join(path.read_bytes() for path in code_files()))
        return cls(folder, settings, stamps, library_versions(), code.hexdigest())

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(json.dumps(asdict(self) | {"folder": self._real_folder}))  # as it is read
        return value

    def write_note(self, root: Path, fingerprint: Fingerprint) -> None:
        """Record the fingerprint below `root`, the folder of caches, if that exists and has no such note yet."""
        if self.read_note(root) != fingerprint:
            self._write(root, fingerprint.to_json())

    def read_note(self, root: Path) -> Fingerprint | None:
        """The fingerprint recorded for exactly this source; None if there is none."""
        with contextlib.suppress(*PARSE_ERRORS):
            return Fingerprint.from_json(self._read(root))
        return None

    def language_model_hash(self, root: Path) -> str:
        """The hash of all but the tower: as recorded below `root`, else computed and recorded; may raise ModelError."""
        note = replace(self, settings={"hash": "hash_language_model"})
        digest = note._read(root)
        if not isinstance(digest, str):
            digest = hash_language_model(self.folder)
            note._write(root, digest)
        return digest

    def _read(self, root: Path) -> Any:
        """What was recorded for exactly this source; None if there is nothing, or it is damaged."""
        with contextlib.suppress(OSError, *PARSE_ERRORS):
            note = read_json(self._path(root))
            is_whole = note["sha256"] == _sha256(json.dumps(note["found"]))
            if is_whole and note["source"] == self.to_json() and all(self.stamps.values()):
                return note["found"]
        return None

    def _write(self, root: Path, value: Any) -> None:
        with contextlib.suppress(OSError):  # a read-only folder, or one without access
            if root.is_dir() and all(self.stamps.values()):
                note = {"source": self.to_json(), "found": value, "sha256": _sha256(json.dumps(value))}
                write_json(self._path(root), note)

    @property
    def _real_folder(self) -> str:
        """One path for all links to a model; resolved at each use, so a link that was moved fits no stamps."""
        return str(self.folder.resolve())

    def _path(self, root: Path) -> Path:
        name = _sha256(json.dumps([self._real_folder, self.settings], sort_keys=True))
        return root / NOTES / f"{name[:FOLDER_DIGITS]}.json"


def code_files() -> list[Path]:
    """The modules that compute fingerprints: a change to any of them may change the result."""
    cache, families = Path(__file__).parents[1], Path(lookonce.families.__file__).parent
    folders = (cache / "model", families)
    return [cache / "format.py", Path(__file__), *(path for folder in folders for path in sorted(folder.glob("*.py")))]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
