"""The JSON files of a cache: receipts, plan, manifest and quarantine. ../FORMAT.md specifies them.

Design: each file is JSON for people, created once, whole, by the first process that tries, and never changed. Receipts
and plan files begin with a checksum of all that follows; the manifest has that of its fingerprint.

A receipt is written last, so a shard without one does not count. It has what reading needs, so opening a cache opens no
shard, and the failures of images that could not be encoded, so workers share no file for them.

The plan is written before the first image is encoded and only ever appended to, so any number of workers, restarted any
number of times, divide the images in the same way. A cache that is asked for more images gets more shards. The plan has
the files of each image with their stamps, so workers and trainings can begin without hashing files. It takes about 150
bytes per image.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import socket
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from lookonce.cache.format import BUILD_COMMAND, FORMAT_VERSION, MAX_RECORDS_BYTES, PARSE_ERRORS, REPAIR_COMMAND
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.datasets.augment import Changes, Variant
from lookonce.datasets.images import Stamp
from lookonce.environment import library_versions
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch
from lookonce.files import create_text, parse_json, read_json, read_limited, threaded_map, write_text
from lookonce.text import first_few, located, shown

RECEIPTS = "receipts"
MAX_IMAGES = 16_384
"""The most images of a shard, which keeps its header far below the limit of 100 MB of safetensors."""
MANIFEST, PLAN, QUARANTINE = "manifest.json", "plan.json", "quarantine.jsonl"
NUM_DIFFERENCES = 8

Bytes = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
"""What the system takes as an offset."""
Size = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]
"""A number of tokens or patches, which the index has 32 bits for."""
ImageKey = Annotated[StrictStr, Field(pattern="^[0-9a-f]{64}$")]
Checksum = Annotated[StrictStr, Field(pattern="^[0-9a-f]{16}$")]
ShardName = Annotated[StrictStr, Field(pattern="^shard-[0-9]{5,18}$")]
"""What files of a cache are named after, so no other name is taken from a plan file."""


@dataclass(frozen=True)
class Entry:
    """Offset, size and checksum of the features of one image in a shard."""

    offset: Bytes
    """The offset of the first byte in the shard file."""
    size_bytes: Bytes
    num_tokens: Size
    grid_thw: tuple[Size, Size, Size]
    xxh3_64: Checksum
    norms: Annotated[tuple[StrictFloat, ...], FailFast()] = ()
    """The mean length of a token's vector, for each level."""
    peaks: Annotated[tuple[StrictFloat, ...], FailFast()] = ()
    """The largest absolute value, for each level."""


@dataclass(frozen=True)
class Failure:
    """Why an image has no features."""

    file: StrictStr
    reason: StrictStr
    retry: StrictBool = False
    """Whether the next build tries again: the file could not be read, or had changed. Other failures are final."""


@dataclass(frozen=True)
class Receipt:
    """What a finished shard holds."""

    shard: StrictStr
    fingerprint: StrictStr
    """The fingerprint of the cache, all 64 digits."""
    size_bytes: Bytes
    header_bytes: Bytes
    """The bytes before the features, which `header_xxh3_64` covers; the images' checksums cover all that follows."""
    header_xxh3_64: StrictStr
    host: StrictStr
    finished: StrictFloat
    """When the shard was finished, in seconds since 1970."""
    seconds: StrictFloat
    """How long reading, encoding and writing the images took."""
    images: dict[ImageKey, Entry]
    failed: dict[StrictStr, Failure] = field(default_factory=dict)


_RECEIPT, _KEY, _ENTRY = TypeAdapter(Receipt), TypeAdapter(ImageKey), TypeAdapter(Entry)
_FAILURE = TypeAdapter(Failure)


def failures_of(value: dict[str, Any]) -> dict[str, Failure]:
    """The failures of a JSON object, by image key; one of PARSE_ERRORS if it is something else."""
    return {key: _FAILURE.validate_python(failure) for key, failure in value.items()}


def receipt_path(folder: Path, shard: str) -> Path:
    return folder / RECEIPTS / f"{shard}.json"


def has_receipt(folder: Path, shard: str) -> bool:
    return receipt_path(folder, shard).exists()


def write_receipt(folder: Path, receipt: Receipt) -> bool:
    """Write a receipt; False if the shard already has one."""
    return create_text(receipt_path(folder, receipt.shard), to_text(receipt))


def to_text(receipt: Receipt) -> str:
    """A receipt as JSON, one image per line, that begins with a checksum of what follows it."""
    dicts = {name: {key: vars(item) for key, item in vars(receipt)[name].items()} for name in ("images", "failed")}
    value = {"format_version": FORMAT_VERSION, **vars(receipt), **dicts}  # asdict copies, which takes twice the time
    body = ",\n".join(f"  {json.dumps(name)}: {_lines(item)}" for name, item in value.items()) + "\n}\n"
    return checksum_line(body.encode()) + body


def _lines(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n  }"


def checksum_line(body: bytes) -> str:
    return f'{{\n  "xxh3_64": "{xxhash.xxh3_64_hexdigest(body)}",\n'


LEN_CHECKSUM_LINE = len(checksum_line(b""))


def _read_checked(path: Path) -> Any:
    """The JSON of a file that begins with `checksum_line`.

    Raises:
        CacheCorrupt: its content has another checksum.
        ValueError: it is not JSON, or larger than any such file.
    """
    content = read_limited(path, MAX_RECORDS_BYTES)
    if content[:LEN_CHECKSUM_LINE] != checksum_line(content[LEN_CHECKSUM_LINE:]).encode():
        raise CacheCorrupt(f"{path} is damaged (wrong checksum); run: {REPAIR_COMMAND}")
    return parse_json(content)


def broken(path: Path, error: Exception, advice: str = f"run: {REPAIR_COMMAND}") -> CacheCorrupt:
    """The error for a file whose content is not what it should be."""
    reason = repr(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return CacheCorrupt(f"{path} is broken ({shown(reason)}); {advice}")


def read_receipt(folder: Path, shard: str) -> Receipt:
    """The receipt of a shard.

    Raises:
        FileNotFoundError: the shard has no receipt.
        CacheCorrupt: the receipt is damaged.
    """
    path = receipt_path(folder, shard)
    try:
        value = _read_checked(path)  # its images one by one, so that many mistakes cost no more than the first one
        images = {_KEY.validate_python(key): _ENTRY.validate_python(entry) for key, entry in value["images"].items()}
        value |= {"images": images, "failed": failures_of(value.get("failed", {}))}
        receipt = _RECEIPT.validate_python(value)
    except PARSE_ERRORS as error:
        raise broken(path, error) from None
    if receipt.shard != shard:
        raise CacheCorrupt(f"{path} belongs to {shown(receipt.shard)}; run: {REPAIR_COMMAND}")
    return receipt


def finished_shards(folder: Path) -> list[str]:
    """The names of the shards with a receipt, in the order of their numbers."""
    names = (path.stem for path in (folder / RECEIPTS).glob("*.json"))
    return sorted(names, key=lambda name: (len(name), name))


def read_receipts(folder: Path) -> Iterator[Receipt]:
    """All receipts in the order of their shards, a few of them in memory at a time; raises CacheCorrupt."""

    def read(shard: str) -> Receipt | None:
        with contextlib.suppress(FileNotFoundError):  # removed by a repair after it was listed
            return read_receipt(folder, shard)
        return None

    return (receipt for receipt in threaded_map(read, finished_shards(folder)) if receipt)


@dataclass(frozen=True)
class PlannedImage:
    key: str
    num_tokens: int
    """Computed from the size in the image's header; 0 if that is unreadable."""
    files: tuple[str, ...]
    """The files in which the image was found; bytes are checked against the key when they are read."""
    stamps: tuple[Stamp | None, ...] = ()
    """The stamp of each file, taken before it was hashed; None where it is unknown."""
    is_transparent: bool = False
    """Whether the file marks a colour as transparent, which is painted white; unknown in plans of version 0.2."""
    variant: Variant | None = None
    """What a variant was made from; it has no files of its own, but those of its image."""


@dataclass(frozen=True)
class Shard:
    name: str
    images: tuple[PlannedImage, ...]

    @property
    def keys(self) -> list[str]:
        return [image.key for image in self.images]

    @property
    def num_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)


@dataclass(frozen=True)
class Plan:
    """All shards of a cache, in the order of their numbers."""

    shards: tuple[Shard, ...] = ()
    num_files: int = 0
    """The number of plan files; each extension adds one."""
    images: tuple[PlannedImage, ...] = ()
    """All images with the files in which they were found, in the order in which this was recorded: a later entry
    about the same file is the valid one."""

    def extension(
        self, images: Sequence[PlannedImage], bytes_per_token: int, shard_bytes: int, taken: Iterable[str] = ()
    ) -> tuple[Shard, ...]:
        """Shards for more images, in order; their numbers follow those of this plan and of the names in `taken`."""
        names = (*taken, *(shard.name for shard in self.shards))
        first = max((int(name.rpartition("-")[2]) + 1 for name in names), default=0)
        by_recipe = itertools.groupby(images, lambda image: image.variant and image.variant.recipe)
        groups = [group for _, alike in by_recipe for group in cut(alike, shard_bytes // bytes_per_token)]
        return tuple(Shard(shard_name(first + number), group) for number, group in enumerate(groups))

    def extended(self, shards: tuple[Shard, ...], relocated: tuple[PlannedImage, ...] = ()) -> Plan:
        """This plan with one more plan file: new shards, and images of older shards that were found again."""
        new = tuple(image for shard in shards for image in shard.images)
        return Plan(self.shards + shards, self.num_files + 1, self.images + new + relocated)

    def files(self) -> dict[str, tuple[str, Stamp | None]]:
        """The image key and the stamp of each file in which an image was found."""
        return {
            file: (image.key, stamp)
            for image in self.images
            for file, stamp in itertools.zip_longest(image.files, image.stamps)
        }

    @property
    def variants(self) -> dict[str, Variant]:
        return {image.key: image.variant for image in self.images if image.variant}

    def names(self, keys: Container[str]) -> dict[str, str]:
        """For people: a file of each of these images, or the number of a variant and a file of its image."""
        variants = {key: variant for key, variant in self.variants.items() if key in keys}
        files = {image.key: image.files[0] for image in self.images if image.files}
        named = {key: variant.text(files.get(variant.of, variant.of)) for key, variant in variants.items()}
        return {key: file for key, file in files.items() if key in keys} | named


def shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def cut(images: Iterable[PlannedImage], max_tokens: int) -> list[tuple[PlannedImage, ...]]:
    """Cut images into groups of at most `max_tokens`, in order; a larger image is a group by itself."""
    groups: list[list[PlannedImage]] = []
    filled = 0
    for image in images:
        if not groups or filled + image.num_tokens > max_tokens or len(groups[-1]) == MAX_IMAGES:
            groups.append([])
            filled = 0
        groups[-1].append(image)
        filled += image.num_tokens
    return [tuple(group) for group in groups]


def ensure_manifest(folder: Path, fingerprint: Fingerprint, provenance: Mapping[str, Any]) -> None:
    """Write the manifest; raises CacheMismatch if there is one with another fingerprint."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint.to_json(),
        "sha256": fingerprint.sha256,
        "provenance": {
            **provenance,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "libraries": library_versions(),
        },
    }
    path = folder / MANIFEST
    if path.exists() or not create_text(path, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"):
        check_fingerprint(folder, read_manifest(folder), fingerprint)


def check_fingerprint(folder: Path, stored: Fingerprint, required: Fingerprint) -> None:
    """Raise CacheMismatch if the cache in a folder has another fingerprint than the required one."""
    if stored != required:
        raise CacheMismatch(mismatch_message([stored], required, f"{folder} was made with other settings"))


def read_manifest(folder: Path) -> Fingerprint:
    """The fingerprint in a manifest; raises CacheError if it is missing, broken, or of another format version."""
    path = folder / MANIFEST
    try:
        value = read_json(path)
        version = value["format_version"]
        if version == FORMAT_VERSION:
            fingerprint = Fingerprint.from_json(value["fingerprint"])
            if value["sha256"] != fingerprint.sha256:
                raise ValueError("the sha256 of its fingerprint is not the recorded one")
            return fingerprint
    except (FileNotFoundError, NotADirectoryError):
        where = located(folder)
        raise CacheError(f"{where} is not a cache: it has no {MANIFEST}; build one with: {BUILD_COMMAND}") from None
    except PARSE_ERRORS as error:
        raise broken(path, error) from None
    raise CacheError(
        f"{folder} has format version {version!r}, this program reads version {FORMAT_VERSION}; "
        f"build a new cache with: {BUILD_COMMAND}"
    )


def plan_path(folder: Path, number: int) -> Path:
    return folder / (f"plan-{number:05d}.json" if number else PLAN)


def plan_files(folder: Path) -> list[Path]:
    """The plan files of a cache, in order."""
    return list(itertools.takewhile(Path.exists, (plan_path(folder, number) for number in itertools.count())))


def read_plan(folder: Path) -> Plan:
    """The plan of a cache from all its files; empty if there is none yet; raises CacheCorrupt if one is damaged."""
    plan = Plan()
    for path in plan_files(folder):
        plan = plan.extended(*read_plan_file(path))
    return plan


def extend_plan(folder: Path, plan: Plan, shards: Iterable[Shard], relocated: Sequence[PlannedImage] = ()) -> bool:
    """Append to `plan` new shards, and files in which images of older shards were found again.

    Returns False if another process has extended the plan meanwhile, so that it must be read again.
    """
    return create_text(plan_path(folder, plan.num_files), plan_text(shards, relocated))


def plan_text(shards: Iterable[Shard], relocated: Sequence[PlannedImage] = ()) -> str:
    """A plan file as JSON, one shard per line, that begins with a checksum of what follows it."""
    lines = ",\n".join(f"    {json.dumps({'name': shard.name, **_columns(shard.images)})}" for shard in shards)
    relocated_line = f'  "found_again": {json.dumps(_columns(relocated))},\n' if relocated else ""
    body = f'  "format_version": {FORMAT_VERSION},\n{relocated_line}  "shards": [\n{lines}\n  ]\n}}\n'
    return checksum_line(body.encode()) + body


def _columns(images: Sequence[PlannedImage]) -> dict[str, Any]:
    """Images as one list for each field."""
    transparent = [image.key for image in images if image.is_transparent]
    variants = [image.variant for image in images if image.variant]  # of all or of none
    return {
        "keys": [image.key for image in images],
        "num_tokens": [image.num_tokens for image in images],
        "files": [list(image.files) for image in images],
        "stamps": [list(image.stamps) for image in images],
        **({"transparent": transparent} if transparent else {}),
        **({"recipe": json.loads(variants[0].recipe)} if variants else {}),
        **({"variants": [[variant.of, variant.number] for variant in variants]} if variants else {}),
    }


WholeStamp = Annotated[
    tuple[Bytes, StrictInt, StrictInt] | None,
    BeforeValidator(lambda value: value if value and len(value) == 3 else None),
]
"""A stamp without the time of the last status change, as in older plans, counts as unknown."""


@dataclass(frozen=True)
class _Images:
    """Images of a plan file, as `_columns` writes them."""

    keys: Annotated[list[StrictStr], FailFast()]
    num_tokens: Annotated[list[Bytes], FailFast()]
    files: Annotated[list[Annotated[tuple[StrictStr, ...], FailFast()]], FailFast()]
    stamps: Annotated[list[Annotated[tuple[WholeStamp, ...], FailFast()]], FailFast()] = field(default_factory=list)
    transparent: Annotated[frozenset[StrictStr], FailFast()] = frozenset()
    recipe: dict[StrictStr, Any] = field(default_factory=dict)
    variants: Annotated[list[tuple[StrictStr, StrictInt]], FailFast()] = field(default_factory=list)

    def rows(self) -> tuple[PlannedImage, ...]:
        """The images; raises ValueError if the lists have other lengths, or keys are not those of the variants."""
        stamps, marks = self.stamps or [()] * len(self.keys), (key in self.transparent for key in self.keys)
        variants: list[Variant] | list[None] = [None] * len(self.keys)
        if self.variants:
            recipe = Changes.model_validate(self.recipe).recipe
            variants = [Variant(of, recipe, number) for of, number in self.variants]
            if [variant.key for variant in variants] != self.keys or any(self.files):
                raise ValueError("keys are not those of the variants")
        columns = zip(self.keys, self.num_tokens, self.files, stamps, marks, variants, strict=True)
        return tuple(PlannedImage(*column) for column in columns)


@dataclass(frozen=True, kw_only=True)
class _ShardImages(_Images):
    name: ShardName


@dataclass(frozen=True)
class _PlanFile:
    shards: Annotated[list[_ShardImages], FailFast()]
    found_again: _Images | None = None


_PLAN_FILE = TypeAdapter(_PlanFile)


def read_plan_file(path: Path) -> tuple[tuple[Shard, ...], tuple[PlannedImage, ...]]:
    """A plan file's shards, and images of older shards that were found again; raises CacheCorrupt if damaged."""
    try:
        value = _PLAN_FILE.validate_python(_read_checked(path))
        relocated = value.found_again.rows() if value.found_again else ()
        return tuple(Shard(shard.name, shard.rows()) for shard in value.shards), relocated
    except PARSE_ERRORS as error:
        raise broken(path, error) from None


def write_quarantine(folder: Path, failures: Mapping[str, Failure], unusable: Mapping[Path, str]) -> None:
    """Summarise for people which images (key to failure) and which files (path to reason) have no features."""
    lines: list[dict[str, str | None]]
    lines = [{"key": key, "file": failure.file, "reason": failure.reason} for key, failure in failures.items()]
    lines += [{"key": None, "file": str(path), "reason": reason} for path, reason in unusable.items()]
    if lines:
        write_text(folder / QUARANTINE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    else:
        (folder / QUARANTINE).unlink(missing_ok=True)


def read_quarantine(folder: Path) -> dict[str, str]:
    """Why files could not be read in the last build, by file; images that were read and failed are in receipts."""
    try:
        text = read_limited(folder / QUARANTINE, MAX_RECORDS_BYTES).decode("utf-8")
        lines = [parse_json(line) for line in text.splitlines()]
        return {line["file"]: line["reason"] for line in lines if line["key"] is None}
    except FileNotFoundError:
        return {}
    except PARSE_ERRORS as error:
        raise broken(folder / QUARANTINE, error, f"write it again with: {BUILD_COMMAND}") from None


def mismatch_message(stored: list[Fingerprint], required: Fingerprint, problem: str) -> str:
    """A message that begins with `problem` and names the fields in which the most similar of `stored` differs."""
    closest = min(stored, key=lambda fingerprint: len(required.differences(fingerprint)))
    differing = required.differences(closest)
    lines = [f"{key}: this run {mine!r}, that cache {theirs!r}" for key, mine, theirs in differing]
    head = f"{problem}; cache {closest.folder_name} differs in"
    advice = f"Change the run file back, or build a cache for this run with: {BUILD_COMMAND}"
    return "\n".join([head, *first_few(lines, NUM_DIFFERENCES), advice])
