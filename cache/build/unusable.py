"""Which images a build could not encode: the reasons in the receipts, and in the quarantine those of unreadable files.

Design: read from what the last build has written and not from the images, so that all ranks of a training, on machines
that may not have the images, leave out the same records.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lookonce.cache.store.index import Index
from lookonce.cache.store.manifest import MANIFEST, read_plan, read_quarantine


def unusable_images(folder: Path, fingerprint: str, files: Iterable[Path]) -> dict[Path, str]:
    """Why the cache in `folder` lacks the features of some of these files; none before the first build.

    Raises:
        CacheCorrupt: the plan or a receipt is damaged.
    """
    if not (folder / MANIFEST).exists():
        return {}
    failed, planned, unread = Index.open(folder, fingerprint).failed, read_plan(folder).files(), read_quarantine(folder)
    found: dict[Path, str] = {}
    for file in files:
        key = planned[str(file)][0] if str(file) in planned else ""
        if key in failed:
            found[file] = failed[key].reason
        elif not key and str(file) in unread:
            found[file] = unread[str(file)]
    return found
