"""Files are written whole or not at all, and others can read them as the umask says."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookonce.files import TEMPORARY_MARK, atomic_write, follow_umask, write_json, write_text


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_old_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path and temporary.name.startswith(f"a.txt{TEMPORARY_MARK}")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("old", ["old", None], ids=["replaced", "new"])
def test_failed_write_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, error: type[BaseException], old: str | None
) -> None:
    path = tmp_path / "a.txt"
    if old:
        path.write_text(old)
    with pytest.raises(error), atomic_write(path) as temporary:
        temporary.write_text("ne")
        raise error
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == ({"a.txt": old} if old else {})


def test_write_of_nothing_is_an_error_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), atomic_write(path):
        pass
    assert path.read_text() == "old"


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with atomic_write(path) as outer:
        outer.write_text("outer")
        with atomic_write(path) as inner:
            inner.write_text("inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer"
    assert list(tmp_path.iterdir()) == [path]


def test_written_files_follow_the_umask_whatever_the_writer_chose(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a.safetensors"
    with atomic_write(path) as temporary:
        temporary.touch(mode=0o600)
    assert mode(path) == 0o666 & ~umask


def test_all_files_below_a_folder_follow_the_umask_and_folders_keep_their_mode(tmp_path: Path, umask: int) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    inner.chmod(0o750)
    files = [tmp_path / "one", inner / "two"]
    for file in files:
        file.touch(mode=0o600)
    follow_umask(tmp_path)
    assert [mode(file) for file in files] == [0o666 & ~umask] * 2
    assert mode(inner) == 0o750


def test_asking_for_the_umask_leaves_it_as_it_was(tmp_path: Path, umask: int) -> None:
    write_text(tmp_path / "a.txt", "text")
    assert os.umask(umask) == umask


def test_text_is_written_as_utf_8_into_a_folder_made_for_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.txt"
    write_text(path, "Où ?\n")
    assert path.read_bytes() == b"O\xc3\xb9 ?\n"


def test_json_is_written_indented_with_letters_as_they_are_into_a_folder_made_for_it(tmp_path: Path) -> None:
    path, value = tmp_path / "a" / "b.json", {"name": "Où ?", "sizes": [1, 2.5, None]}
    write_json(path, value)
    assert json.loads(path.read_text(encoding="utf-8")) == value
    assert path.read_text(encoding="utf-8").startswith('{\n  "name": "Où ?",\n')
    assert path.read_bytes().endswith(b"}\n")


def test_value_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": tmp_path})
    assert {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()} == {"a.json": {"a": 1}}
