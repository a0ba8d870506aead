"""Loads the fixtures in `support/`: sample and run files, caches, tokenizers, trainings, studies, processes, disks.

They import torch and transformers. The process of `pytest --numprocesses` that only hands out the tests does not load
them, so the processes that run the tests start five seconds sooner.
"""

from __future__ import annotations

import gc
import os
import signal

import pytest

PLUGINS = "small_caches sample cache_site hub chat_tokenizers trainings studies processes disks".split()


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("LOOKONCE_SELFTEST", "off")  # else the first training of the tests would run it on a GPU
    if not config.getoption("numprocesses", None):
        gc.disable()  # imports leave little to collect; to look for it takes two seconds
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a script starts with `&` ignores it
        limit_threads()
        for name in PLUGINS:
            config.pluginmanager.import_plugin(f"support.{name}")
        limit_examples()


def limit_threads() -> None:
    """Two threads instead of eight read small files, since starting a thread takes longer than reading one."""
    from lookonce import files

    files.NUM_THREADS = 2  # before any module imports the number


def limit_examples() -> None:
    """Half as many examples as hypothesis draws by default; a test may ask for other numbers."""
    from hypothesis import settings

    settings.register_profile("quick", max_examples=50, deadline=None, database=None)
    settings.load_profile("quick")


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which otherwise takes a sixth of the unit tests' time."""
    gc.freeze()
    gc.set_threshold(10_000)  # by default 700 new objects start a search, and there are many searches
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude also what a file of tests has left for good."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
