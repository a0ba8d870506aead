"""Fixtures of cache maintenance: built caches, and a repair followed by a build."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lookonce.cache.maintenance.verify import RepairReport, repair, verify
from lookonce.cache.store.metadata import finished_shards
from lookonce.cache.store.reader import read_index
from lookonce.datasets.images import ImageIndex


@pytest.fixture
def folder(site: Any, images: ImageIndex) -> Path:
    """A cache of several shards."""
    folder = Path(site.build_once(images))
    assert len(finished_shards(folder)) > 2
    return folder


@pytest.fixture
def folder_with_quarantine(site: Any, images: ImageIndex) -> Path:
    """A cache of several shards with an image in quarantine."""
    (site.path / "bad.png").write_text("no image")
    return Path(site.build_once(site.index(*images.key_of, site.path / "bad.png")))


@pytest.fixture
def caches(folder: Path) -> Path:
    """The folder of caches."""
    return folder.parent


@pytest.fixture
def other(site: Any, images: ImageIndex, folder: Path) -> Path:
    """A second cache in the same folder of caches."""
    compute = site.use("bfloat16")
    site.build(images, lambda: site.Tower(dtype=compute))
    return Path(site.folder())


@pytest.fixture
def before(site: Any, folder: Path) -> Iterator[dict[str, bytes]]:
    """The features, which must be the same again when the test ends."""
    features = site.stored()
    yield features
    assert site.stored() == features
    assert verify(folder).problems == [] and read_index(folder, site.fingerprint.sha256)
    assert site.leftovers() == []


@pytest.fixture
def run_repair(site: Any) -> Callable[..., RepairReport]:
    """Repairs a cache and builds what it lacks then."""

    def run(images: ImageIndex, **options: Any) -> RepairReport:
        report, to_build = repair(site.folder(), site.fingerprint, images, **options)
        if report.removed or report.rewritten:
            site.build(to_build)
        json.dumps(asdict(report), default=str)
        return report

    return run
