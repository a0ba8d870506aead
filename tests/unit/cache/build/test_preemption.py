"""Signals that ask to stop: which of them leave time, and that the previous handlers are restored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lookonce.cache.build.preemption import StopSignals

NOTICE, WARNING = signal.SIGUSR1, signal.SIGTERM


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """However a test ends, the previous handlers are restored."""
    before = [signal.signal(number, signal.SIG_IGN) for number in (NOTICE, WARNING)]
    yield
    after = [signal.signal(number, handler) for number, handler in zip((NOTICE, WARNING), before, strict=True)]
    assert after == [signal.SIG_IGN, signal.SIG_IGN]


@pytest.mark.parametrize(
    ("signals", "now", "name"),
    [
        ([NOTICE], False, "SIGUSR1"),
        ([WARNING], True, "SIGTERM"),
        ([NOTICE, NOTICE], True, "SIGUSR1"),
        ([NOTICE, WARNING], True, "SIGUSR1"),
        ([WARNING, NOTICE], True, "SIGTERM"),
        ([WARNING, WARNING], True, "SIGTERM"),
        ([NOTICE, NOTICE, NOTICE], True, "SIGUSR1"),
        ([], False, ""),
    ],
)
def test_only_a_single_notice_leaves_time_to_finish_the_shard(signals, now, name):
    with StopSignals() as stop:
        send(*signals)
        assert (stop.soon, stop.now, stop.name) == (bool(signals), now, name)
    send(NOTICE)  # not handled any more
    assert stop.name == name


def test_signals_are_not_handled_outside_the_main_thread():
    def use() -> None:
        with StopSignals() as stop:
            assert signal.getsignal(WARNING) is signal.SIG_IGN
            assert not stop.soon

    with ThreadPoolExecutor(1) as threads:
        threads.submit(use).result()
