"""Study files on the sample, and run folders that look as if they had been trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import Prediction, write_predictions
from lookonce.files import write_json
from lookonce.run.open import answers_identity
from lookonce.run.start_adapter import start_identity
from support.answers import look_finished
from support.answers import look_trained as look_folder_trained

if TYPE_CHECKING:
    from lookonce.study.file import StudyRun


@pytest.fixture(scope="session")
def write_study_in(make_run_in) -> Callable[..., Path]:
    """Writes a study file into a folder; `base` are changes of its base run file, as `make_run_in` takes them."""

    def write(folder: Path, variants: dict[str, Any], base: dict[str, Any] | None = None, **values: Any) -> Path:
        (folder / "base.yaml").write_text(make_run_in(folder, **base or {}).to_yaml())
        study = {"base": str(folder / "base.yaml"), "output": str(folder / "study"), "variants": variants} | values
        (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
        return folder / "study.yaml"

    return write


@pytest.fixture
def write_study(write_study_in, tmp_path) -> Callable[..., Path]:
    """Writes a study file into the test's folder."""
    return functools.partial(write_study_in, tmp_path)


@pytest.fixture(scope="session")
def look_trained() -> Callable[[StudyRun], None]:
    """Makes a run's folder look as if it had been trained."""

    def make(one: StudyRun) -> None:
        one.folder.claim(one.settings, start_identity(one.settings, {}) | answers_identity(one.settings.data.context))
        one.folder.adapter.mkdir()
        (one.folder.adapter / "adapter_model.safetensors").write_text(f"weights of {one.name}")
        look_folder_trained(one.folder, wait_share=0.0)

    return make


@pytest.fixture(scope="session")
def look_complete(look_trained) -> Callable[[StudyRun, list[Prediction]], None]:
    """Makes a run's folder look as if it had been trained and evaluated with these answers."""

    def make(one: StudyRun, rows: list[Prediction]) -> None:
        look_trained(one)
        write_predictions(one.folder.predictions("val"), rows)
        evaluation = Evaluation.of(rows, metric=one.settings.eval.metric)
        write_json(one.folder.metrics("val"), evaluation.to_json())
        write_json(one.folder.answering("val"), {"num_answered": len(rows), "seconds": 1.5})
        look_finished(one.folder)

    return make
