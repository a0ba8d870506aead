"""The small files of a cache folder: manifest, plan and quarantine. FORMAT.md specifies them.

Design: JSON that a person can read, written atomically. The manifest comes before the first shard and says what the
cache is made from; the plan says which image goes into which shard; the quarantine remembers the images that can not
be encoded, so that they are not tried again at every build.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lookonce.cache.fingerprint import FORMAT_VERSION, Fingerprint
from lookonce.cache.names import BUILD_COMMAND
from lookonce.cache.plan import Plan
from lookonce.environment import library_versions
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch
from lookonce.files import write_json, write_text

MANIFEST, PLAN, QUARANTINE = "manifest.json", "plan.json", "quarantine.jsonl"
BROKEN = (ValueError, KeyError, TypeError, AttributeError)
"""What reading a file that is not as it was written may raise."""


def claim(folder: Path, fingerprint: Fingerprint, provenance: Mapping[str, Any]) -> None:
    """Write the manifest, or find that it is there and the same.

    Raises:
        CacheMismatch: the folder was made from something else.
    """
    if (folder / MANIFEST).exists():
        found = read_manifest(folder)
        if found != fingerprint:
            raise CacheMismatch(mismatch([found], fingerprint, f"{folder} was made from something else"))
        return
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
    write_json(folder / MANIFEST, manifest)


@contextlib.contextmanager
def only_builder(folder: Path) -> Iterator[None]:
    """Hold the cache for one build: two that append to one plan would undo each other's.

    Raises:
        CacheError: another process builds there.
    """
    with (folder / MANIFEST).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CacheError(f"another build is at work in {folder}; wait for it, then run: {BUILD_COMMAND}") from None
        yield


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
            return Fingerprint.from_json(value["fingerprint"])
    except FileNotFoundError:
        raise CacheError(f"{folder} is no cache: it has no {MANIFEST}; make one with: {BUILD_COMMAND}") from None
    except BROKEN as error:
        raise CacheCorrupt(f"{path} is broken ({error!r}); choose another `cache.dir` or delete {folder}") from None
    raise CacheError(
        f"{folder} is of format version {version!r}, this program reads version {FORMAT_VERSION}; "
        f"make a new one with: {BUILD_COMMAND}"
    )


def read_plan(folder: Path) -> Plan:
    """The plan of a cache; an empty one if there is none yet.

    Raises:
        CacheCorrupt: it is not what was written.
    """
    path = folder / PLAN
    if not path.exists():
        return Plan()
    try:
        return Plan.from_json(json.loads(path.read_text()))
    except BROKEN as error:
        raise CacheCorrupt(f"{path} is broken ({error!r}); choose another `cache.dir` or delete {folder}") from None


def write_plan(folder: Path, plan: Plan) -> None:
    """Write a plan in place of the one that it extends."""
    write_json(folder / PLAN, plan.to_json())


def read_quarantine(folder: Path) -> dict[str, str]:
    """The images that could not be encoded: key to reason.

    Raises:
        CacheCorrupt: it is not what was written.
    """
    path = folder / QUARANTINE
    if not path.exists():
        return {}
    try:
        return {value["key"]: value["reason"] for value in map(json.loads, path.read_text().splitlines())}
    except BROKEN as error:
        raise CacheCorrupt(
            f"{path} is broken ({error!r}); delete it, and its images are tried again by: {BUILD_COMMAND}"
        ) from None


def add_to_quarantine(folder: Path, reasons: Mapping[str, str], images: Mapping[str, Path]) -> None:
    """Remember why images (key to reason) could not be encoded; those that are known already stay as they are."""
    path = folder / QUARANTINE
    known = read_quarantine(folder)
    lines = path.read_text() if path.exists() else ""
    for key in sorted(reasons.keys() - known.keys()):
        lines += json.dumps({"key": key, "file": str(images[key]), "reason": reasons[key]}) + "\n"
    write_text(path, lines)


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
