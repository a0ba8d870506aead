"""The images of a run: which are in the cache, which are still to be encoded, and which cannot be.

Design: the plan and its stamps say which images the cache knows, as for training, so an image that is encoded is not
opened and need not exist. The others are read. What is stored is not verified: `lookonce cache verify`
does that. The fingerprint is computed, which reads the tower, only if there are caches and it was not recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lookonce.cache.build.progress import index_from_plan, planned_tokens
from lookonce.cache.format import BUILD_COMMAND, REPAIR_COMMAND
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import MANIFEST, read_manifest, read_plan
from lookonce.cache.store.reader import VisionCache
from lookonce.checks.model import CheckedModel
from lookonce.checks.records import CheckedRecords
from lookonce.checks.report import Result
from lookonce.datasets.images import bytes_key, read_header, read_many
from lookonce.errors import BadImage, CacheError, ImageError, LookonceError
from lookonce.run.config import RunFile
from lookonce.run.open import fingerprint_of, source_of
from lookonce.text import count, first_line, listed, located

REPAIR_IMAGES = "repair the files, or remove their records"
SET_ROOT = "set `data.image_root`; image paths are relative to it, and without it to the records file"
SKIPPED = "their records are left out (data.skip_unusable)"
NUM_NAMED = 3


@dataclass
class CheckedImages:
    """What is known of the images of some records."""

    fingerprint: Fingerprint | None = None
    tokens: dict[Path, int] = field(default_factory=dict)
    """The tokens of each image, unless its size is unknown."""
    keys: dict[Path, str] = field(default_factory=dict)
    """The image key of each image that is planned or was read."""
    to_encode: list[Path] = field(default_factory=list)
    """Images that the cache lacks, one path for each content."""

    def distinct(self, paths: Iterable[Path]) -> list[Path]:
        """One path for each content: a parquet file may have an image in many rows."""
        found: dict[str, Path] = {}
        for path in paths:
            found.setdefault(self.keys.get(path, str(path)), path)
        return list(found.values())


def check_images(run: RunFile, records: CheckedRecords, model: CheckedModel) -> tuple[CheckedImages, list[Result]]:
    """Find every image of the records in the cache, or on disk."""
    found, results = CheckedImages(), []
    origin_of = records.images()
    unusable: dict[Path, str] = {}
    cache, state = _open_cache(run, model, found)
    rest = _by_plan(cache, origin_of, found, unusable) if cache else list(origin_of)
    _on_disk(rest, cache, model, found, unusable)
    if cache is None and state.level == "error":
        results.append(state)
    elif found.to_encode:
        missing = f"{count(len(found.to_encode), 'image')} to encode; {state.value}"
        results.append(Result("warning", "cache", missing, BUILD_COMMAND))
    elif origin_of:
        results.append(state)
    if unusable:
        results.append(_unusable(run, records, found, unusable, origin_of))
    elif origin_of:
        number = count(len(found.distinct(origin_of)), "image")
        results.append(Result("ok", "images", f"{number}: in the cache, or can be read"))
    return found, results


def _unusable(
    run: RunFile, records: CheckedRecords, found: CheckedImages, unusable: dict[Path, str], origin_of: dict[Path, str]
) -> Result:
    paths = found.distinct(unusable)
    named = [f"{first_line(ImageError(unusable[path]))} (used by {origin_of[path]})" for path in paths]
    num_records = sum(any(path in unusable for path in record.images) for record in records.all())
    number = f"{count(len(paths), 'image')} of {count(num_records, 'record')}"
    what = f"{number} cannot be used: {listed(named, NUM_NAMED)}"
    if run.data.skip_unusable:
        return Result("warning", "images", what, SKIPPED)
    return Result("error", "images", what, SET_ROOT if len(unusable) == len(origin_of) else REPAIR_IMAGES)


def _open_cache(run: RunFile, model: CheckedModel, found: CheckedImages) -> tuple[VisionCache | None, Result]:
    """The cache of the run if there is one, and what is to be said of it; notes the fingerprint if it is known."""
    root = run.cache.dir
    manifests = sorted(root.glob(f"*/{MANIFEST}"))
    if not manifests or model.model_folder is None or model.processor is None:
        return None, Result("ok", "cache", f"there is none yet in {located(root)}" if not manifests else "not checked")
    try:
        found.fingerprint = fingerprint_of(source_of(run, is_local=True), root)
        folder = root / found.fingerprint.folder_name
        if not (folder / MANIFEST).exists():
            return None, Result("ok", "cache", _mismatch(found.fingerprint, manifests, root))
        cache = VisionCache.open(folder)
        return cache, Result("ok", "cache", f"{count(len(cache), 'image')} in {folder}")
    except LookonceError as error:
        return None, Result("error", "cache", str(error), REPAIR_COMMAND)


def _mismatch(wanted: Fingerprint, manifests: list[Path], root: Path) -> str:
    """Which caches there are, and what tells the closest from the one that is needed."""
    others = []
    for manifest in manifests:
        try:
            others.append(wanted.differences(read_manifest(manifest.parent)))
        except CacheError:  # damaged, or of another version
            continue
    names = [name for name, _, _ in min(others, key=len, default=[])]
    differs = f"; the closest has another {listed(names, NUM_NAMED)}" if names else ""
    return f"no cache in {located(root)} is of this model and these pixels{differs}"


def _by_plan(cache: VisionCache, paths: Iterable[Path], found: CheckedImages, unusable: dict[Path, str]) -> list[Path]:
    """Look up the images that the plan knows; returns the others, and those that are planned only."""
    paths = list(paths)
    known = index_from_plan(read_plan(cache.folder), paths, without_files=True)
    return [path for path in paths if not _find(cache, known.key_of.get(path, ""), path, found, unusable)]


def _find(cache: VisionCache, key: str, path: Path, found: CheckedImages, unusable: dict[Path, str]) -> bool:
    """Whether the cache has an image, or knows that it cannot be encoded."""
    if key:
        found.keys[path] = key
    if key in cache:
        found.tokens[path] = cache.entry(key)[1].num_tokens
    elif key in cache.failed and not cache.failed[key].retry:
        unusable[path] = f"{path} is quarantined: {cache.failed[key].reason}"
    return path in found.tokens or path in unusable


def _on_disk(
    paths: list[Path],
    cache: VisionCache | None,
    model: CheckedModel,
    found: CheckedImages,
    unusable: dict[Path, str],
) -> None:
    """Read the images that the plan does not know; the cache may know them by another name."""
    keys = set()
    for path, data in read_many(paths):
        if isinstance(data, ImageError):
            unusable[path] = str(data)
            continue
        key = found.keys[path] = bytes_key(data)
        if cache and _find(cache, key, path, found, unusable):
            continue
        try:
            size = read_header(data, path).size
            if model.processor:
                model.processor.check_size(size, path)
        except BadImage as error:
            unusable[path] = str(error)
            continue
        found.to_encode += [] if key in keys else [path]
        keys.add(key)
        if model.processor and (num_tokens := planned_tokens(model.processor, size)):
            found.tokens[path] = num_tokens
