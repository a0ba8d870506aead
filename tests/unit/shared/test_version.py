"""The commit is the one that pip noted, that of an editable checkout with a mark for changes, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lookonce import version

COMMIT = "c" * 40


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what pip noted of the installation."""

    def set_note(value: Any) -> None:
        text = value if isinstance(value, str | None) else json.dumps(value)
        monkeypatch.setattr(version, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))

    version.commit.cache_clear()
    yield set_note
    version.commit.cache_clear()


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that git was asked about; it names a commit and changes."""
    asked: list[Path] = []

    def run(command: tuple[str, ...], cwd: Path, **options: Any) -> SimpleNamespace:
        asked.append(cwd)
        return SimpleNamespace(stdout=f"{COMMIT}-dirty\n")

    monkeypatch.setattr("subprocess.run", run)
    return asked


def test_a_commit_that_pip_installed_is_the_one_it_noted(installed, described):
    installed({"url": "https://example.org/lookonce.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}})
    assert version.commit() == COMMIT and described == []


def test_git_is_asked_for_the_commit_of_an_editable_checkout(installed, described, root, tmp_path):
    (tmp_path / "with space").symlink_to(root)
    installed({"url": f"file://{tmp_path}/with%20space", "dir_info": {"editable": True}})
    is_checkout = (root / ".git").exists()
    assert version.commit() == (f"{COMMIT}-dirty" if is_checkout else None)
    assert described == [tmp_path / "with space"] * is_checkout


@pytest.mark.parametrize(
    "note",
    [
        None,
        "{",
        {"url": "file:///tmp", "dir_info": {"editable": True}},
        {"url": "file:///tmp/lookonce.whl", "archive_info": {}},
    ],
)
def test_without_a_note_of_a_commit_there_is_none(installed, described, note):
    installed(note)
    assert version.commit() is None and described == []
