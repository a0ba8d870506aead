"""Prefetch: batches are made on a thread, ahead of the steps that use them.

Design: one thread reads features (with the cache's own threads, straight into page-locked memory), collates them and,
on a GPU, copies them to the device on a stream of its own, a bounded number of micro-batches ahead. A thread serves as
well as processes would: its work releases the GIL almost all the time, no data is copied between processes, and one
host cache of features serves all. The time that training waits for batches is counted; it is the cost of a slow disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from lookonce.train.data.features import Batch

T = TypeVar("T")
"""What a batch is made of."""
Item = tuple[Batch, "torch.cuda.Event | None", bool] | Exception | None
"""A batch, when it is on the device and whether it is its step's last; or an error; or None after the last step."""


class Prefetcher(Generic[T]):
    """Makes the batches of steps, `num_ahead` of them before they are asked for."""

    def __init__(
        self,
        steps: Iterator[list[T]],
        make: Callable[[T], Batch],
        device: torch.device,
        num_ahead: int,
    ) -> None:
        self.wait_seconds = 0.0
        """Time spent waiting for batches so far."""
        self._steps, self._make, self._device = steps, make, device
        self._queue: queue.Queue[Item] = queue.Queue(num_ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def step(self) -> Iterator[tuple[Batch, bool]]:
        """The next step's batches, each with whether it is the step's last. Empty after the last step.

        The batches of the previous step must have been used up.
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
        """End the thread and drop the batches that are ready."""
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
        except Exception as error:  # raised by `step`, where the batch is asked for
            self._queue.put(error)

    def _batches(self, step: list[T]) -> Iterator[Item]:
        for number, micro_batch in enumerate(step, start=1):
            yield *self._on_device(micro_batch), number == len(step)

    def _on_device(self, micro_batch: T) -> tuple[Batch, torch.cuda.Event | None]:
        if self._device.type != "cuda":
            return self._make(micro_batch), None
        stream = self._stream()
        with torch.cuda.stream(stream):
            return self._make(micro_batch), stream.record_event()

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self, "_own_stream"):
            self._own_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._own_stream
