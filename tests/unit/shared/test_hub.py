"""The hashes of files are those that git and sha256sum compute, and notes hold only for the files that they name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.hf_api import RepoFile

import lookonce.hub as module
from lookonce.errors import ModelError, SourceError
from lookonce.hub import Progress, Stated, verify

COMMIT = "1" * 40
EMPTY, HELLO = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", "ce013625030ba8dba906f756967f9e9ca394464a"
"""What `git hash-object` prints for an empty file, and for a line with "hello"."""
HELLO_SHA256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"


@pytest.mark.parametrize(
    ("content", "kind", "hash"),
    [(b"", "git blob id", EMPTY), (b"hello\n", "git blob id", HELLO), (b"hello\n", "sha256", HELLO_SHA256)],
)
def test_hashes_are_those_of_git_and_sha256sum(tmp_path, content, kind, hash):
    (tmp_path / "file").write_bytes(content)
    with Progress(total=len(content)) as progress:
        assert Stated("file", tmp_path / "file", kind, hash).computed(progress) == hash


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

    def list_repo_tree(name: str, **options: Any) -> list[RepoFile]:
        asked.append((name, options["revision"]))
        return tree

    def repo_info(name: str, **options: Any) -> None:
        if (tmp_path / "unreachable").exists():
            raise ConnectionError

    monkeypatch.setattr(module, "HfApi", lambda: SimpleNamespace(list_repo_tree=list_repo_tree, repo_info=repo_info))
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
        with pytest.raises(ModelError, match=f"a.json has the git blob id .*, and the Hub states {HELLO}"):
            verify("model", "owner/model", folder)


@pytest.mark.parametrize("damage", ["{", "[]", '{"files": 3}', '{"folder": "elsewhere"}'])
def test_a_damaged_note_counts_as_none(folder, damage):
    verify("model", "owner/model", folder)
    note = module._note(folder)
    value = json.loads(note.read_text())
    note.write_text(json.dumps(value | json.loads(damage)) if damage.startswith('{"') else damage)
    assert verify("model", "owner/model", folder) and len(module.asked) == 2


def test_a_folder_for_notes_that_cannot_be_written_is_not_an_error(folder):
    (folder.parent / "assets").write_text("a file")
    assert verify("model", "owner/model", folder) and verify("model", "owner/model", folder)
    assert len(module.asked) == 2


def test_a_file_that_the_hub_does_not_list_and_that_would_be_read_is_refused(folder):
    verify("model", "owner/model", folder)
    (folder / "notes.md").write_text("mine")
    assert verify("model", "owner/model", folder) and len(module.asked) == 2
    assert verify("model", "owner/model", folder) and len(module.asked) == 2
    extra = folder / "it's new\n.py"
    extra.write_text("x = 1")
    with pytest.raises(ModelError, match=f"does not list at commit {COMMIT}, and that would be read: it's new.n.py"):
        verify("model", "owner/model", folder)
    extra.unlink()
    assert verify("model", "owner/model", folder)


def test_a_link_to_a_folder_is_refused(folder, tmp_path):
    (folder / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(SourceError, match="would be read: additional_chat_templates"):
        verify("dataset", "owner/data", folder)


def test_more_files_are_refused_if_patterns_say_that_they_will_be_read(folder):
    (folder / "below" / "c.png").touch()
    with pytest.raises(SourceError, match=r"would be read: below/c.png\n.* && lookonce data prepare DATASET DIR$"):
        verify("dataset", "owner/data", folder, ["below/*"])
    assert verify("dataset", "owner/data", folder)
