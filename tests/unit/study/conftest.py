"""Study files on the sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lookonce.files import write_json
from lookonce.run.start_adapter import start_identity
from lookonce.study.expand import StudyRun


@pytest.fixture
def write_study(make_run, tmp_path) -> Callable[..., Path]:
    """Writes a study file; `base` are changes of its base run file, as `make_run` takes them."""

    def write(arms: dict[str, Any], base: dict[str, Any] | None = None, **values: Any) -> Path:
        (tmp_path / "base.yaml").write_text(make_run(**base or {}).to_yaml())
        study = {"base": str(tmp_path / "base.yaml"), "output": str(tmp_path / "study"), "arms": arms} | values
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
        return tmp_path / "study.yaml"

    return write


@pytest.fixture
def look_trained() -> Callable[[StudyRun], None]:
    """Makes a run's folder look as if it had been trained."""

    def make(one: StudyRun) -> None:
        one.folder.claim(one.run, start_identity(one.run, {}))
        one.folder.adapter.mkdir()
        (one.folder.adapter / "adapter_model.safetensors").write_text(f"weights of {one.name}")
        figures = {"num_steps": 4, "first_step": 0, "num_samples": 32, "num_too_long": 0, "seconds": 3.2}
        write_json(one.folder.trained, figures | {"wait_share": 0.0})

    return make
