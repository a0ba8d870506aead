"""What may not be read or written is named, with the command that allows it."""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path

import pytest

from lookonce.errors import explain_os_error
from lookonce.files import atomic_write, create_text, write_text


def refusal_of(function) -> str:
    with pytest.raises(OSError) as caught:
        function()
    return explain_os_error(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "file.json"
    write_text(path, "{}")
    return path


CASES = {
    "an unreadable file": (0o000, Path.read_text, "file", "cannot read {file}", "u+r {file}"),
    "a file that is opened to write": (0o400, lambda path: path.write_text(""), "file", "cannot write {file}", "u+w"),
    "a file that is replaced": (
        0o500,
        lambda path: write_text(path, ""),
        "folder",
        "cannot write {file}",
        "u+w {folder}",
    ),
    "a new file": (
        0o500,
        lambda path: create_text(path.parent / "b", ""),
        "folder",
        "cannot write {folder}/b:",
        "u+w {folder}",
    ),
    "a new folder": (
        0o500,
        lambda path: (path.parent / "b").mkdir(),
        "folder",
        "cannot write {folder}/b:",
        "u+w {folder}",
    ),
    "a folder that is listed": (
        0o300,
        lambda path: [*path.parent.iterdir()],
        "folder",
        "cannot read {folder}",
        "u+rx {folder}",
    ),
    "a folder without entry": (0o600, Path.read_text, "folder", "cannot open {file}", "u+rwx {folder}"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_the_real_file_and_the_command_that_allows_it(file, with_mode, name):
    mode, function, place, said, advice = CASES[name]
    names = {"file": file, "folder": file.parent}
    with_mode(names[place], mode)
    message = refusal_of(lambda: function(file))
    assert message.startswith(said.format(**names)) and ": Permission denied; allow it with: chmod " in message
    assert advice.format(**names) in message and ".tmp-" not in message and "Errno" not in message


@pytest.mark.parametrize("name", [name for name in CASES if "opened" not in name])
def test_the_command_that_is_named_allows_it(file, with_mode, name):
    mode, function, place, _, _ = CASES[name]
    with_mode({"file": file, "folder": file.parent}[place], mode)
    message = refusal_of(lambda: function(file))
    _, change, path = shlex.split(message.partition("allow it with: ")[2])
    mode = {"u+r": 0o400, "u+w": 0o200, "u+rwx": 0o700, "u+rx": 0o500}[change]
    Path(path).chmod(Path(path).stat().st_mode | mode)
    function(file)


def test_a_read_only_disk_is_not_allowed_by_chmod(file):
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), str(file.with_name("b.tmp-host-1-2")))
    assert explain_os_error(error).endswith("Read-only file system; choose a folder on another disk")


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
