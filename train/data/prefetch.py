"""Batches made while the steps before them run.

Design: one thread reads features (by the cache's own threads, straight into page-locked memory), makes tensors and, on
a GPU, copies them there on a stream of its own, a bounded number of forward passes ahead. A thread and not processes:
what it does releases Python's lock almost all the time, nothing is copied between processes, and what was read last can
be kept once for all. How long training has waited for it is counted; that is what a slow disk costs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from lookonce.train.data.features import Batch
from lookonce.train.data.sampler import Forward

Item = tuple[Batch, "torch.cuda.Event | None", bool] | Exception | None


class ReadAhead:
    """Makes the batches of steps, `num_ahead` of them ready before they are asked for."""

    def __init__(
        self,
        steps: Iterator[list[Forward]],
        make: Callable[[Forward], Batch],
        device: torch.device,
        num_ahead: int,
    ) -> None:
        self.wait_seconds = 0.0
        """Spent waiting for batches so far."""
        self._steps, self._make, self._device = steps, make, device
        self._queue: queue.Queue[Item] = queue.Queue(num_ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
        self._thread.start()

    def step(self) -> Iterator[tuple[Batch, bool]]:
        """The batches of the next step, each when it is asked for, and whether it is the step's last one.

        The step before must have been used up. After the last step there is nothing.
        """
        is_last = False
        while not is_last:
            item = self._next()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            batch, ready, is_last = item
            if ready is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(ready)
                for tensor in batch.values():
                    if tensor.is_cuda:
                        tensor.record_stream(stream)
            yield batch, is_last

    def close(self) -> None:
        """End the thread; what it has ready is dropped."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _next(self) -> Item:
        start = time.perf_counter()
        item = self._queue.get()
        self.wait_seconds += time.perf_counter() - start
        return item

    def _run(self) -> None:
        try:
            for batches in map(self._batches, self._steps):
                for item in batches:
                    self._queue.put(item)
                    if self._closed.is_set():
                        return
            self._queue.put(None)
        except Exception as error:  # is raised where the batch is asked for
            self._queue.put(error)

    def _batches(self, step: list[Forward]) -> Iterator[Item]:
        for number, forward in enumerate(step, start=1):
            yield *self._on_device(forward), number == len(step)

    def _on_device(self, forward: Forward) -> tuple[Batch, torch.cuda.Event | None]:
        if self._device.type != "cuda":
            return self._make(forward), None
        stream = self._stream()
        with torch.cuda.stream(stream):
            return self._make(forward), stream.record_event()

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self, "_own_stream"):
            self._own_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._own_stream
