"""Compiled code is kept in files that any number of processes may share, and only what is whole and fits is used."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lookonce.train.model import compile
from lookonce.train.model.compile import MAX_FILES, CompileCache

ONLY_WHAT_FITS = pytest.mark.guarantee(
    "Files of compiled code that are damaged, or of another user, device, version or model, never reach the compiler."
)


class Compiler:
    """Stands in for torch.compiler: the content of a file is the names of its artifacts."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.found: list[str] = []

    def save_cache_artifacts(self):
        return (" ".join(self.used).encode(), info(self.used)) if self.used else None

    def load_cache_artifacts(self, content: bytes):
        self.found += (names := content.decode().split())
        return info(names)


def info(names):
    return SimpleNamespace(artifacts={"inductor": names})


@pytest.fixture
def training(tmp_path, monkeypatch):
    """Makes a training's cache in one folder, with a compiler of its own, and what it has noted."""
    (tmp_path / "config.json").write_text("{}")

    def make(used=()):
        compiler, notes = Compiler(), []
        compiler.used = [*used]
        monkeypatch.setattr(torch, "compiler", compiler)
        cache = CompileCache(tmp_path / "compiler", tmp_path / "config.json", notes.append)
        return cache, compiler, notes

    return make


def passed(trained) -> tuple[list[str], list[str]]:
    """What the compiler of a training found, and what is noted, when it has kept what it compiled."""
    cache, compiler, notes = trained
    cache.load()
    cache.save()
    return compiler.found, notes


@pytest.fixture
def files(tmp_path):
    return lambda: sorted((tmp_path / "compiler").glob("*"))


@pytest.mark.guarantee("A process reuses the code that another process compiled.")
def test_what_a_training_compiled_the_next_one_finds_and_does_not_keep_again(training, files):
    found, notes = passed(training(["a", "b"]))
    assert found == [] and any(note.startswith("kept 3 B of compiled code in") for note in notes)
    before = files()
    assert passed(training(["b"]))[0] == ["a", "b"] and files() == before and len(before) == 1
    passed(training(["a", "c"]))
    assert len(files()) == 2


@ONLY_WHAT_FITS
@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: b"X" + content[1:], lambda content: b""]
)
def test_a_damaged_file_is_removed_and_never_given_to_the_compiler(training, files, damage):
    training(["a", "b"])[0].save()
    (path,) = files()
    path.write_bytes(damage(path.read_bytes()))
    cache, compiler, notes = training(["a", "b"])
    cache.load()
    assert (
        compiler.found == []
        and files() == []
        and notes == [f"removed {path}, which is damaged; compiling its code again"]
    )
    cache.save()
    assert files() == [path]


@ONLY_WHAT_FITS
@pytest.mark.parametrize(
    "other",
    [
        lambda patch, _: patch.setattr(torch, "__version__", "9.9"),
        lambda patch, _: patch.setattr(compile, "device_name", lambda: "another device"),
        lambda patch, _: patch.setattr(compile, "library_version", lambda name: "another triton"),
        lambda _, folder: (folder / "config.json").write_text('{"hidden_size": 64}'),
    ],
    ids=["torch", "device", "triton", "model"],
)
def test_files_of_another_device_version_or_model_are_not_read(training, files, monkeypatch, tmp_path, other):
    training(["a"])[0].save()
    other(monkeypatch, tmp_path)
    cache, compiler, notes = training(["a"])
    cache.load()
    assert compiler.found == [] and notes == []
    cache.save()
    assert len(files()) == 2


@ONLY_WHAT_FITS
def test_files_of_another_user_are_not_read(training, monkeypatch):
    training(["a"])[0].save()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    cache, compiler, notes = training(["a"])
    cache.load()
    assert compiler.found == [] and notes == []


def test_what_the_compiler_cannot_use_is_said_and_left_out(training, files, monkeypatch):
    training(["a"])[0].save()
    cache, compiler, notes = training(["a"])

    def fail(content):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(compiler, "load_cache_artifacts", fail)
    cache.load()
    assert notes == [f"cannot use {files()[0]} (no such operator); compiling its code again"]


def test_the_newest_files_are_kept(training, files, tmp_path):
    (tmp_path / "compiler").mkdir()
    for number in range(MAX_FILES + 3):
        left_by_a_killed_one = ".tmp-host-1" if number % 2 else ""
        path = tmp_path / "compiler" / f"{number:016x}-{number:032x}.compiled{left_by_a_killed_one}"
        path.write_bytes(b"")
        os.utime(path, (number, number))
    training(["a"])[0].save()
    kept = files()
    assert len(kept) == MAX_FILES and sum(path.stat().st_size for path in kept) == 1
    assert min(path.stat().st_mtime for path in kept) == 4


def test_a_folder_that_cannot_be_written_to_is_said(training, tmp_path):
    (tmp_path / "compiler").write_text("a file")
    said = f"compiled code is not kept in {tmp_path}/compiler (File exists); choose another `cache.dir` to keep it"
    assert passed(training(["a"]))[1][-1] == said


@pytest.mark.parametrize("given", [{}, {"TRITON_HOME": "/other"}, {"TRITON_CACHE_DIR": "mine"}])
def test_kernels_are_kept_in_tritons_folder_from_the_first_one_on(training, monkeypatch, given):
    cache, *_ = training(["a"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with mock.patch.dict(os.environ, {"HOME": "/mine", **given}, clear=True):
        cache.load()
        expected = given.get("TRITON_CACHE_DIR", f"{given.get('TRITON_HOME', '/mine')}/.triton/cache")
        assert os.environ["TRITON_CACHE_DIR"] == expected
