"""Signals that ask to stop: which of them leave time, and that the previous handlers are restored."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import NOTICE, WARNING, send

from lookonce.cache.build.worker import StopSignals

pytestmark = pytest.mark.usefixtures("restored_handlers")


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
        assert (stop.now, stop.name) == (now, name)
    send(NOTICE)  # not handled any more
    assert stop.name == name


def test_signals_are_not_handled_outside_the_main_thread():
    def use() -> None:
        with StopSignals() as stop:
            assert signal.getsignal(WARNING) is signal.SIG_IGN
            assert not stop.name

    with ThreadPoolExecutor(1) as threads:
        threads.submit(use).result()
