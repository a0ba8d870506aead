"""One tower for all builds."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def towers_are_loaded_once(one_tower: None) -> None:
    pass
