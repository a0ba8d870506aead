"""Dataset definitions: mistakes are named by key."""

from __future__ import annotations

from typing import get_args

import pytest
import yaml

from lookonce.datasets.curriculum import read_stage_map
from lookonce.datasets.prepare.definition import FOLDER, find_definition, known_datasets, read_definition
from lookonce.datasets.prepare.rows import Rule
from lookonce.errors import UsageError

KNOWN = ["kvasir-vqa", "kvasir-vqa-x1", "path-vqa", "slake", "vqa-rad"]


def test_the_readme_names_all_known_datasets():
    assert known_datasets() == KNOWN
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_definition_has_the_name_of_its_file_a_licence_and_a_homepage(name):
    definition = find_definition(name)
    assert definition.name == name and definition.title and definition.licence != "unknown"
    assert definition.homepage.startswith("https://") and definition.paper.startswith("https://")
    assert definition.hub is None or definition.hub.revision is None or len(definition.hub.revision) == 40


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "x", "rule": []}, "rule: unknown key; did you mean `rules`?"),
        ({"name": "x", "columns": {"imgae": "a"}}, "columns.imgae: unknown key; did you mean `image`?"),
        ({"name": "x", "columns": {"metadata": {"original": "a"}}}, "metadata `original` is written by prepare itself"),
        ({"name": "x", "images": ["../{image}"]}, "must be a path below the source's folder, without `..`"),
        ({"name": "x", "split": {"shares": {"val": 0.8, "test": 0.3}}}, "val and test are 1.1 together"),
        ({"name": "x", "rules": [{"name": "a", "rule": "drop"}]}, "rules[0]: "),
        (
            {"name": "x", "rules": [{"name": "a", "rule": "drop_rows", "answers": []}]},
            "rules[0].drop_rows.answers: unknown key",
        ),
        ({"name": "x", "rules": [{"name": "a", "rule": "strip_spaces"}] * 2}, "two rules are called `a`"),
        ({"name": "x", "hub": {"id": "no-owner"}}, "hub.id: "),
    ],
)
def test_mistakes_in_a_definition_are_named_by_key(tmp_path, values, message):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(UsageError, match="mine.yaml") as refusal:
        read_definition(path)
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", ["- a", "just text", "a: [", ""])
def test_a_file_without_a_definition_is_refused(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UsageError, match="mine.yaml"):
        find_definition(str(tmp_path / "mine.yaml"))


def test_an_unknown_name_is_refused_with_the_known_names():
    with pytest.raises(UsageError, match="did you mean `kvasir-vqa`.*path-vqa, slake, vqa-rad, or name a YAML"):
        find_definition("kvasir_vqa")


def test_the_examples_in_the_readme_are_definitions_and_a_stage_map(tmp_path):
    text = (FOLDER / "README.md").read_text()
    *examples, stages = [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]
    (tmp_path / "stages.yaml").write_text(stages)
    assert len(read_stage_map(tmp_path / "stages.yaml").questions) == len(examples) == 2
    for example in examples:
        (tmp_path / "mine.yaml").write_text(example)
        assert read_definition(tmp_path / "mine.yaml").name == "my-set"
    assert {rule.rule for rule in read_definition(tmp_path / "mine.yaml").rules} == {
        model.model_fields["rule"].annotation.__args__[0] for model in (get_args(get_args(Rule)[0]))
    }
