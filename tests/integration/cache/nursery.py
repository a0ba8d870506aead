"""A program that loads everything once, then forks a cache worker for each line of the named pipe `requests`.

So a worker starts in milliseconds. Its tower is the sample's, slowed down, so that kills hit it while it encodes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.cache.build import worker as build
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.datasets.images import index_images
from lookonce.datasets.records import Record


class SlowTower:
    """A tower that sleeps after each image, and writes a byte for it to a file."""

    def __init__(self, tower: Tower, log: Path, seconds: float) -> None:
        self.device, self.dtype, self.merge_size = tower.device, tower.dtype, tower.merge_size
        self.tokens_per_tower_batch = tower.tokens_per_tower_batch
        self._tower, self._seconds = tower, seconds
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def encode(self, patches: Any, grids: Any) -> Any:
        os.write(self._log, b"." * len(grids))
        time.sleep(self._seconds)
        return self._tower.encode(patches, grids)


def main(model: Path, folder: Path) -> None:
    """For each request, `{"name": ..., "root": ..., ...}`, fork a worker and write its process id to `answers`."""
    requests, answers = (folder / "requests").open(), (folder / "answers").open("w", buffering=1)
    build.POLL_S = 0.05
    model_folder, processor = ModelFolder.open(str(model)), ImageProcessor(model)
    fingerprint = Fingerprint.of(model_folder, processor, "float32")
    tower = Tower(model_folder, fingerprint.storage.compute)
    images = index_images([Record(tuple(sorted((folder / "images").iterdir())), ())])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps ended workers at once
    tqdm.set_lock(threading.RLock())  # its default lock is shared by forks, and a killed worker would never release it
    print(fingerprint.folder_name, file=answers)
    for line in requests:
        request = json.loads(line)
        if pid := os.fork():
            print(pid, file=answers)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        load_slow = partial(SlowTower, tower, folder / "encoded" / request["name"], request["seconds"])
        worker = request["worker"] and tuple(request["worker"])
        options = BuildOptions(request["shard_bytes"], worker=worker, expiry_s=request["expiry_s"])
        try:
            report = build_cache(folder / request["root"], fingerprint, processor, images, load_slow, options)
            outcome = asdict(report)
        except BaseException as error:
            outcome = {"error": repr(error)}
        temporary = folder / "outcomes" / f".{request['name']}"
        temporary.write_text(json.dumps(outcome, default=str))
        temporary.rename(folder / "outcomes" / request["name"])
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
