"""Candidates in a file: YAML or JSON, and what is wrong with it is named."""

from __future__ import annotations

import json

import pytest

from lookonce.datasets.readers.candidates import read_candidates
from lookonce.errors import UsageError
from lookonce.run.records import check_paths

KNOWN = {"Is there text?": ["yes", "no"], " Where? ": ["top left; centre"]}


def test_a_mapping_is_read_as_yaml_and_as_json(tmp_path):
    (tmp_path / "known.json").write_text(json.dumps(KNOWN))
    (tmp_path / "known.yaml").write_text('Is there text?: ["yes ", "no"]\n" Where? ": ["top left; centre"]\n')
    expected = {question: tuple(answers) for question, answers in KNOWN.items()}
    assert [read_candidates(tmp_path / name) for name in ("known.json", "known.yaml")] == [expected] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q: [yes, no]", r'"q": expected a text that is not empty, got True; write it in quotes'),
        ("q: [a, '']", r"\"q\": expected a text that is not empty, got ''"),
        ("3: [a]", r"known.yaml: expected a text that is not empty, got 3"),
        ("q: []", r'"q" must have a list of candidates that is not empty; add some, or remove the question'),
        ("q: a", r'"q" must have a list of candidates that is not empty'),
        ("q: [a, b, ' a']", r'"q" has the candidate "a" twice; remove one'),
        ("[a]", r"must be a mapping of question texts to lists of answers, such as"),
        ('q: ["\\ud800"]', r"known.yaml"),
        ("q: [", r"the file of `eval.candidates` .*known.yaml is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    (tmp_path / "known.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_candidates(tmp_path / "known.yaml")


def test_a_file_that_does_not_exist_is_named_before_a_training(make_run, tmp_path):
    run = make_run(eval={"candidates": str(tmp_path / "gone.yaml")})
    with pytest.raises(
        UsageError, match=r"cannot read the file of `eval.candidates` .*gone.yaml: .*; correct the path"
    ):
        check_paths(run)
