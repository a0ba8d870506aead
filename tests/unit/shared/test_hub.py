"""What was verified is noted, and a note holds only for the files that it names as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

import lookonce.hub as module
from lookonce.errors import ModelError, SourceError
from lookonce.hub import verify

COMMIT = "1" * 40
EMPTY, HELLO = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", "ce013625030ba8dba906f756967f9e9ca394464a"
"""What `git hash-object` prints for an empty file, and for a line with "hello"."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit with two files and a Hub that states them; `module.asked` has the requests for hashes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    folder = tmp_path / COMMIT
    (folder / "below").mkdir(parents=True)
    (folder / "a.json").write_bytes(b"hello\n")
    (folder / "below" / "b.json").write_bytes(b"")
    tree = [RepoFile(path=name, size=1, oid=hash) for name, hash in (("a.json", HELLO), ("below/b.json", EMPTY))]
    tree += [RepoFile(path="not/downloaded.json", size=1, oid=HELLO)]
    asked: list[Any] = []

    def list_repo_tree(api: HfApi, repo_id: str, **options: Any) -> list[RepoFile]:
        asked.append((repo_id, options["revision"]))
        return tree

    def repo_info(api: HfApi, repo_id: str, **options: Any) -> None:
        if (tmp_path / "unreachable").exists():
            raise ConnectionError

    monkeypatch.setattr(HfApi, "list_repo_tree", list_repo_tree)
    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    monkeypatch.setattr(module, "asked", asked, raising=False)
    return folder


def test_what_was_verified_is_not_verified_again(folder):
    assert verify("model", "owner/model", folder) and verify("model", "owner/model", folder)
    assert module.asked == [("owner/model", COMMIT)]


def test_without_the_hub_nothing_is_verified_and_nothing_noted(folder):
    (folder.parent / "unreachable").touch()
    assert not verify("model", "owner/model", folder) and module.asked == []
    (folder.parent / "unreachable").unlink()
    assert verify("model", "owner/model", folder) and len(module.asked) == 1


def test_a_file_that_changes_later_is_verified_again(folder):
    verify("model", "owner/model", folder)
    (folder / "a.json").write_bytes(b"jello\n")
    for _ in range(2):
        with pytest.raises(ModelError, match=f"a.json .git-sha1 .*, the Hub states {HELLO}"):
            verify("model", "owner/model", folder)


@pytest.mark.parametrize("damage", ["{", "[]", '{"files": 3}', '{"folder": "elsewhere"}'])
def test_a_damaged_note_counts_as_none(folder, damage):
    verify("model", "owner/model", folder)
    [note] = (folder.parent / "assets").rglob("*.json")
    value = json.loads(note.read_text())
    note.write_text(json.dumps(value | json.loads(damage)) if damage.startswith('{"') else damage)
    assert verify("model", "owner/model", folder) and len(module.asked) == 2


def test_a_folder_for_notes_that_cannot_be_written_is_not_an_error(folder):
    (folder.parent / "assets").write_text("a file")
    assert verify("model", "owner/model", folder) and verify("model", "owner/model", folder)
    assert len(module.asked) == 2


@pytest.mark.parametrize("name", ["it's new\n.py", "notes.md", "below/more.parquet"])
def test_a_file_that_the_hub_does_not_list_is_refused_until_it_is_removed(folder, name):
    verify("model", "owner/model", folder)
    (folder / name).write_text("x = 1")
    shown = name.replace("\n", ".n")
    with pytest.raises(ModelError, match=f"at commit {COMMIT}: {shown} .which the Hub does not list"):
        verify("model", "owner/model", folder)
    (folder / name).unlink()
    assert verify("model", "owner/model", folder)


@pytest.mark.parametrize("name", [".notes", ".cache/a.json", "below/.git/c.py"])
def test_hidden_files_are_left_alone(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    assert verify("model", "owner/model", folder)


@pytest.mark.parametrize("name", ["additional_chat_templates", "a.json"])
def test_a_link_to_a_folder_is_refused_also_in_place_of_a_file(folder, tmp_path, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path)
    with pytest.raises(SourceError, match=rf"{name} .which the Hub does not list.*\n.* && lookonce data prepare"):
        verify("dataset", "owner/data", folder)
