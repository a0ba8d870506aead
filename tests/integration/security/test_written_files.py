"""Nothing that is written or printed has an access token of the environment, and all files follow the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from lookonce.cli import main

NO_TOKEN = pytest.mark.guarantee("No file that lookonce writes contains an access token.")

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


@NO_TOKEN
def test_a_whole_training_keeps_them_to_itself(make_cached_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where `report` writes
    run = make_cached_run(train={"steps": 2, "save_steps": 1, "track": ["tensorboard"]})
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    output = invoke("train", str(tmp_path / "run.yaml"))
    output += invoke("eval", str(run.output), "--split", "val")
    output += invoke("report", str(run.output)) + invoke("status", str(run.output))
    assert Path("report.html").exists() and (run.output / "tensorboard").exists()
    assert_without_secrets(output, tmp_path)


@NO_TOKEN
@pytest.mark.parametrize("refusal", [(401, "GatedRepo"), (500, "")])
def test_a_download_that_fails_keeps_them_to_itself(make_run, sample, tmp_path, model_hub, refusal):
    model_hub.refuses = refusal
    values = yaml.safe_load(make_run().to_yaml()) | {"model": {"path": model_hub.name}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    output = invoke("fetch", str(tmp_path / "run.yaml"), code=1)
    assert model_hub.name in output
    assert_without_secrets(output, tmp_path)


@NO_TOKEN
def test_a_failure_with_a_traceback_keeps_them_to_itself(make_cached_run, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("planted failure")

    run = make_cached_run(train={"steps": 1})
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    monkeypatch.setattr("lookonce.train.train.add_lora", fail)
    output = invoke("train", str(tmp_path / "run.yaml"), code=1)
    assert "planted failure" in output and os.environ["HF_TOKEN"] == SECRETS["HF_TOKEN"]
    assert_without_secrets(output, tmp_path)


@pytest.fixture
def umask() -> Iterator[int]:
    """One that keeps others out, but for reading by a group."""
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def wrong_modes(folder: Path, umask: int) -> dict[str, str]:
    """The files and folders whose mode is not what the umask leaves of 666 or 777."""
    found = {}
    for path in folder.rglob("*"):
        is_code = path.suffix == ".compiled"  # which is not read where others may write
        expected = (0o777 if path.is_dir() else 0o644 if is_code else 0o666) & ~umask
        if not path.is_symlink() and (mode := stat.S_IMODE(path.stat().st_mode)) != expected:
            found[str(path.relative_to(folder))] = oct(mode)
    return found


@pytest.mark.guarantee("New files have the permissions of the umask.")
def test_all_files_follow_the_umask(umask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "work"
    folder.mkdir()
    invoke("sample", "work/sample")
    text = (Path(__file__).parents[3] / "experiments" / "sample.yaml").read_text().replace("data/sample", "work/sample")
    text = text.replace("dir: caches", "dir: work/caches").replace("runs/sample", "work/run")
    (folder / "run.yaml").write_text(text.replace("epochs: 24", "steps: 4\n  save_steps: 2"))
    invoke("cache", "build", "work/run.yaml")
    invoke("train", "work/run.yaml")
    invoke("eval", "work/run", "--split", "test")
    invoke("report", "work/run")
    invoke("predict", "work/run", "--records", "work/sample/test.jsonl", "-o", "work/answers.jsonl")
    invoke("data", "convert", "work/sample/test.jsonl", "work/out/test.parquet")
    invoke("data", "audit", "work/sample/test.jsonl", "--html", "work/audit.html")
    invoke("cache", "verify", "work/run.yaml")
    written = {path.name for path in folder.rglob("*")}
    assert {"adapter_model.safetensors", "optimizer.pt", "report.html", "manifest.json", "test.jsonl"} <= written
    assert wrong_modes(folder, umask) == {}
