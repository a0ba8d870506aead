"""Access tokens in the environment are in nothing that is written or printed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from lookonce.cli import main

pytestmark = pytest.mark.guarantee("Nothing that is written contains an access token.")

SECRETS = {
    "HF_TOKEN": "hf_plantedHubToken0123456789",
    "HUGGING_FACE_HUB_TOKEN": "hf_plantedOldHubToken0123456789",
    "WANDB_API_KEY": "plantedwandbkey0123456789abcdef0123456789",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password",
    "MLFLOW_TRACKING_TOKEN": "planted-mlflow-token",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-key",
}


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)


@pytest.fixture
def model_hub(sample: Path, make_hub: Callable[..., Any]) -> Any:
    return make_hub(
        "owner/model", "models", {path.name: path.read_bytes() for path in (sample / "model").iterdir()}, []
    )


def invoke(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["--debug", *words])
    assert done.exit_code == code, done.output
    return done.output


def assert_without_secrets(text: str, folder: Path) -> None:
    contents = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for secret in SECRETS.values():
        assert secret not in text
        assert [name for name, content in contents.items() if secret.encode() in content] == []


def test_a_whole_training_keeps_them_to_itself(make_cached_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where `report` writes
    run = make_cached_run(train={"steps": 2, "save_steps": 1, "track": ["tensorboard"]})
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    output = invoke("train", str(tmp_path / "run.yaml"))
    output += invoke("eval", str(run.output), "--split", "val")
    output += invoke("report", str(run.output)) + invoke("status", str(run.output))
    assert Path("report.html").exists() and (run.output / "tensorboard").exists()
    assert_without_secrets(output, tmp_path)


@pytest.mark.parametrize("refusal", [(401, "GatedRepo"), (500, "")])
def test_a_download_that_fails_keeps_them_to_itself(make_run, sample, tmp_path, model_hub, refusal):
    model_hub.refuses = refusal
    values = yaml.safe_load(make_run().to_yaml()) | {"model": {"path": model_hub.name}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    output = invoke("fetch", str(tmp_path / "run.yaml"), code=1)
    assert model_hub.name in output
    assert_without_secrets(output, tmp_path)


def test_a_failure_with_a_traceback_keeps_them_to_itself(make_cached_run, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("planted failure")

    run = make_cached_run(train={"steps": 1})
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    monkeypatch.setattr("lookonce.train.train.add_lora", fail)
    output = invoke("train", str(tmp_path / "run.yaml"), code=1)
    assert "planted failure" in output and os.environ["HF_TOKEN"] == SECRETS["HF_TOKEN"]
    assert_without_secrets(output, tmp_path)
