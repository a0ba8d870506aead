"""Prefetch: batches in order and in bounded number, errors raised where the batch is asked for, and a clean end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support.processes import wait_until

from lookonce.train.data.batches import Prefetcher

CPU = torch.device("cpu")
STEPS = [[1, 2], [3], [4, 5, 6]]


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"number": torch.tensor(number)}


@pytest.fixture
def prefetcher_of() -> Iterator[Callable[..., Prefetcher]]:
    """Makes prefetchers that are closed at the end."""
    made: list[Prefetcher] = []

    def make(steps=STEPS, make=batch, num_ahead=2) -> Prefetcher:
        made.append(Prefetcher(iter(steps), make, CPU, num_ahead))
        return made[-1]

    yield make
    for prefetcher in made:
        prefetcher.close()


def numbers(step: Iterator[tuple[dict[str, torch.Tensor], bool]]) -> list[tuple[int, bool]]:
    return [(int(batch["number"]), is_last) for batch, is_last in step]


@pytest.mark.parametrize("num_ahead", [1, 2, 10])
def test_batches_come_in_order_and_the_last_of_each_step_is_marked(prefetcher_of, num_ahead):
    prefetcher = prefetcher_of(num_ahead=num_ahead)
    assert numbers(prefetcher.step()) == [(1, False), (2, True)]
    assert numbers(prefetcher.step()) == [(3, True)]
    assert numbers(prefetcher.step()) == [(4, False), (5, False), (6, True)]
    assert numbers(prefetcher.step()) == []


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_at_most_num_ahead_batches_and_the_one_waiting_for_the_queue_are_made(prefetcher_of, num_ahead):
    made: list[int] = []

    def make(number: int) -> dict[str, torch.Tensor]:
        made.append(number)
        return batch(number)

    step = prefetcher_of([list(range(20))], make, num_ahead).step()
    for num_used in (0, 1, 2):
        wait_until(lambda: len(made) == num_used + num_ahead + 1)  # noqa: B023
        time.sleep(0.05)
        assert made == list(range(num_used + num_ahead + 1))
        next(step)


def test_an_error_is_raised_where_its_batch_is_asked_for(prefetcher_of):
    def make(number: int) -> dict[str, torch.Tensor]:
        if number == 5:
            raise OSError("the disk is gone")
        return batch(number)

    prefetcher = prefetcher_of(make=make, num_ahead=10)
    assert numbers(prefetcher.step()) == [(1, False), (2, True)]
    assert numbers(prefetcher.step()) == [(3, True)]
    step = prefetcher.step()
    assert int(next(step)[0]["number"]) == 4
    with pytest.raises(OSError, match="the disk is gone"):
        next(step)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("num_used", [0, 1, 6])
def test_close_ends_the_thread_wherever_it_is(prefetcher_of, num_used):
    prefetcher = prefetcher_of(num_ahead=1)
    for _ in range(num_used):
        step = prefetcher.step() if prefetcher is not None else None
        next(step)
    prefetcher.close()
    assert prefetch_threads() == []
    prefetcher.close()


def test_waiting_is_counted_and_a_ready_batch_needs_none(prefetcher_of):
    release, made = threading.Semaphore(0), []

    def make(number: int) -> dict[str, torch.Tensor]:
        release.acquire()
        made.append(number)
        return batch(number)

    prefetcher = prefetcher_of([[1], [2], [3]], make)
    threading.Timer(0.3, release.release).start()
    numbers(prefetcher.step())
    assert prefetcher.wait_seconds > 0.1
    before = prefetcher.wait_seconds
    release.release(2)
    wait_until(lambda: made == [1, 2, 3])
    time.sleep(0.05)
    numbers(prefetcher.step())
    numbers(prefetcher.step())
    assert prefetcher.wait_seconds - before < 0.1
