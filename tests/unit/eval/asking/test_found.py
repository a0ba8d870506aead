"""A run that is named by its folder: what --set replaces counts, if the run remains the same."""

from __future__ import annotations

import pytest

from lookonce.errors import RunFolderError, UsageError
from lookonce.eval.asking.found import find_run
from lookonce.run.folder import RunFolder


@pytest.fixture
def folder(make_run):
    run = make_run()
    folder = RunFolder(run.output)
    folder.claim(run, {})
    folder.log.touch()
    return folder.folder


def test_the_evaluation_of_a_recorded_run_may_change(folder):
    assert find_run(folder, needs_run=True)[1].eval.candidates is None
    _, run = find_run(folder, ["eval.candidates=training", "eval.max_new_tokens=2"], needs_run=True)
    assert (run.eval.candidates, run.eval.max_new_tokens) == ("training", 2)


@pytest.mark.parametrize(
    ("assignment", "error", "message"),
    [
        ("eval.candidate=training", UsageError, r"the run of .* with --set is wrong:\n.*did you mean `candidates`\?"),
        ("eval.candidates", UsageError, r"not of the form section.key=value"),
        ("lora.rank=3", RunFolderError, r"holds another run, which differs in\n  run.lora.rank: this run 3"),
    ],
)
def test_what_cannot_change_is_named(folder, assignment, error, message):
    with pytest.raises(error, match=message):
        find_run(folder, [assignment], needs_run=True)
