"""Run folders: one run per folder, and nothing is overwritten. A claim makes and leaves nothing else."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from lookonce.errors import RunFolderError, UsageError
from lookonce.run.config import keys
from lookonce.run.folder import CLAIM, RECORD, TRAIN, RunClaim, RunFolder, find_trainer
from lookonce.run.open import TO_ANSWER, Needs, find_run, open_run

IDENTITY = {"model": "m1", "cache": "c1", "records": {"train": "r1"}}


def claim(folder: RunFolder, run, identity=IDENTITY) -> None:
    folder.claim(run, identity)
    folder.log.touch()  # as after the first step


def changed(run, name: str):
    """The run with another value of a key, which need not be an allowed one."""
    *sections, key = name.split(".")
    if not sections:
        return run.model_copy(update={key: Path("another")})
    inner = getattr(run, sections[0])
    found = changed(inner, ".".join([*sections[1:], key]))
    return run.model_copy(update={sections[0]: found})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(("best", "objective"), [(None, "sft"), ("loss", "sft"), ("metric", "sft"), (None, "grpo")])
def test_every_key_says_whether_it_may_differ_when_a_run_is_resumed(make_run, best, objective):
    """The words at its definition hold: a free value is taken, another one refused."""
    run = make_run(
        data={"context": {"by": "stage", "order": [1, 2]}},
        train={"best": best, "save_steps": 4, "eval_steps": 4, "objective": objective},
        eval={"every": 4},
    )
    folder = RunFolder(run.output)
    claim(folder, run)
    for name, rule in keys().items():
        other = changed(run, name)
        is_free = rule.may_differ in ("free", "content") and best not in rule.unless_best
        is_free |= name == "train.epochs" and run.train.steps is not None  # which then counts
        is_free |= name.startswith("grpo.") and objective == "sft"  # which has no use for it
        found = {one.removesuffix(".exact_match") for one, _, _ in folder.differences(other, IDENTITY)}  # a mapping's
        assert found == (set() if is_free else {f"run.{name}"})


def test_a_claimed_folder_records_its_run(make_run):
    run = make_run()
    folder = RunFolder(run.output)
    claim(folder, run)
    assert folder.read_run() == run
    assert not folder.is_finished and folder.last_checkpoint is None
    assert json.loads((run.output / "environment.json").read_text())["libraries"]["torch"]


def test_another_run_or_the_same_run_file_on_other_inputs_is_refused_and_the_difference_named(make_run):
    folder, run = RunFolder(make_run().output), make_run()
    claim(folder, run)
    with pytest.raises(RunFolderError, match=r"(?s)holds another run.*run.lora.rank: this run 5, that.*--restart"):
        claim(folder, make_run(lora={"rank": 5}))
    for change in ({"cache": "c2"}, {"records": {"train": "r2"}}, {"model": "m2"}):
        with pytest.raises(RunFolderError, match=f"inputs.{[*change][0]}"):
            claim(folder, run, IDENTITY | change)


def test_a_run_recorded_before_a_key_existed_is_the_same_run(make_run):
    run = make_run()
    claim(RunFolder(run.output), run)
    record = json.loads((run.output / "run.json").read_text())
    del record["run"]["train"]["max_grad_norm"]
    (run.output / "run.json").write_text(json.dumps(record))
    claim(RunFolder(run.output), run)


def test_a_folder_with_other_files_is_refused_and_left_alone(make_run):
    run = make_run()
    run.output.mkdir()
    (run.output / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="not empty and does not hold a run"):
        claim(RunFolder(run.output), run)
    assert [path.name for path in run.output.iterdir()] == ["thesis.tex"]


def test_the_inputs_of_a_training_must_not_have_changed(make_run):
    folder = RunFolder(make_run().output)
    claim(folder, make_run())
    folder.check_inputs(IDENTITY)
    folder.check_inputs({"model": "m1"})
    with pytest.raises(RunFolderError, match=r"have changed since training \(model\).*train again"):
        folder.check_inputs({"model": "m2"})


def test_the_last_finished_checkpoint_is_the_one_to_resume_from(make_run):
    folder = RunFolder(make_run().output)
    for step, finished in ((2, True), (10, True), (12, False)):
        path = folder.checkpoints / f"checkpoint-{step}"
        path.mkdir(parents=True)
        if finished:
            (path / "trainer_state.json").write_text("{}")
    assert folder.last_checkpoint.name == "checkpoint-10"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is not a run folder; make one with"):
        RunFolder(tmp_path).read_run()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunFolderError, match="broken"):
        RunFolder(tmp_path).read_run()


def test_the_copy_of_a_run_file_finds_the_folder_that_it_lies_in(make_run, tmp_path):
    """Also when that was moved, and when its `output` was edited."""
    run = make_run()
    RunFolder(run.output).claim(run, IDENTITY)
    run.output.rename(tmp_path / "moved")
    assert RunFolder.find(tmp_path / "moved" / "run.yaml").folder == tmp_path / "moved"


@pytest.fixture
def run(make_run):
    return make_run()


@pytest.fixture
def folder(run):
    folder = RunFolder(run.output)
    folder.claim(run, {})
    folder.log.touch()
    return folder.folder


def test_the_evaluation_of_a_recorded_run_may_change(folder):
    assert find_run(folder, [], TO_ANSWER)[1].eval.engine == "shared"
    _, run = find_run(folder, ["eval.engine=generate", "eval.max_new_tokens=2"], TO_ANSWER)
    assert (run.eval.engine, run.eval.max_new_tokens) == ("generate", 2)


@pytest.mark.parametrize("needs_run", [True, False])
def test_the_output_of_a_run_file_may_be_replaced(folder, run, tmp_path, needs_run):
    path = tmp_path / "run.yaml"
    path.write_text(run.model_copy(update={"output": tmp_path / "first"}).to_yaml())
    found, changed = find_run(path, [f"output={folder}"], TO_ANSWER if needs_run else Needs("tests"))
    assert found.folder == changed.output == folder
    with pytest.raises(RunFolderError, match=f"{tmp_path}/second is not a run folder; make one with"):
        find_run(path, [f"output={tmp_path}/second"], TO_ANSWER)


def test_a_run_file_in_a_run_folder_stands_for_that_run(folder, run, tmp_path):
    path = folder / "run.yaml"
    path.write_text(run.to_yaml())
    assert find_run(path, ["eval.max_new_tokens=2"], TO_ANSWER)[0].folder == folder


@pytest.mark.parametrize("name", [".", "run.yaml"])
def test_another_output_than_the_run_folder_is_refused(folder, run, tmp_path, name):
    (folder / "run.yaml").write_text(run.to_yaml())
    place, other = folder / name, tmp_path / "second run"
    with pytest.raises(UsageError, match=f"--set output={other} cannot be used here: .*: lookonce eval '{other}'$"):
        find_run(place, [f"output={other}"], TO_ANSWER)
    assert find_run(place, [f"output={folder}"], TO_ANSWER)[0].folder.samefile(folder)


@pytest.mark.parametrize(
    ("assignment", "error", "message"),
    [
        ("eval.engin=generate", UsageError, r"the run of .* with --set is wrong:\n.*did you mean `engine`\?"),
        ("eval.engine", UsageError, r"not of the form section.key=value"),
        ("lora.rank=3", RunFolderError, r"holds another run, which differs in\n  run.lora.rank: this run 3"),
    ],
)
def test_what_cannot_change_is_named(folder, assignment, error, message):
    with pytest.raises(error, match=message):
        find_run(folder, [assignment], TO_ANSWER)


NEEDS = Needs("tests", adapter=True)


def test_a_run_that_is_not_trained_names_the_command_and_a_study_names_its_runs(make_run, tmp_path):
    run = make_run()
    RunFolder(run.output).claim(run, {})
    with pytest.raises(RunFolderError, match=r"holds no trained adapter.* lookonce train \S+run\.yaml --resume"):
        open_run(run.output, NEEDS)
    for name in ("low-0", "high-0"):
        (tmp_path / "study" / name).mkdir(parents=True)
        (tmp_path / "study" / name / RECORD).write_text("{}")
    with pytest.raises(RunFolderError, match=r"is not a run folder; name one of those in it: \S+high-0, \S+low-0"):
        open_run(tmp_path / "study", NEEDS)


def test_what_an_adapter_is_used_for_takes_the_run_that_its_folder_records(folder, run, tmp_path):
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 12_345})})
    (tmp_path / "run.yaml").write_text(longer.to_yaml())
    with pytest.raises(RunFolderError, match="holds another run"):
        find_run(tmp_path / "run.yaml", [], TO_ANSWER)
    assert find_run(tmp_path / "run.yaml", [], Needs("tests", recorded=True))[1] == RunFolder(folder).read_run()


# The claim of a run folder.


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "runs" / "a"


def test_a_folder_that_was_only_claimed_is_removed_again_and_one_that_existed_or_has_files_stays(place):
    with RunClaim(place, TRAIN) as owner:
        owner.take()
        assert [path.name for path in place.iterdir()] == [CLAIM]
    assert not place.exists()
    place.mkdir(parents=True)
    with RunClaim(place, TRAIN) as owner:
        owner.take()
    assert list(place.iterdir()) == []
    place.rmdir()
    with RunClaim(place, TRAIN) as owner:
        owner.take()
        (place / "log.jsonl").touch()
    assert [path.name for path in place.iterdir()] == ["log.jsonl"]


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


def test_a_lost_folder_is_named_with_its_new_owner(place, backdate):
    with RunClaim(place, TRAIN) as asleep, RunClaim(place, "lookonce eval") as other:
        asleep.take()
        backdate(place / CLAIM, 181)
        other.take()
        assert asleep.is_lost()
        with pytest.raises(RunFolderError, match="was taken over .* now in use by `lookonce eval`: process"):
            asleep.check()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_to_is_refused_at_once(place, monkeypatch, error):
    def refuse(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    place.mkdir(parents=True)
    monkeypatch.setattr("lookonce.claim_file.os.open", refuse)
    with pytest.raises(RunFolderError, match=rf"cannot write to .*a \({os.strerror(error)}\); .*another `output`"):
        with RunClaim(place, TRAIN) as owner:
            owner.take()


def test_only_a_training_is_found_as_trainer(place):
    assert find_trainer(place, 180) is None
    for command, is_found in ((TRAIN, True), ("lookonce eval", False)):
        with RunClaim(place, command) as owner:
            owner.take()
            assert bool(find_trainer(place, 180)) == is_found
