"""The run file of a run on the sample."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def run_file(make_run, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(make_run().to_yaml())
    return path
