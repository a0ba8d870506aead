"""The base model's name on the Hub: known, given or asked for, and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookonce.adapter.card import find_base_model
from lookonce.errors import ModelError, UsageError
from lookonce.run.sections import ModelSection

COMMIT = "a1" * 20


@pytest.fixture
def nothing_here(monkeypatch):
    def absent(*_, **__):
        raise ModelError("not here")

    monkeypatch.setattr("lookonce.adapter.card.find_model", absent)


def test_a_name_in_the_run_file_is_taken_with_its_commit(nothing_here):
    base = find_base_model(ModelSection(path="owner/name", revision=COMMIT))
    assert (base.name, base.commit, base.licence) == ("owner/name", COMMIT, None)
    assert find_base_model(ModelSection(path="owner/name", revision="main")).commit is None


def test_a_branch_is_the_commit_that_is_on_this_machine(monkeypatch, tmp_path):
    folder = tmp_path / COMMIT
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    monkeypatch.setattr("lookonce.adapter.card.find_model", lambda *_, **__: folder)
    base = find_base_model(ModelSection(path="owner/name", revision="main"))
    assert (base.commit, base.licence) == (COMMIT, "apache-2.0")


def test_the_folder_of_a_download_has_the_name_and_the_commit(tmp_path):
    folder = tmp_path / "hub" / "models--Qwen--Qwen3-VL-2B" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    base = find_base_model(ModelSection(path=str(folder)))
    assert (base.name, base.commit) == ("Qwen/Qwen3-VL-2B", COMMIT)


def test_any_other_folder_needs_a_name(tmp_path):
    model = ModelSection(path=str(tmp_path))
    with pytest.raises(UsageError, match=r"its name on the Hub is not known; name it: --base-model OWNER/NAME"):
        find_base_model(model)
    assert find_base_model(model, "owner/name").name == "owner/name"
    assert find_base_model(model, f"owner/name@{COMMIT}").commit == COMMIT
    with pytest.raises(UsageError, match="neither a folder any more nor a name on the Hub"):
        find_base_model(ModelSection(path=str(Path("/none/of/these"))))


@pytest.mark.parametrize("given", ["name", "/a/b", "owner/name@main", "a/b/c", ""])
def test_a_malformed_name_is_refused(given, tmp_path):
    with pytest.raises(UsageError, match="is not a model on the Hub; write OWNER/NAME"):
        find_base_model(ModelSection(path=str(tmp_path)), given)
