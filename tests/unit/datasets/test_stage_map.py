"""Stage maps: they give records stages by question; what they lack is counted, named and refused."""

from __future__ import annotations

import pytest
import yaml

from lookonce.datasets.curriculum import read_stage_map, with_stages
from lookonce.datasets.formats.record import Record, Turn
from lookonce.datasets.prepare.definition import find_definition
from lookonce.errors import RecordsError, UsageError


def record(*questions: str, **metadata: object) -> Record:
    return Record((), tuple(Turn(question, "yes") for question in questions), metadata=metadata, origin="a.jsonl:1")


@pytest.fixture
def write(tmp_path):
    def write(values):
        path = tmp_path / "map.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


MAP = {"questions": {"Is it?": {"stage": 1, "category": "yes/no"}, "Where?": {"stage": 2}}}


def test_stage_and_category_of_the_map_replace_those_of_the_record(write):
    records = {"train": [record("Is it?", stage=3, source="x"), record("Where?", category="place")], "val": []}
    found = with_stages(records, write(MAP))
    assert [one.metadata for one in found["train"]] == [
        {"stage": 1, "category": "yes/no", "source": "x"},
        {"stage": 2, "category": "place"},
    ]
    assert records["train"][0].metadata["stage"] == 3


def test_questions_that_the_map_lacks_are_counted_named_and_refused(write):
    records = {"train": [record("Is it?"), record("How many?"), record("How many?")], "val": [record("Why?")]}
    message = r'lacks 2 question texts, asked 3 times: "How many\?" \(2\), "Why\?" \(1\); add them, or .* `default`'
    with pytest.raises(RecordsError, match=message):
        with_stages(records, write(MAP))


def test_a_default_takes_them_and_says_so(write):
    notes = []
    path = write(MAP | {"default": {"stage": 9}})
    found = with_stages({"train": [record("Is it?"), record("Why?")]}, path, notes.append)
    assert [one.metadata["stage"] for one in found["train"]] == [1, 9]
    assert notes == [f'the stage map {path} gives its default to 1 question text, asked 1 time: "Why?" (1)']


def test_a_record_of_questions_in_several_stages_is_refused(write):
    with pytest.raises(RecordsError, match='a.jsonl:1: .* same stage and category, got "Is it\\?", "Where\\?"; write'):
        with_stages({"train": [record("Is it?", "Where?")]}, write(MAP))
    assert with_stages({"train": [record("Is it?", "Is it?")]}, write(MAP))["train"][0].metadata["stage"] == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], "must be a mapping with `questions`"),
        ({"questions": {"Is it?": {}}}, r"questions.Is it\?: needs a stage or a category"),
        ({"questions": {"Is it?": {"stage": "first"}}}, "should be a valid integer"),
        ({"questions": {"Is it?": {"stge": 1}}}, "unknown key"),
        ({"question": {}}, "did you mean `questions`"),
    ],
)
def test_mistakes_in_a_map_are_named(write, values, message):
    with pytest.raises(UsageError, match=message):
        read_stage_map(write(values))


def test_a_map_that_is_missing_names_the_key(tmp_path):
    with pytest.raises(UsageError, match="no such file or directory; correct `data.stage_map`"):
        read_stage_map(tmp_path / "map.yaml")


@pytest.mark.parametrize("name", ["reasoning", "clinical"])
def test_the_maps_of_kvasir_vqa_have_all_its_questions_with_their_categories(root, name):
    questions = find_definition("kvasir-vqa").questions
    found = read_stage_map(root / "datasets" / "kvasir-vqa.stages" / f"{name}.yaml").questions
    assert {text: one.category for text, one in found.items()} == {text: q.category for text, q in questions.items()}
    assert {one.stage for one in found.values()} == {1, 2, 3}
    if name == "clinical":
        assert {text: one.stage for text, one in found.items()} == {text: q.stage for text, q in questions.items()}
