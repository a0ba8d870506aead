"""What may not be read or written, and a full disk, is named with what to do."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from lookonce.errors import explain_os_error
from lookonce.files import atomic_write, write_text


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
