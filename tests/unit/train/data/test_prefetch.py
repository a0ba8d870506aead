"""Reading ahead: in order, a bounded number of batches, errors where the batch is asked for, and it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lookonce.train.data.prefetch import ReadAhead

CPU = torch.device("cpu")
STEPS = [[1, 2], [3], [4, 5, 6]]


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"number": torch.tensor(number)}


@pytest.fixture
def read_ahead() -> Iterator[Callable[..., ReadAhead]]:
    """Makes readers that are closed at the end."""
    made: list[ReadAhead] = []

    def make(steps=STEPS, make=batch, num_ahead=2) -> ReadAhead:
        made.append(ReadAhead(iter(steps), make, CPU, num_ahead))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


def numbers(step: Iterator[tuple[dict[str, torch.Tensor], bool]]) -> list[tuple[int, bool]]:
    return [(int(batch["number"]), is_last) for batch, is_last in step]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("num_ahead", [1, 2, 10])
def test_batches_come_in_order_step_by_step_and_the_last_of_each_is_told(read_ahead, num_ahead):
    reader = read_ahead(num_ahead=num_ahead)
    assert numbers(reader.step()) == [(1, False), (2, True)]
    assert numbers(reader.step()) == [(3, True)]
    assert numbers(reader.step()) == [(4, False), (5, False), (6, True)]
    assert numbers(reader.step()) == []


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_no_more_are_made_than_so_many_ahead_and_the_one_that_waits_for_a_place(read_ahead, num_ahead):
    made: list[int] = []

    def make(number: int) -> dict[str, torch.Tensor]:
        made.append(number)
        return batch(number)

    step = read_ahead([list(range(20))], make, num_ahead).step()
    for num_used in (0, 1, 2):
        wait_until(lambda: len(made) == num_used + num_ahead + 1)  # noqa: B023
        time.sleep(0.05)
        assert made == list(range(num_used + num_ahead + 1))
        next(step)


def test_steps_are_not_asked_for_before_their_turn(read_ahead):
    asked: list[int] = []

    def steps() -> Iterator[list[int]]:
        for number in range(100):
            asked.append(number)
            yield [number]

    reader = read_ahead(steps(), num_ahead=2)
    numbers(reader.step())
    time.sleep(0.05)
    assert len(asked) <= 1 + 2 + 1


def test_an_error_is_raised_where_its_batch_is_asked_for(read_ahead):
    def make(number: int) -> dict[str, torch.Tensor]:
        if number == 5:
            raise OSError("the disk has gone")
        return batch(number)

    reader = read_ahead(make=make, num_ahead=10)
    assert numbers(reader.step()) == [(1, False), (2, True)]
    assert numbers(reader.step()) == [(3, True)]
    step = reader.step()
    assert int(next(step)[0]["number"]) == 4
    with pytest.raises(OSError, match="the disk has gone"):
        next(step)


def test_an_error_of_the_order_itself_is_raised_too(read_ahead):
    def steps() -> Iterator[list[int]]:
        yield [1]
        raise ValueError("an example is too long")

    reader = read_ahead(steps())
    assert numbers(reader.step()) == [(1, True)]
    with pytest.raises(ValueError, match="too long"):
        next(reader.step())


def read_ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read ahead"]


@pytest.mark.parametrize("num_used", [0, 1, 6])
def test_close_ends_the_thread_wherever_it_is(read_ahead, num_used):
    reader = read_ahead(num_ahead=1)
    for _ in range(num_used):
        step = reader.step() if reader is not None else None
        next(step)
    reader.close()
    assert read_ahead_threads() == []
    reader.close()


def test_close_ends_a_thread_that_is_making_a_batch(read_ahead):
    begun = threading.Event()

    def make(number: int) -> dict[str, torch.Tensor]:
        begun.set()
        time.sleep(0.1)
        return batch(number)

    reader = read_ahead([[number] for number in range(1000)], make)
    begun.wait()
    reader.close()
    assert read_ahead_threads() == []


def test_waiting_is_counted_and_what_is_ready_needs_none(read_ahead):
    release, made = threading.Semaphore(0), []

    def make(number: int) -> dict[str, torch.Tensor]:
        release.acquire()
        made.append(number)
        return batch(number)

    reader = read_ahead([[1], [2], [3]], make)
    threading.Timer(0.3, release.release).start()
    numbers(reader.step())
    assert reader.wait_seconds > 0.1
    before = reader.wait_seconds
    release.release(2)
    wait_until(lambda: made == [1, 2, 3])
    time.sleep(0.05)
    numbers(reader.step())
    numbers(reader.step())
    assert reader.wait_seconds - before < 0.1
