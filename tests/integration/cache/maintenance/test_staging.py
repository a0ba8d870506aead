"""Several processes that stage one cache."""

from __future__ import annotations

import multiprocessing

import pytest

from lookonce.cache.maintenance.staging import stage
from lookonce.cache.maintenance.verify import verify
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.cache.store.metadata import finished_shards
from lookonce.cache.store.reader import VisionCache


def features(folder):
    cache = VisionCache.open(folder)
    return {key: bytes(raw_bytes(cache[key])) for key in cache.keys()}  # noqa: SIM118


# Python 3.12 warns when a process with threads forks. Torch has threads; the children only copy files.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_several_processes_stage_together(site, images, tmp_path):
    (site.path / "bad.png").write_text("no image")
    source = site.build_once(site.index(*images.key_of, site.path / "bad.png"))
    context = multiprocessing.get_context("fork")
    copied = context.Queue()

    def run() -> None:
        copied.put(stage(source, tmp_path / "local").num_copied)

    processes = [context.Process(target=run) for _ in range(3)]
    for process in processes:
        process.start()
    assert sum(copied.get(timeout=60) for _ in processes) == len(finished_shards(source))
    for process in processes:
        process.join()
    folder = tmp_path / "local" / source.name
    assert features(folder) == features(source) and verify(folder).problems == []
