"""Laws of all keys of all files that people write, and of all options: found by looking at the models and commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from lookonce.cli import main
from lookonce.datasets.curriculum.stage_map import StageMap
from lookonce.datasets.prepare.definition import Definition, read_definition
from lookonce.eval.submission import SubmissionInfo
from lookonce.run.config import RunFile, read_run_file
from lookonce.study.file import StudyFile, read_study

FILES = (RunFile, StudyFile, Definition, StageMap, SubmissionInfo)


def types_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The types that a value may have, unions and lists and mappings taken apart, each with its own metadata."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from types_of(inner, (*metadata, *more))
    elif get_origin(annotation) in (Union, UnionType):
        for inner in get_args(annotation):
            yield from types_of(inner, metadata)
    else:
        yield annotation, metadata
        if get_origin(annotation) not in (Literal, None):
            for inner in get_args(annotation):
                yield from types_of(inner)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Each key of a file and of the sections in it, with its types and what is known of these."""
    for name, field in model.model_fields.items():
        for kind, metadata in types_of(field.annotation, tuple(field.metadata)):
            yield f"{prefix}{name}", kind, metadata
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind, f"{prefix}{name}.")


MINIMAL = "model: {path: m}\ndata: {train: a.jsonl}\noutput: runs/a\n"
STUDY = "base: run.yaml\noutput: runs\narms: {a: , b: , c: {answers_of: [a, b]}}\n"
DEFINITION = "name: mine\n"
LISTS: dict[type[BaseModel], dict[str, tuple[str, Any]]] = {
    RunFile: {
        "data.train": ("train.jsonl", [Path("train.jsonl")]),
        "data.val": ("val.jsonl", [Path("val.jsonl")]),
        "data.test": ("test.jsonl", [Path("test.jsonl")]),
        "data.context.answers": ("val.jsonl", [Path("val.jsonl")]),
        "data.context.order": ("1", None),  # at least two
        "batch.order.lessons": ("1", [1]),
        "lora.targets": ("q_proj", ["q_proj"]),
        "lora.modules_to_save": ("embed_tokens", ["embed_tokens"]),
        "train.track": ("tensorboard", ["tensorboard"]),
    },
    StudyFile: {
        "seeds": ("7", [7]),
        "compare.arms": ("a", ["a"]),
        "arms.answers_of": ("a", None),  # at least two
    },
    Definition: {
        "files": ("a.csv", ["a.csv"]),
        "images": ("'{image}'", ["{image}"]),
        "variants": ("'{image}'", ["{image}"]),
        "columns.question": ("text", ["text"]),
        "columns.answer": ("text", ["text"]),
        "columns.image": ("text", ["text"]),
        "columns.image_id": ("text", ["text"]),
        "columns.split": ("text", ["text"]),
        "columns.metadata": ("text", None),  # a mapping of lists
        "hub.files": ("a.csv", ["a.csv"]),
        "split.together": ("patient", ["patient"]),
        "split.official.train": ("1", ["1"]),
        "split.official.val": ("1", ["1"]),
        "split.official.test": ("1", ["1"]),
        "rules": ("x", None),  # of mappings
        "rules.question": ("x", ["x"]),
        "rules.answer": ("3", ["3"]),
        "rules.values": ("x", ["x"]),
        "rules.order": ("x", ["x"]),
    },
    StageMap: {},
    SubmissionInfo: {"Contact_emails": ("a@b.example", ["a@b.example"])},
}
"""Each key that takes a list, with one value as YAML, and what it means; None if one value is refused."""


@pytest.mark.parametrize("file", FILES)
def test_every_key_that_takes_a_list_is_in_the_table(file):
    assert {name for name, kind, _ in keys_of(file) if get_origin(kind) is list} == LISTS[file].keys()


CONTEXT, ORDER = "data.context={by: stage, order: [1, 2], answers: %s}", "batch.order={by: stage, lessons: %s}"


@pytest.mark.parametrize("name", [name for name, (_, expected) in LISTS[RunFile].items() if expected])
def test_one_value_is_a_list_of_one(tmp_path, name):
    text, expected = LISTS[RunFile][name]
    (tmp_path / "run.yaml").write_text(MINIMAL)
    whole = {"data.context.answers": CONTEXT, "batch.order.lessons": ORDER}.get(name, f"{name}=%s") % text
    value: Any = read_run_file(tmp_path / "run.yaml", [whole])
    for part in name.split("."):
        value = getattr(value, part)
    assert value == expected


def test_one_value_is_a_list_of_one_in_other_files_too(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY + "seeds: 7\ncompare: {arms: a}\n")
    study = read_study(tmp_path / "study.yaml")
    assert study.seeds == [7] and study.compare.arms == ["a"]
    values: dict[str, Any] = {"name": "mine", "rules": [{"name": "r", "rule": "drop_rows", "answer": 3}]}
    for name, (text, expected) in LISTS[Definition].items():
        if expected and not name.startswith("rules"):
            *sections, key = name.split(".")
            place = values
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = yaml.safe_load(text)
    values["hub"]["id"], values["split"]["official"]["column"] = "owner/name", "fold"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    found: Any = read_definition(tmp_path / "mine.yaml")
    assert found.rules[0].answer == ["3"] and found.split.official.train == ["1"] and found.files == ["a.csv"]


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("lora.targets=q_proj, v_proj", "lora.targets: several names are a list: [q_proj, v_proj]"),
        ("lora.modules_to_save=a b", "lora.modules_to_save[0]: several names are a list: [a, b]"),
        ("train.track={tensorboard: true}", "train.track: Input should be a valid list"),
        ("data.context={by: stage, order: 1}", "data.context.order: Value should have at least 2 items"),
    ],
)
def test_what_is_not_one_value_is_refused_with_the_cure(tmp_path, assignment, said):
    (tmp_path / "run.yaml").write_text(MINIMAL)
    result = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml"), "--set", assignment])
    assert result.exit_code == 2 and said in result.stderr
