"""What cannot be merged is refused before anything is written, and the message names the way."""

from __future__ import annotations

import json

import pytest
from support.answers import look_trained

from lookonce.adapter.merging.check import check_frozen, check_model, find_trained
from lookonce.adapter.merging.merge import merge
from lookonce.errors import ModelError, RunFolderError, UsageError
from lookonce.run.folder import RECORD, RunFolder


def test_a_run_that_is_not_trained_names_the_command(make_run):
    run = make_run()
    RunFolder(run.output).claim(run, {})
    with pytest.raises(RunFolderError, match=r"holds no trained adapter.* lookonce train \S+run\.yaml --resume"):
        find_trained(run.output)


def test_an_adapter_without_the_end_of_its_training_is_not_merged(make_run):
    run = make_run()
    folder = RunFolder(run.output)
    folder.claim(run, {})
    folder.adapter.mkdir()
    (folder.adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(RunFolderError, match="holds no trained adapter"):
        find_trained(run.output)
    look_trained(folder)
    assert find_trained(run.output)[1].output == run.output


def test_a_study_names_its_runs(tmp_path):
    for name in ("low-0", "high-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).write_text("{}")
    with pytest.raises(RunFolderError, match=r"folder of a study; name one of its runs: \S+high-0, \S+low-0"):
        find_trained(tmp_path)


def test_a_routed_arm_has_no_adapter(tmp_path):
    (tmp_path / "predictions").mkdir()
    with pytest.raises(RunFolderError, match="answers and no adapter, as a routed arm"):
        find_trained(tmp_path)


def test_another_folder_is_no_run(tmp_path):
    with pytest.raises(RunFolderError, match="is not a run folder"):
        find_trained(tmp_path)


@pytest.mark.parametrize(
    ("frozen", "is_refused"), [("precision", False), ("fp8", False), ("int8", True), ("nf4", True)]
)
def test_an_adapter_of_rounded_weights_needs_the_flag(make_run, frozen, is_refused):
    run, command = make_run(train={"frozen": frozen}), "lookonce adapter merge RUN DIR"
    check_frozen(run, command, allows_unquantised=True)
    if not is_refused:
        return check_frozen(run, command, allows_unquantised=False)
    with pytest.raises(UsageError, match=rf"quantised to {frozen}.*: {command} --onto-unquantised\n"):
        check_frozen(run, command, allows_unquantised=False)


@pytest.mark.parametrize("part", ["top", "text_config"])
def test_a_quantised_model_is_refused_with_the_ways(tmp_path, part):
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised if part == "top" else {part: quantised}))
    with pytest.raises(ModelError, match=r"is quantised .*: fp8.* train\.frozen: int8 or nf4"):
        check_model(tmp_path)


def test_the_target_is_looked_at_first(tmp_path):
    with pytest.raises(UsageError, match="choose another DIR"):
        merge(tmp_path / "no-run", tmp_path)
