"""The small files of a cache folder: manifest, plan and quarantine. FORMAT.md specifies them.

Design: JSON that a person can read, and none of it is ever changed by two: the manifest and each part of the plan
appear once, whole, by whoever is first, and stay; the quarantine is a summary of what the receipts say, for people.
A part of the plan begins with a checksum of all that follows, as receipts do; the manifest has that of its fingerprint.
"""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lookonce.cache.constants import BUILD_COMMAND, FORMAT_VERSION, REPAIR_COMMAND
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.plan import Plan, Shard
from lookonce.cache.store.receipts import LEN_CHECKSUM_LINE, Failure, checksum_line
from lookonce.environment import library_versions
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch
from lookonce.files import create_text, write_text

MANIFEST, PLAN, QUARANTINE = "manifest.json", "plan.json", "quarantine.jsonl"
BROKEN = (ValueError, KeyError, TypeError, AttributeError)
"""What reading a file that is not as it was written may raise."""


def settle(folder: Path, fingerprint: Fingerprint, provenance: Mapping[str, Any]) -> None:
    """Write the manifest, or find that it is there and the same.

    Raises:
        CacheMismatch: the folder was made from something else.
    """
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
        found = read_manifest(folder)
        if found != fingerprint:
            raise CacheMismatch(mismatch([found], fingerprint, f"{folder} was made from something else"))


def read_manifest(folder: Path) -> Fingerprint:
    """The fingerprint in a cache's manifest.

    Raises:
        CacheError: there is no manifest, it is broken, or of a version this program does not read.
    """
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_text())
        version = value["format_version"]
        if version == FORMAT_VERSION:
            return _checked(Fingerprint.from_json(value["fingerprint"]), value.get("sha256"))
    except FileNotFoundError:
        raise CacheError(f"{folder} is no cache: it has no {MANIFEST}; make one with: {BUILD_COMMAND}") from None
    except BROKEN as error:
        raise CacheCorrupt(f"{path} is broken ({error!r}); run: {REPAIR_COMMAND}") from None
    raise CacheError(
        f"{folder} is of format version {version!r}, this program reads version {FORMAT_VERSION}; "
        f"make a new one with: {BUILD_COMMAND}"
    )


def _checked(fingerprint: Fingerprint, sha256: str | None) -> Fingerprint:
    if sha256 not in (None, fingerprint.sha256):
        raise ValueError("its fingerprint does not have the sha256 that stands beside it")
    return fingerprint


def plan_path(folder: Path, part: int) -> Path:
    return folder / (f"plan-{part:05d}.json" if part else PLAN)


def read_plan(folder: Path) -> Plan:
    """The plan of a cache, all parts of it; an empty one if there is none yet.

    Raises:
        CacheCorrupt: it is not what was written.
    """
    parts = list(_plan_parts(folder))
    return Plan(tuple(shard for part in parts for shard in part), num_parts=len(parts))


def extend_plan(folder: Path, plan: Plan, shards: Iterable[Shard]) -> bool:
    """Add `shards` after those of `plan`; False if the plan has grown meanwhile and must be read again."""
    return create_text(plan_path(folder, plan.num_parts), plan_text(shards))


def plan_text(shards: Iterable[Shard]) -> str:
    """A part of the plan as JSON, one shard a line, that begins with a checksum of what follows it."""
    lines = ",\n".join(f"    {json.dumps(shard.to_json())}" for shard in shards)
    body = f'  "format_version": {FORMAT_VERSION},\n  "shards": [\n{lines}\n  ]\n}}\n'
    return checksum_line(body.encode()) + body


def read_plan_part(path: Path) -> tuple[Shard, ...]:
    """The shards of one part of the plan.

    Raises:
        CacheCorrupt: it is not what was written.
    """
    content = path.read_bytes()
    body = content[LEN_CHECKSUM_LINE:]
    if content[:LEN_CHECKSUM_LINE] != checksum_line(body).encode():
        raise CacheCorrupt(f"{path} is not what was written; run: {REPAIR_COMMAND}")
    return tuple(Shard.from_json(shard) for shard in json.loads(content)["shards"])


def _plan_parts(folder: Path) -> Iterator[tuple[Shard, ...]]:
    part = 0
    while (path := plan_path(folder, part)).exists():
        yield read_plan_part(path)
        part += 1


def write_quarantine(folder: Path, failures: Mapping[str, Failure], unusable: Mapping[Path, str]) -> None:
    """Sum up for people which images (key to failure) and which files have no features, and why."""
    lines: list[dict[str, str | None]]
    lines = [{"key": key, "file": failure.file, "reason": failure.reason} for key, failure in failures.items()]
    lines += [{"key": None, "file": str(path), "reason": reason} for path, reason in unusable.items()]
    if lines:
        write_text(folder / QUARANTINE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    else:
        (folder / QUARANTINE).unlink(missing_ok=True)


NUM_DIFFERENCES = 8
"""How many differing fields a message shows."""


def mismatch(others: list[Fingerprint], wanted: Fingerprint, what: str) -> str:
    """A message that begins with `what` and names the fields in which the closest of `others` differs."""
    closest = min(others, key=lambda other: len(wanted.differences(other)))
    found = wanted.differences(closest)
    lines = [f"  {name}: this run {mine!r}, that cache {theirs!r}" for name, mine, theirs in found[:NUM_DIFFERENCES]]
    more = [f"  and {len(found) - NUM_DIFFERENCES} more"] if len(found) > NUM_DIFFERENCES else []
    head = f"{what}; {closest.folder_name} differs in"
    advice = f"Change the run file back, or make this run's own cache with: {BUILD_COMMAND}"
    return "\n".join([head, *lines, *more, advice])
