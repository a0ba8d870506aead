"""Laws of all keys of all files that people write, and of all options: found by looking at the models and commands."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import click
import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel
from support.commands import all_commands
from support.keys import bounds_of, keys_of

from lookonce.cli import main
from lookonce.datasets.curriculum import StageMap
from lookonce.datasets.prepare.definition import Definition, read_definition
from lookonce.errors import UsageError
from lookonce.eval.submission import SubmissionInfo
from lookonce.run.config import RunFile, keys, read_run_file
from lookonce.study.file import StudyFile, read_study

MINIMAL = "model: {path: m}\ndata: {train: a.jsonl}\noutput: runs/a\n"
FILES = (RunFile, StudyFile, Definition, StageMap, SubmissionInfo)


def leaves() -> Iterator[tuple[str, click.Command]]:
    """All commands but the groups, by the words that call them."""
    return ((" ".join(words), one) for words, one in all_commands() if not isinstance(one, click.Group))


NUMBERS = [
    (file.__name__, name, kind, *bounds_of(metadata))
    for file in FILES
    for name, kind, metadata in keys_of(file)
    if kind in (int, float)
]


@pytest.mark.guarantee("Every number in a file or an option has a lowest and a highest value.")
def test_every_number_in_a_file_and_on_the_command_line_has_both_ends():
    assert len(NUMBERS) > 30 and [number for number in NUMBERS if None in number[3:]] == []
    numbers = {
        f"{name} {parameter.opts[0]}": parameter.type
        for name, command in leaves()
        for parameter in command.params
        if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType)
    }
    ends = [(name, getattr(kind, end, None)) for name, kind in numbers.items() for end in ("min", "max")]
    assert len(numbers) > 10 and [name for name, value in ends if value is None] == []
    for kind in numbers.values():
        for text in ("nan", "inf", "-inf", "1e400", "9" * 5000, "-1" if kind.min >= 0 else str(kind.min - 1)):
            with pytest.raises(click.BadParameter):
                kind.convert(text, None, None)


def wrong_values(kind: type, low: float, high: float) -> list[str]:
    """Values outside of a range, as YAML."""
    beyond = [low - 1, high + 1, -(2**63), 2**63, 2**64] if kind is int else [low - 1, high + 1, -1e308, 1e308]
    return [*map(str, beyond), ".nan", ".inf", "-.inf", "1e999", "0x" + "f" * 4000, "one"]


RUN_NUMBERS = {
    name: (kind, low, high)
    for file, name, kind, low, high in NUMBERS
    if file == "RunFile" and not name.startswith(("data.", "train.scheduler_args", "grpo.reward"))
}


@pytest.mark.parametrize("name", RUN_NUMBERS)
def test_a_number_that_the_code_cannot_take_is_refused_with_its_limit(tmp_path, name):
    """By check as by the command that would use it: with an exit code, and without a traceback."""
    kind, low, high = RUN_NUMBERS[name]
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    for value in wrong_values(kind, low, high):
        with pytest.raises(UsageError, match=re.escape(name)) as refused:
            read_run_file(path, [f"{name}={value}"])
        if value == str(high + 1):
            assert re.search(r"should be less than (or equal to )?[\d.]+ \(got ", str(refused.value))
    for command in ("check", "train"):
        result = CliRunner().invoke(main, [command, str(path), "--set", f"{name}={high + 1}"])
        assert result.exit_code in (1, 2) and name in result.output and "Traceback" not in result.output
    for value in (low, high) if kind is int else ():
        needed = ["train.best=loss"] if name == "train.patience" else ["cache.augment.rotate=1"]
        read_run_file(path, ["data.val=b.jsonl", *needed, f"{name}={value}"])


@pytest.mark.parametrize(
    ("assignment", "name"),
    [
        ("data.where={share: .nan}", "data.where.share"),
        ("data.where={stage: .inf}", "data.where.stage"),
        ("data.where={stage: 0x" + "f" * 5000 + "}", "data.where.stage"),
        ("batch.order={by: stage, stages: [1, 1.0e+400]}", "batch.order"),
        ("data.context={by: stage, order: [1, 99999999999999999999]}", "data.context.order"),
        ("data.held_out={fold: 1, of: 10000000}", "data.held_out.of"),
        ("train.scheduler_args={num_cycles: 1e300}", "train.scheduler_args.num_cycles"),
    ],
)
def test_numbers_deeper_in_a_run_file_are_bounded_too(tmp_path, assignment, name):
    (tmp_path / "run.yaml").write_text(MINIMAL)
    with pytest.raises(UsageError, match=re.escape(name)):
        read_run_file(tmp_path / "run.yaml", [assignment])


MANY = {
    "variants and seeds": (
        f"seeds: {list(range(100_000))}\nvariants: {{{', '.join(f'a{n}: ' for n in range(1000))}}}",
        "1,000",
    ),
    "seeds": (f"seeds: {list(range(2000))}\nvariants: {{a: }}", "times 2,000 seeds are 2,000 runs, and 1,000 are"),
    "variants": (f"variants: {{{', '.join(f'a{number}: ' for number in range(1001))}}}", "1,001 variants times 1"),
    "a large seed": ("seeds: [4294967296]\nvariants: {a: }", "less than or equal to 4294967295 (got 4294967296)"),
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("command", ["plan", "run", "status", "jobs", "report"])
def test_a_study_that_would_be_too_many_runs_is_refused_at_once(tmp_path, name, command):
    text, said = MANY[name]
    (tmp_path / "run.yaml").write_text(MINIMAL)
    (tmp_path / "study.yaml").write_text(f"base: {tmp_path}/run.yaml\noutput: {tmp_path}/runs\n{text}\n")
    began = time.monotonic()
    result = CliRunner().invoke(main, ["study", command, str(tmp_path / "study.yaml")])
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr) < 1000
    assert time.monotonic() - began < 10 and not (tmp_path / "runs").exists()


STUDY = "base: run.yaml\noutput: runs\nvariants: {a: , b: , c: {answers_of: [a, b]}}\n"
DEFINITION = "name: mine\n"
LISTS: dict[type[BaseModel], dict[str, tuple[str, Any]]] = {
    RunFile: {
        "data.train": ("train.jsonl", [Path("train.jsonl")]),
        "data.val": ("val.jsonl", [Path("val.jsonl")]),
        "data.test": ("test.jsonl", [Path("test.jsonl")]),
        "data.context.answers": ("val.jsonl", [Path("val.jsonl")]),
        "data.context.order": ("1", None),  # at least two
        "batch.order.stages": ("1", [1]),
        "lora.targets": ("q_proj", ["q_proj"]),
        "lora.modules_to_save": ("embed_tokens", ["embed_tokens"]),
        "train.track": ("tensorboard", ["tensorboard"]),
        "grpo.clip": ("0.2", None),  # two
    },
    StudyFile: {
        "seeds": ("7", [7]),
        "compare.variants": ("a", ["a"]),
        "variants.answers_of": ("a", None),  # at least two
    },
    Definition: {
        "files": ("a.csv", ["a.csv"]),
        "images": ("'{image}'", ["{image}"]),
        "columns.question": ("text", ["text"]),
        "columns.answer": ("text", ["text"]),
        "columns.image": ("text", ["text"]),
        "columns.image_id": ("text", ["text"]),
        "columns.split": ("text", ["text"]),
        "columns.metadata": ("text", None),  # a mapping of lists
        "hub.files": ("a.csv", ["a.csv"]),
        "split.together": ("patient", ["patient"]),
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


CONTEXT, ORDER = "data.context={by: stage, order: [1, 2], answers: %s}", "batch.order={by: stage, stages: %s}"


@pytest.mark.parametrize("name", [name for name, (_, expected) in LISTS[RunFile].items() if expected])
def test_one_value_is_a_list_of_one(tmp_path, name):
    text, expected = LISTS[RunFile][name]
    (tmp_path / "run.yaml").write_text(MINIMAL)
    whole = {"data.context.answers": CONTEXT, "batch.order.stages": ORDER}.get(name, f"{name}=%s") % text
    value: Any = read_run_file(tmp_path / "run.yaml", [whole])
    for part in name.split("."):
        value = getattr(value, part)
    assert value == expected


def test_one_value_is_a_list_of_one_in_other_files_too(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY + "seeds: 7\ncompare: {variants: a}\n")
    study = read_study(tmp_path / "study.yaml")
    assert study.seeds == [7] and study.compare.variants == ["a"]
    values: dict[str, Any] = {"name": "mine", "rules": [{"name": "r", "rule": "drop_rows", "answer": 3}]}
    for name, (text, expected) in LISTS[Definition].items():
        if expected and not name.startswith("rules"):
            *sections, key = name.split(".")
            place = values
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = yaml.safe_load(text)
    values["hub"]["id"] = "owner/name"
    values["columns"]["metadata"] = {"patient": "patient"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    found: Any = read_definition(tmp_path / "mine.yaml")
    assert found.rules[0].answer == ["3"] and found.files == ["a.csv"]


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("lora.targets=q_proj, v_proj", "lora.targets: write several names as a list: [q_proj, v_proj]"),
        ("lora.modules_to_save=a b", "lora.modules_to_save[0]: write several names as a list: [a, b]"),
        ("train.track={tensorboard: true}", "train.track: Input should be a valid list"),
        ("data.context={by: stage, order: 1}", "data.context.order: Value should have at least 2 items"),
    ],
)
def test_what_is_not_one_value_is_refused_with_the_cure(tmp_path, assignment, said):
    (tmp_path / "run.yaml").write_text(MINIMAL)
    result = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml"), "--set", assignment])
    assert result.exit_code == 2 and said in result.stderr


def test_the_number_of_commands_options_and_keys_is_what_was_decided():
    """Each is something that users read and we keep: a new one is a decision, which changes this number."""
    found = [command for _, command in leaves()]
    options = [one for command in found for one in command.params if isinstance(one, click.Option)]
    assert (len(found), len(options), len(keys())) == (32, 164, 90)
