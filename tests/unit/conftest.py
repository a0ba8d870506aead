"""What all unit tests have in common."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

NUMBERS = itertools.count()
"""The numbers of the tests' folders."""


@pytest.fixture(scope="module", autouse=True)
def unit_tests_do_not_wait_for_the_disk(no_fsync: None) -> None:
    pass


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own, as pytest's, which lists the folders of all tests each time to number the next."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(NUMBERS)}"
    path.mkdir(mode=0o700)
    return path
