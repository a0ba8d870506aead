"""The run file of the sample: that of `experiments/`, with the sample's folder in place of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lookonce.datasets.sample.write import run_file, write_run_file
from lookonce.run.config import RunFile


@pytest.mark.parametrize(
    ("stages", "name", "folder"), [(False, "sample", "data/sample"), (True, "staged", "data/stages")]
)
def test_in_the_usual_folder_it_is_the_run_file_of_the_experiments(root, stages, name, folder):
    text = (root / "experiments" / f"{name}.yaml").read_text()
    found = run_file(Path(folder), stages)
    expected = yaml.safe_load(text) | {"output": f"runs/{Path(folder).name}"}
    assert yaml.safe_load(found) == expected and "# the sample model is untrained" in found


@pytest.mark.parametrize("folder", ["a b", "/there/x", "null: {#1", 'quo"te', "-", "größe", "x\\y", "data/runs/a/x"])
def test_any_folder_is_named_by_it(folder):
    run = RunFile.model_validate(yaml.safe_load(run_file(Path(folder), False)))
    assert (run.model.path, str(run.output)) == (f"{folder}/model", f"runs/{Path(folder).name}")
    assert [str(path) for path in run.data.test] == [f"{folder}/test.jsonl"]


def test_one_that_was_changed_is_kept(tmp_path):
    path = write_run_file(tmp_path, stages=False)
    path.write_text("mine")
    assert write_run_file(tmp_path, stages=False).read_text() == "mine"


def test_the_templates_are_those_of_the_experiments(root):
    """Links, so that there is one text of each; in a wheel they are files."""
    for name, target in (("run", "sample"), ("staged", "staged")):
        link = root / "datasets" / "sample" / f"{name}.yaml"
        assert link.is_symlink() and link.resolve() == root / "experiments" / f"{target}.yaml"
