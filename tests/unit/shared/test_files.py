"""Files are written whole or not at all, as the umask allows; a refusal and a full disk are named with what to do."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookonce.errors import explain_os_error
from lookonce.files import (
    TEMPORARY_MARK,
    atomic_write,
    create_text,
    follow_umask,
    scratch_folder,
    write_json,
    write_text,
    writer_host,
)


def test_a_scratch_folder_names_its_process_and_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), scratch_folder(tmp_path, "pilot") as folder:
        (folder / "features").write_text("")
        assert folder.parent == tmp_path
        assert folder.name.startswith(f"lookonce-pilot{TEMPORARY_MARK}{writer_host()}-{os.getpid()}-")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
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


def test_written_files_follow_the_umask_whatever_the_writer_chose(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a.safetensors"
    with atomic_write(path) as temporary:
        temporary.touch(mode=0o600)
    create_text(tmp_path / "created", "text")
    assert mode(path) == mode(tmp_path / "created") == 0o666 & ~umask and os.umask(umask) == umask


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


def test_a_value_that_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": tmp_path})
    assert {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()} == {"a.json": {"a": 1}}


# Python 3.12 warns when a process with threads forks; torch has some, and the children only write.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_of_several_processes_that_create_one_file_exactly_one_succeeds(tmp_path: Path) -> None:
    num_processes, num_files = 4, 20
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(num_processes), context.Queue()

    def create(process: int) -> None:
        for number in range(num_files):
            barrier.wait(timeout=60)
            if create_text(tmp_path / "new" / str(number), str(process) * 100_000):
                results.put((number, process))

    processes = [context.Process(target=create, args=(process,)) for process in range(num_processes)]
    for process in processes:
        process.start()
    won = dict(results.get(timeout=60) for _ in range(num_files))
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * num_processes
    assert results.empty() and won.keys() == set(range(num_files))
    found = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert found == {str(number): str(process) * 100_000 for number, process in won.items()}
    assert not create_text(tmp_path / "new" / "0", "other")


def refusal_of(function) -> str:
    with pytest.raises(OSError) as caught:
        function()
    return explain_os_error(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "file.json"
    write_text(path, "{}")
    return path


@pytest.mark.parametrize(
    ("mode", "function", "place", "name"),
    [
        (0o000, Path.read_text, "file.json", "file.json"),
        (0o400, lambda path: path.write_text(""), "file.json", "file.json"),
        (0o500, lambda path: write_text(path, ""), "", "file.json"),
        (0o300, lambda path: [*path.parent.iterdir()], "", ""),
        (0o600, Path.read_text, "", "file.json"),
    ],
)
def test_a_refusal_names_the_real_file_and_the_command_that_shows_why(file, with_mode, mode, function, place, name):
    with_mode(file.parent / place, mode)
    path = file.parent / name
    assert refusal_of(lambda: function(file)) == (
        f"cannot open {path}: Permission denied; who may is shown by: namei -l {path}"
    )


def test_other_errors_name_the_file_that_was_to_be_written(file):
    error = OSError(errno.EIO, os.strerror(errno.EIO), str(file) + ".tmp-host-1-2")
    assert explain_os_error(error) == f"{file}: Input/output error"
    assert explain_os_error(OSError("no name")) == "no name"
    assert explain_os_error(OSError(errno.EIO, "no name")) == "no name"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(
    "make",
    [
        lambda code: OSError(code, os.strerror(code)),
        lambda code: OSError(code, os.strerror(code), "source.bin", None, "target.bin"),  # of shutil.copyfile
        lambda code: Exception(f"Error while serializing: I/O error: (os error {code})"),  # of safetensors
    ],
)
def test_a_full_disk_is_named_with_the_file_what_it_needs_and_what_is_free(file, code, make):
    def writing() -> None:
        with atomic_write(file) as temporary:
            temporary.write_bytes(b"x" * 1500)
            raise make(code)

    message = refusal_of(writing)
    assert message.startswith(f"no room for {file}: {os.strerror(code)}") and ".tmp-" not in message
    assert re.search(rf"\(more than 1.5 kB are needed, [\d.]+ \w+ are free in {file.parent}\); make room, or", message)
    assert file.read_text() == "{}" and list(file.parent.iterdir()) == [file]
