"""The small files of a cache folder: manifest, plan files and quarantine. FORMAT.md specifies them.

Design: JSON that people can read and that two processes never change. The manifest and each plan file are created
once, whole, by the first process that tries, and never change; the quarantine is a summary of the receipts for people.
A plan file begins with a checksum of all that follows, as a receipt does; the manifest has that of its fingerprint.
"""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lookonce.cache.constants import BUILD_COMMAND, FORMAT_VERSION, MAX_RECORDS_BYTES, PARSE_ERRORS, REPAIR_COMMAND
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.plan import Plan, PlannedImage, Shard, images_from_json, images_to_json
from lookonce.cache.store.receipts import LEN_CHECKSUM_LINE, Failure, checksum_line
from lookonce.environment import library_versions
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch
from lookonce.files import create_text, parse_json, read_json, read_limited, write_text
from lookonce.text import located, shown

MANIFEST, PLAN, QUARANTINE = "manifest.json", "plan.json", "quarantine.jsonl"


def ensure_manifest(folder: Path, fingerprint: Fingerprint, provenance: Mapping[str, Any]) -> None:
    """Write the manifest, or check that the existing one has this fingerprint.

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
            raise CacheMismatch(mismatch_message([found], fingerprint, f"{folder} was made from something else"))


def read_manifest(folder: Path) -> Fingerprint:
    """The fingerprint in a cache's manifest.

    Raises:
        CacheError: there is no manifest, it is broken, or this program does not read its format version.
    """
    path = folder / MANIFEST
    try:
        value = read_json(path)
        version = value["format_version"]
        if version == FORMAT_VERSION:
            return _checked(Fingerprint.from_json(value["fingerprint"]), value.get("sha256"))
    except FileNotFoundError:
        where = located(folder)
        raise CacheError(f"{where} is not a cache: it has no {MANIFEST}; build one with: {BUILD_COMMAND}") from None
    except PARSE_ERRORS as error:
        raise CacheCorrupt(f"{path} is broken ({shown(repr(error))}); run: {REPAIR_COMMAND}") from None
    raise CacheError(
        f"{folder} has format version {version!r}, this program reads version {FORMAT_VERSION}; "
        f"build a new cache with: {BUILD_COMMAND}"
    )


def _checked(fingerprint: Fingerprint, sha256: str | None) -> Fingerprint:
    if sha256 not in (None, fingerprint.sha256):
        raise ValueError("the sha256 of its fingerprint is not the recorded one")
    return fingerprint


def plan_path(folder: Path, number: int) -> Path:
    return folder / (f"plan-{number:05d}.json" if number else PLAN)


def read_plan(folder: Path) -> Plan:
    """The plan of a cache from all its plan files; an empty one if there is none yet.

    Raises:
        CacheCorrupt: a plan file is damaged.
    """
    plan = Plan()
    while (path := plan_path(folder, plan.num_files)).exists():
        plan = plan.extended(*read_plan_file(path))
    return plan


def extend_plan(folder: Path, plan: Plan, shards: Iterable[Shard], again: Sequence[PlannedImage] = ()) -> bool:
    """Append to `plan` new shards, and files in which images of older shards were found again.

    Returns False if another process has extended the plan meanwhile, so that it must be read again.
    """
    return create_text(plan_path(folder, plan.num_files), plan_text(shards, again))


def plan_text(shards: Iterable[Shard], again: Sequence[PlannedImage] = ()) -> str:
    """A plan file as JSON, one shard per line, that begins with a checksum of what follows it."""
    lines = ",\n".join(f"    {json.dumps(shard.to_json())}" for shard in shards)
    found = f'  "found_again": {json.dumps(images_to_json(again))},\n' if again else ""
    body = f'  "format_version": {FORMAT_VERSION},\n{found}  "shards": [\n{lines}\n  ]\n}}\n'
    return checksum_line(body.encode()) + body


def read_plan_file(path: Path) -> tuple[tuple[Shard, ...], tuple[PlannedImage, ...]]:
    """The shards of one plan file, and the images of older shards that were found again.

    Raises:
        CacheCorrupt: it is damaged.
    """
    try:
        content = read_limited(path, MAX_RECORDS_BYTES)
        body = content[LEN_CHECKSUM_LINE:]
        if content[:LEN_CHECKSUM_LINE] != checksum_line(body).encode():
            raise CacheCorrupt(f"{path} is damaged (wrong checksum); run: {REPAIR_COMMAND}")
        value = parse_json(content)
        again = images_from_json(value["found_again"]) if "found_again" in value else ()
        return tuple(Shard.from_json(shard) for shard in value["shards"]), again
    except PARSE_ERRORS as error:
        raise CacheCorrupt(f"{path} is broken ({shown(repr(error))}); run: {REPAIR_COMMAND}") from None


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
        raise CacheCorrupt(
            f"{folder / QUARANTINE} is broken ({shown(repr(error))}); write it again with: {BUILD_COMMAND}"
        ) from None


NUM_DIFFERENCES = 8
"""The most differing fields that a message shows."""


def mismatch_message(others: list[Fingerprint], wanted: Fingerprint, what: str) -> str:
    """A message that begins with `what` and names the fields in which the most similar of `others` differs."""
    closest = min(others, key=lambda other: len(wanted.differences(other)))
    found = wanted.differences(closest)
    lines = [f"  {name}: this run {mine!r}, that cache {theirs!r}" for name, mine, theirs in found[:NUM_DIFFERENCES]]
    more = [f"  and {len(found) - NUM_DIFFERENCES} more"] if len(found) > NUM_DIFFERENCES else []
    head = f"{what}; {closest.folder_name} differs in"
    advice = f"Change the run file back, or build a cache for this run with: {BUILD_COMMAND}"
    return "\n".join([head, *lines, *more, advice])
