"""A run that is named by its folder: what --set replaces counts, if the run remains the same."""

from __future__ import annotations

import pytest

from lookonce.errors import RunFolderError, UsageError
from lookonce.run.folder import RECORD, RunFolder
from lookonce.run.open import TO_ANSWER, Needs, find_run, open_run


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


def test_a_run_that_is_not_trained_names_the_command(make_run):
    run = make_run()
    RunFolder(run.output).claim(run, {})
    with pytest.raises(RunFolderError, match=r"holds no trained adapter.* lookonce train \S+run\.yaml --resume"):
        open_run(run.output, NEEDS)


def test_a_study_names_its_runs(tmp_path):
    for name in ("low-0", "high-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).write_text("{}")
    with pytest.raises(RunFolderError, match=r"is not a run folder; name one of those in it: \S+high-0, \S+low-0"):
        open_run(tmp_path, NEEDS)


def test_what_an_adapter_is_used_for_takes_the_run_that_its_folder_records(folder, run, tmp_path):
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 12_345})})
    (tmp_path / "run.yaml").write_text(longer.to_yaml())
    with pytest.raises(RunFolderError, match="holds another run"):
        find_run(tmp_path / "run.yaml", [], TO_ANSWER)
    assert find_run(tmp_path / "run.yaml", [], Needs("tests", recorded=True))[1] == RunFolder(folder).read_run()
