"""`model.revision` and `train.start_from` get their commits in a run file, and nothing else in the file changes."""

from __future__ import annotations

import re

import pytest
import yaml

from lookonce.errors import UsageError
from lookonce.fetch import pin

COMMIT = "0123456789" * 4
"""A commit that YAML would read as a number without quotes."""

PINNED = {
    "a section": (
        "# mine\nmodel:\n  path: a/b  # the small one\ndata: {train: t.jsonl}\n",
        f'# mine\nmodel:\n  path: a/b  # the small one\n  revision: "{COMMIT}"\ndata: {{train: t.jsonl}}\n',
    ),
    "a revision that is null": (
        "model:\n  path: a/b\n  revision:  # none yet\noutput: x\n",
        f'model:\n  path: a/b\n  revision: "{COMMIT}"  # none yet\noutput: x\n',
    ),
    "a branch": ("model:\n  revision: main\n  path: a/b\n", f'model:\n  revision: "{COMMIT}"\n  path: a/b\n'),
    "braces": ("model: {path: a/b}  # it\n", f'model: {{path: a/b, revision: "{COMMIT}"}}  # it\n'),
    "another path before it": (
        "data:\n    path: c\nmodel:\n    path: a/b\n",
        f'data:\n    path: c\nmodel:\n    path: a/b\n    revision: "{COMMIT}"\n',
    ),
    "no line end": ("model:\n  path: a/b", f'model:\n  path: a/b\n  revision: "{COMMIT}"'),
    "a quoted key": ('model: {"path": a/b}\n', f'model: {{"path": a/b, revision: "{COMMIT}"}}\n'),
    "a folded path": (
        "model:\n  path: >-\n    a/b\n  attention: sdpa\n",
        f'model:\n  path: >-\n    a/b\n  attention: sdpa\n  revision: "{COMMIT}"\n',
    ),
    "a revision in a comment": (
        "model:\n  path: a/b\n  # revision: main\n",
        f'model:\n  path: a/b\n  revision: "{COMMIT}"\n  # revision: main\n',
    ),
}


@pytest.mark.parametrize(("before", "after"), PINNED.values(), ids=PINNED)
def test_one_line_changes_and_comments_stay(tmp_path, before, after):
    path = tmp_path / "run.yaml"
    path.write_text(before)
    assert pin(path, "model", "revision", COMMIT)
    assert path.read_text() == after
    assert yaml.safe_load(after)["model"]["revision"] == COMMIT
    assert not pin(path, "model", "revision", COMMIT)


@pytest.mark.parametrize("model", ["*base", "{<<: *base}"])
def test_a_section_that_is_an_alias_is_left_unchanged_and_the_line_to_add_is_named(tmp_path, model):
    path = tmp_path / "run.yaml"
    text = f"base: &base {{path: a/b}}\nmodel: {model}\n"
    path.write_text(text)
    with pytest.raises(UsageError, match=f'by hand: revision: "{COMMIT}"'):
        pin(path, "model", "revision", COMMIT)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "text",
    [
        "train: {start_from: hf://owner/name, epochs: 2}\n",
        'train:\n  epochs: 2  # as before\n  start_from: "hf://owner/name@main"  # the first\n',
    ],
)
def test_the_commit_of_the_adapter_to_start_from_replaces_its_value_alone(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: owner/name-2}}\n{text}")
    assert pin(path, "train", "start_from", f"hf://owner/name@{COMMIT}")
    pinned = f"hf://owner/name@{COMMIT}"
    assert yaml.safe_load(path.read_text())["train"]["start_from"] == pinned
    expected = re.sub(r'"?hf://owner/name(@\w+)?"?', f'"{pinned}"', text)
    assert path.read_text() == f"model: {{path: owner/name-2}}\n{expected}"
    assert not pin(path, "train", "start_from", f"hf://owner/name@{COMMIT}")
