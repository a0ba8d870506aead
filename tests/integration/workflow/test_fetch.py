"""`lookonce fetch` with huggingface_hub itself and a local Hub: what it downloads is found by jobs without internet."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cli import main
from lookonce.errors import DiskFull, ModelError
from lookonce.fetch import fetch, job_environment

NAME = "owner/model"
FIRST, SECOND = "1" * 39 + "a", "2" * 39 + "b"
CARD = b"---\nlicense: apache-2.0\n---\n# A model\n"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def hub(sample: Path, make_hub: Callable[..., Any]) -> Any:
    files = {path.name: path.read_bytes() for path in (sample / "model").iterdir()}
    return make_hub(NAME, "models", files | {"README.md": CARD, "pytorch_model.bin": b"x" * 10_000}, [])


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process behave like a job without internet."""
    return lambda: monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.guarantee("Offline, a fetched model or data set is found at the same commit.")
@pytest.mark.parametrize(("revision", "commit"), [(None, SECOND), ("main", SECOND), (FIRST, FIRST)])
def test_what_was_fetched_is_found_offline_at_the_same_commit(hub, make_run, offline, revision, commit):
    model = {"path": NAME, "revision": revision}
    report = fetch(make_run(model=model))
    assert (report.commit, report.license, report.is_pinned) == (commit, "apache-2.0", revision == FIRST)
    assert report.downloaded_bytes == report.size_bytes == sum(map(len, hub.files.values())) - 10_000
    assert all(f"/resolve/{commit}/" in path for path in hub.asked if "resolve" in path)
    assert not (report.folder / "pytorch_model.bin").exists() and report.problems == []
    offline()
    assert ModelFolder.open(NAME, revision).folder == ModelFolder.open(NAME, revision, is_local=True).folder
    assert ModelFolder.open(NAME, revision).folder == report.folder
    hub.asked.clear()
    again = fetch(make_run(model=model))
    assert (again.commit, again.downloaded_bytes, again.license) == (commit, 0, "apache-2.0")
    assert again.is_verified and hub.asked == [] and "nothing to download; contents verified" in again.text()


@pytest.mark.parametrize("is_local", [False, True])
def test_an_incomplete_download_is_reported_offline_with_the_command(hub, make_run, offline, is_local):
    report = fetch(make_run(model={"path": NAME, "revision": FIRST}))
    (report.folder / "model.safetensors").unlink()
    offline()
    for revision in (FIRST, SECOND):
        with pytest.raises(ModelError, match=f"download of model '{NAME}' at revision {revision} .* lookonce fetch"):
            ModelFolder.open(NAME, revision, is_local=is_local)


def test_opening_a_local_model_makes_no_request_to_the_hub(hub):
    with pytest.raises(ModelError, match="no complete download of .*; with internet access run"):
        ModelFolder.open(NAME, is_local=True)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("model", "refuses", "message"),
    [
        ({"path": "owner/other"}, None, "no model 'owner/other' that you may access .*; check `model.path`"),
        ({"path": NAME, "revision": "v9"}, None, "has no revision 'v9'; name a branch, a tag or a commit"),
        ({"path": NAME}, (403, "GatedRepo"), "its licence: do so at https://huggingface.co/owner/model, then: hf"),
        ({"path": NAME}, (503, ""), "the Hub cannot be reached .*503"),
        ({"path": "nowhere"}, None, "no model folder at"),
    ],
    ids=["unknown", "revision", "gated", "down", "folder"],
)
def test_a_model_that_cannot_be_downloaded_is_refused_with_advice(hub, make_run, monkeypatch, model, refuses, message):
    hub.refuses = refuses
    with pytest.raises(ModelError, match=message):
        fetch(make_run(model=model))


def test_a_download_without_room_on_the_disk_is_not_started(hub, make_run, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(10, 10, 10))
    with pytest.raises(
        DiskFull, match="no room for model 'owner/model' in .*: .* MB are needed .*, 10 B are free, .*HF_HOME"
    ):
        fetch(make_run(model={"path": NAME}))
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.parametrize("absent", ["tokenizer.json", "preprocessor_config.json", "config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_is_refused_before_any_job(make_run, sample, tmp_path, absent):
    folder = Path(shutil.copytree(sample / "model", tmp_path / "model"))
    (folder / absent).unlink()
    with pytest.raises(ModelError, match=str(folder)):
        fetch(make_run(model={"path": str(folder)}))


def test_a_folder_that_lacks_some_of_its_weights_is_refused(make_run, sample, tmp_path):
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(sample / "model", tmp_path / "model"))
    names = load_file(folder / "model.safetensors")
    file_of = {name: "model.safetensors" if ".visual." in name else "absent.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    with pytest.raises(ModelError, match="lacks absent.safetensors of its weights"):
        fetch(make_run(model={"path": str(folder)}))


def test_a_folder_is_only_checked(make_run, sample):
    report = fetch(make_run())
    assert (report.commit, report.is_pinned, report.downloaded_bytes) == (None, True, 0)
    assert report.folder == sample / "model" and "licence" not in report.text()
    assert {split: found.missing for split, found in report.data.items()} == {"train": [], "val": [], "test": []}


def test_missing_records_and_images_are_named_and_counted(make_run, tmp_path):
    report = fetch(make_run(data={"val": str(tmp_path / "no.jsonl"), "test": [], "image_root": str(tmp_path)}))
    assert len(report.problems) == 2 and all("lookonce data prepare -h" in problem for problem in report.problems)
    train = report.data["train"]
    assert len(train.missing) == train.num_images == 46 and report.data.keys() == {"train"}
    assert train.missing[0] in report.problems[0] and "no.jsonl" in report.problems[1]


def test_jobs_get_the_folders_of_the_model_cache(hub, tmp_path, monkeypatch):
    assert job_environment() == {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert job_environment()["HF_HUB_CACHE"] == str(tmp_path / "elsewhere")


def test_the_command_shows_the_licence_and_pins_the_commit(hub, make_run, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(make_run(model={"path": NAME}).to_yaml())
    result = run("fetch", path)
    assert result.exit_code == 0 and "apache-2.0" in result.stdout and "export HF_HUB_OFFLINE=1" in result.stdout
    assert f'pin this one with --pin, or write in section `model`: revision: "{SECOND}"' in result.stderr
    pinned = run("fetch", path, "--pin", "--json")
    assert json.loads(pinned.stdout)["commit"] == SECOND and f"now has model.revision: {SECOND}" in pinned.stderr
    again = run("fetch", path, "--json")
    assert json.loads(again.stdout)["is_pinned"] and again.stderr == ""


def test_the_command_fails_if_something_is_missing(make_run, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(make_run(data={"image_root": str(tmp_path)}).to_yaml())
    result = run("fetch", path)
    assert result.exit_code == 1 and "Not ready: 46 of 46 image files of data.train are missing" in result.stdout
