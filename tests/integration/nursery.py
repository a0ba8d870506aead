"""A nursery of workers, a program: it imports and loads everything once, then forks a worker for each line it reads.

So a worker is there in some milliseconds. Its tower is the sample's, made slow, so that kills hit it at work.
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
    """Takes its time with each image, and leaves a byte for it in a file."""

    def __init__(self, tower: Tower, log: Path, seconds: float) -> None:
        self.device, self.dtype, self.merge_size = tower.device, tower.dtype, tower.merge_size
        self.tokens_per_forward = tower.tokens_per_forward
        self._tower, self._seconds = tower, seconds
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def encode(self, patches: Any, grids: Any) -> Any:
        os.write(self._log, b"." * len(grids))
        time.sleep(self._seconds)
        return self._tower.encode(patches, grids)


def main(model: Path, place: Path) -> None:
    """For each line on stdin, `{"name": ..., "root": ..., ...}`, fork a worker and print its number."""
    build.POLL_S = 0.05
    model_folder, processor = ModelFolder.open(str(model)), ImageProcessor(model)
    fingerprint = Fingerprint.of(model_folder, processor, "float32")
    tower = Tower(model_folder, fingerprint.storage.compute)
    images = index_images([Record(tuple(sorted((place / "images").iterdir())), ())])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are buried at once
    tqdm.set_lock(threading.RLock())  # its own is shared by forks, and would be lost with one that is killed
    print(fingerprint.folder_name, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        load_slow = partial(SlowTower, tower, place / "encoded" / order["name"], order["seconds"])
        worker = order["worker"] and tuple(order["worker"])
        options = BuildOptions(order["shard_bytes"], worker=worker, expiry_s=order["expiry_s"])
        try:
            report = build_cache(place / order["root"], fingerprint, processor, images, load_slow, options)
            outcome = asdict(report)
        except BaseException as error:
            outcome = {"error": repr(error)}
        temporary = place / "outcomes" / f".{order['name']}"
        temporary.write_text(json.dumps(outcome, default=str))
        temporary.rename(place / "outcomes" / order["name"])
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
