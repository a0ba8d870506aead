"""The claim of a run folder: it makes and leaves nothing else, moves with the folder, and says what is wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lookonce.errors import RunFolderError
from lookonce.run.folder import CLAIM, TRAIN, RunClaim, RunFolder, find_trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def test_a_folder_that_was_only_claimed_is_removed_again(folder):
    with RunClaim(folder, TRAIN) as owner:
        owner.take()
        assert [path.name for path in folder.iterdir()] == [CLAIM]
    assert not folder.exists()


def test_a_folder_that_existed_or_has_files_stays(folder):
    folder.mkdir(parents=True)
    with RunClaim(folder, TRAIN) as owner:
        owner.take()
    assert list(folder.iterdir()) == []
    folder.rmdir()
    with RunClaim(folder, TRAIN) as owner:
        owner.take()
        (folder / "log.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["log.jsonl"]


def test_a_claim_does_not_make_a_folder_look_used(make_run):
    run = make_run()
    with RunClaim(run.output, TRAIN) as owner:
        owner.take()
        RunFolder(run.output).check(run, {})
        assert not RunFolder(run.output).holds_work


def test_restart_moves_the_claim_away_and_claims_the_name_again(make_run):
    run = make_run()
    RunFolder(run.output).claim(run, {})
    with RunClaim(run.output, TRAIN) as owner:
        owner.take()
        moved = owner.move_away()
        assert moved == run.output.with_name("run.old-1") and (moved / "run.json").exists()
        assert not (moved / CLAIM).exists() and [path.name for path in run.output.iterdir()] == [CLAIM]
        owner.check()
        assert owner.move_away() is None
    RunFolder(run.output).claim(run, {})
    assert RunFolder(run.output).move_away().name == "run.old-2" and not run.output.exists()


def test_a_restart_that_loses_the_name_to_a_faster_process_is_refused(make_run, monkeypatch):
    run = make_run()
    folder, move_away = RunFolder(run.output), RunFolder.move_away
    folder.claim(run, {})
    with RunClaim(run.output, TRAIN) as faster, RunClaim(run.output, TRAIN) as owner:
        owner.take()

        def slow(self: RunFolder) -> Path | None:
            moved = move_away(self)
            faster.take()
            return moved

        monkeypatch.setattr(RunFolder, "move_away", slow)
        with pytest.raises(RunFolderError, match="is in use by"):
            owner.move_away()
        assert not (run.output.with_name("run.old-1") / CLAIM).exists()
        faster.check()


def test_a_lost_folder_is_named_with_its_new_owner(folder, backdate):
    with RunClaim(folder, TRAIN) as asleep, RunClaim(folder, "lookonce eval") as other:
        asleep.take()
        backdate(folder / CLAIM, 181)
        other.take()
        assert asleep.is_lost()
        with pytest.raises(RunFolderError, match="was taken over .* now in use by `lookonce eval`: process"):
            asleep.check()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_to_is_refused_at_once(folder, monkeypatch, error):
    def refuse(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    folder.mkdir(parents=True)
    monkeypatch.setattr("lookonce.claim_file.os.open", refuse)
    with pytest.raises(RunFolderError, match=rf"cannot write to .*a \({os.strerror(error)}\); .*another `output`"):
        with RunClaim(folder, TRAIN) as owner:
            owner.take()


def test_only_a_training_is_found_as_trainer(folder):
    assert find_trainer(folder, 180) is None
    for command, is_found in ((TRAIN, True), ("lookonce eval", False)):
        with RunClaim(folder, command) as owner:
            owner.take()
            assert bool(find_trainer(folder, 180)) == is_found
