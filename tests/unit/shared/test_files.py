"""Files are written whole or not at all, as the umask allows; free space is checked, and a full disk is named."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lookonce import disk_space as space
from lookonce.cache.store.metadata import read_plan
from lookonce.disk_space import check_room, disk_full, with_margin
from lookonce.errors import DiskFull, explain_os_error
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
def test_failed_write_leaves_what_was_there_and_nothing_else(tmp_path, error, old):
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


@pytest.mark.parametrize(
    "function", [Path.mkdir, lambda path: path.write_text("x"), lambda path: create_text(path, "x")]
)
def test_a_file_where_a_folder_belongs_is_named(file, function):
    file.write_text("mine")
    for path in (file / "a", file / "a" / "b"):
        assert refusal_of(lambda path=path: function(path)).startswith(
            f"{file} is a file, and a folder of this name is"
        )
    assert file.read_text() == "mine"


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


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes are free."""
    return lambda number: monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=number))


@pytest.mark.parametrize(
    ("num_bytes", "num_free", "fits"),
    [(1, space.MIN_MARGIN_BYTES, False), (1, space.MIN_MARGIN_BYTES + 1, True), (10**12, 10**12 + 2 * 10**10, True)],
)
def test_there_must_be_room_for_the_margin_too(tmp_path, free, num_bytes, num_free, fits):
    free(num_free)
    said = re.escape(f"({with_margin(num_bytes) - num_free:,} bytes) are missing")
    with contextlib.nullcontext() if fits else pytest.raises(DiskFull, match=said):
        check_room(tmp_path, num_bytes)


def test_the_message_names_what_is_missing_and_what_to_do(tmp_path, free):
    free(5 * 10**9)
    assert str(disk_full(tmp_path, 10**11)) == (
        f"no room for the rest of {tmp_path}: 102.0 GB are needed with a margin, 5.0 GB are free, 97.0 GB "
        "(97,000,000,000 bytes) are missing. Finished shards are kept: make room (`lookonce cache gc RUN.yaml` lists "
        "what can be deleted), choose another `cache.dir`, or halve the cache with `cache.dtype: fp8_e4m3`; then run "
        "the same command again"
    )
    free(10**12)
    message = str(disk_full(tmp_path, 10**9, OSError(errno.EDQUOT, "Disk quota exceeded")))
    said = "1.0 GB are needed with a margin, 1.0 TB are free but were refused (Disk quota exceeded; `quota -s`"
    assert said in message and "missing" not in message


def test_a_build_that_does_not_fit_is_refused_before_the_tower_is_loaded(site, images, free):
    free(1000)
    with pytest.raises(DiskFull) as caught:
        site.build(images, site.no_tower)
    num_tokens = sum(shard.num_tokens for shard in read_plan(site.folder()).shards)
    needed = with_margin(num_tokens * site.fingerprint.bytes_per_token)
    assert f"{needed - 1000:,} bytes" in str(caught.value)
    assert not site.leftovers()


@pytest.mark.guarantee("A full disk ends a build at the boundary of a shard, and the next build resumes.")
def test_finished_shards_need_no_room(site, images, free):
    site.build(images)
    free(0)
    assert site.build(images, site.no_tower).num_reused == 8


def written(folder: Path, error: Exception) -> None:
    with space.full_disk_named(folder, 10**6, "a checkpoint", lambda: "Make room"):
        raise error


def test_a_librarys_error_on_a_full_disk_names_the_disk(small_disk, monkeypatch):
    monkeypatch.setattr(space, "MIN_MARGIN_BYTES", 0)  # which is small beside shards of real size
    ballast = small_disk.fill(leave=100_000)
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    with pytest.raises(DiskFull, match=r"no room for a checkpoint: 1.0 MB are .* bytes\) are missing. Make room"):
        written(small_disk.folder, error)
    ballast.unlink()
    with pytest.raises(RuntimeError, match="enforce fail"):
        written(small_disk.folder, error)
    assert list(small_disk.folder.iterdir()) == []


def test_errors_that_are_not_of_the_disk_stay_as_they_are(tmp_path):
    for error in (OSError(errno.EIO, "Input/output error"), ValueError("no"), DiskFull("said already")):
        with pytest.raises(type(error)) as caught:
            written(tmp_path, error)
        assert caught.value is error
