"""Loads the fixtures in `support/`: the sample and run files on it, caches of fake features, trainings, processes.

They import torch and transformers. The process of `pytest --numprocesses` that only hands out the tests does not load
them, so the processes that run the tests start five seconds sooner.
"""

from __future__ import annotations

import gc

import pytest

PLUGINS = ("sample", "cache_site", "hub", "trainings", "processes")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None):
        for name in PLUGINS:
            config.pluginmanager.import_plugin(f"support.{name}")


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which otherwise takes a sixth of the unit tests' time."""
    gc.collect()
    gc.freeze()
