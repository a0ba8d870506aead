"""Stages, selections and folds of training records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.datasets.context import ContextForm, with_context
from lookonce.datasets.curriculum import (
    Fold,
    Selection,
    StageOrder,
    hold_out,
    read_stage_map,
    select_training,
    with_stages,
)
from lookonce.datasets.formats.record import Record, Turn
from lookonce.datasets.prepare.definition import find_definition
from lookonce.errors import RecordsError, UsageError


def record(*questions: str, **metadata: object) -> Record:
    return Record((), tuple(Turn(question, "yes") for question in questions), metadata=metadata, origin="a.jsonl:1")


def with_metadata(*metadata: dict[str, object]) -> list[Record]:
    """A record with each of these metadata, of which the origin is the number."""
    return [Record((), (Turn("q", "a"),), metadata=one, origin=str(n)) for n, one in enumerate(metadata)]


def in_stages(*stages: object) -> list[Record]:
    """A record of each of these stages; None is a record without one."""
    return with_metadata(*({} if stage is None else {"stage": stage} for stage in stages))


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
    expected = [{"stage": 1, "category": "yes/no", "source": "x"}, {"stage": 2, "category": "place"}]
    assert [one.metadata for one in found["train"]] == expected
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


def test_mistakes_in_a_map_are_named(write):
    for values, message in (
        ([1], "must be a mapping with `questions`"),
        ({"questions": {"Is it?": {}}}, r"questions.Is it\?: needs a stage or a category"),
        ({"questions": {"Is it?": {"stage": "first"}}}, "should be a valid integer"),
        ({"question": {}}, "did you mean `questions`"),
    ):
        with pytest.raises(UsageError, match=message):
            read_stage_map(write(values))


@pytest.mark.parametrize("name", ["reasoning", "clinical"])
def test_the_maps_of_kvasir_vqa_have_all_its_questions_with_their_categories(root, name):
    questions = find_definition("kvasir-vqa").questions
    found = read_stage_map(root / "datasets" / "kvasir-vqa.stages" / f"{name}.yaml").questions
    assert {text: one.category for text, one in found.items()} == {text: q.category for text, q in questions.items()}
    assert {one.stage for one in found.values()} == {1, 2, 3}
    if name == "clinical":
        assert {text: one.stage for text, one in found.items()} == {text: q.stage for text, q in questions.items()}


FEW = settings(max_examples=50)
STAGES = st.lists(st.sampled_from([1, 2, "3", None]), min_size=1, max_size=40)
SHARES = st.floats(0.01, 1)


def select(stages, where, replay=None, seed=0, notify=lambda note: None) -> list[int]:
    """The positions of the records that are trained on."""
    where = Selection.model_validate(where)
    replay = replay and Selection.model_validate(replay)
    return [int(record.origin) for record in select_training(in_stages(*stages), where, replay, seed, notify)]


def test_records_with_one_of_the_values_are_selected_in_their_order():
    stages = [1, 2, "3", None, 1]
    assert (select(stages, {"stage": [3, 1]}), select(stages, {})) == ([0, 2, 4], [0, 1, 2, 3, 4])
    assert (select(stages, {"stage": "2"}), select(stages, {"stage": 3.0})) == ([1], [2])


def test_every_field_must_fit_and_one_value_of_a_list_is_enough():
    records = with_metadata({"a": 1, "b": ["x", "y"]}, {"a": 1, "b": ["z"]}, {"a": 2, "b": "x"}, {"a": True})
    found = select_training(records, Selection.model_validate({"a": 1, "b": "x"}), None, 0)
    assert [record.origin for record in found] == ["0"]


def test_what_is_left_out_is_counted_and_named():
    notes = []
    stages = [1] * 4 + [2] * 6 + [None]
    select(stages, {"stage": 1, "share": 0.5}, {"stage": 2, "share": 0.5}, notify=notes.append)
    assert notes == [
        "`data.where` leaves out 9 of 11 train records: no stage (1), not in the share of 0.5 (2), stage 2 (6)",
        "`data.replay` trains on 3 of them: stage 2 (3)",
    ]


@pytest.mark.guarantee("A share of the training records is part of every larger share with the same seed.")
@FEW
@given(STAGES, SHARES, SHARES, st.integers(0, 5))
def test_shares_are_nested_exact_and_in_order(stages, one, other, seed):
    smaller, larger = sorted([one, other])
    found = select(stages, {"share": smaller}, seed=seed)
    assert len(found) == max(round(smaller * len(stages)), 1) and found == sorted(found)
    assert set(found) <= set(select(stages, {"share": larger}, seed=seed))


@pytest.mark.guarantee("Only records that were left out are replayed.")
@FEW
@given(STAGES, SHARES, SHARES, st.integers(0, 5))
def test_replay_takes_a_nested_share_of_what_is_left_out_and_nothing_twice(stages, one, other, seed):
    stages = [1, 2, *stages]
    selected, smaller, larger = (
        set(select(stages, {"stage": 2}, replay and {"stage": 1, "share": replay}, seed))
        for replay in (None, *sorted([one, other]))
    )
    assert selected == {n for n, stage in enumerate(stages) if stage == 2}
    assert {stages[n] for n in smaller - selected} == {1} and selected < smaller <= larger
    assert len(smaller - selected) == max(round(min(one, other) * stages.count(1)), 1)


def test_a_share_is_the_same_in_every_process_and_another_with_another_seed():
    assert select([1] * 12, {"share": 0.3}, seed=7) == [2, 7, 8, 9]
    assert len({tuple(select([1] * 40, {"share": 0.5}, seed=seed)) for seed in range(10)}) == 10


def test_a_selection_that_cannot_be_meant_is_refused():
    for where, replay, message in (
        ({"stag": 1}, None, "`data.where`: no record has the field stag; fields are stage"),
        ({"stage": [1, 4]}, None, "`data.where`: no record has stage 4; values are 1, 2"),
        ({"stage": 1}, {"stage": 1}, "`data.replay`: no record has stage 1; values are 2"),
        ({"stage": [1, 2]}, {"stage": 1}, "`data.where` leaves no record out, so `data.replay` has none"),
    ):
        with pytest.raises(RecordsError, match=message):
            select([1, 2, 2], where, replay)
    records = with_metadata({"a": 1, "b": 2}, {"a": 2, "b": 1})
    with pytest.raises(RecordsError, match="`data.where` leaves no record"):
        select_training(records, Selection.model_validate({"a": 1, "b": 1}), None, 0)
    with pytest.raises(RecordsError, match="records have no metadata; `data.stage_map` gives them some"):
        select([None], {"stage": 1})


IMAGES = st.lists(st.lists(st.integers(0, 9), max_size=2, unique=True), min_size=1, max_size=30)
NUM_FOLDS = st.integers(2, 4)
FORM = ContextForm(by="stage", order=[1, 2])


def records_about(images: list[list[int]]) -> list[Record]:
    """A record about each of these images, in stages 1 and 2 in turn."""
    return [
        replace(record, images=tuple(map(Path, map(str, some))), turns=(Turn(f"q{record.origin}", "a"),))
        for record, some in zip(in_stages(*(place % 2 + 1 for place in range(len(images)))), images, strict=True)
    ]


def keys_of(record: Record) -> tuple[str, ...]:
    """Images 0 and 1 have the same bytes."""
    return tuple(str(max(int(str(path)), 1)) for path in record.images)


def images_of(records: list[Record]) -> set[str]:
    return {key for record in records for key in keys_of(record)}


def folds_of(records: list[Record], number: int, seed: int = 0) -> list[tuple[list[Record], list[Record]]]:
    """What is trained on and what is left out, for each fold; none if there are too few images."""
    try:
        return [hold_out(records, Fold(fold=fold, of=number), seed, keys_of) for fold in range(1, number + 1)]
    except RecordsError:
        return []


@pytest.mark.guarantee("Folds share no image, not even under two names, and together have all images.")
@FEW
@given(IMAGES, NUM_FOLDS, st.integers(0, 5))
def test_every_image_is_left_out_once_and_never_trained_on_where_it_is(images, number, seed):
    records = records_about(images)
    folds = folds_of(records, number, seed)
    for trained_on, left_out in folds:
        assert images_of(trained_on).isdisjoint(images_of(left_out)) and left_out
        assert sorted([*trained_on, *left_out], key=records.index) == records
        assert trained_on == sorted(trained_on, key=records.index) and left_out == sorted(left_out, key=records.index)
    found = [record.origin for _, left_out in folds for record in left_out]
    assert not folds or sorted(found) == sorted(record.origin for record in records if record.images)


@pytest.mark.guarantee("No context has an answer from a model that was trained on the image.")
@FEW
@given(IMAGES, NUM_FOLDS)
def test_no_context_has_an_answer_of_a_model_that_trained_on_the_image(images, number):
    """The model of each fold answers what it was not trained on, and contexts have these answers."""
    records = records_about(images)
    folds = folds_of(records, number)
    answered_by = {record.origin: model for model, (_, some) in enumerate(folds) for record in some}

    def answered(record: Record) -> list[Turn]:
        return [Turn(turn.question, str(answered_by[record.origin])) for turn in record.turns]

    for record in with_context(records, FORM, keys_of, answered) if folds else []:
        for turn in record.known:
            trained_on, _ = folds[int(turn.answer)]
            assert images_of(trained_on).isdisjoint(keys_of(record))


def test_folds_have_as_many_images_to_one_and_follow_from_the_seed():
    records = records_about([[number] for number in range(1, 10)] * 2)
    assert [len(images_of(left_out)) for _, left_out in folds_of(records, 2)] == [5, 4]
    assert sorted(images_of(folds_of(records, 2, seed=7)[0][1])) == ["1", "2", "3", "5", "7"]
    assert len({frozenset(images_of(folds_of(records, 2, seed)[0][1])) for seed in range(10)}) > 5


def test_fewer_images_than_folds_are_refused():
    records = records_about([[1], [1, 2], [0], []])
    with pytest.raises(RecordsError, match="`data.held_out`: 1 image cannot be divided into 2 folds; images that a"):
        hold_out(records, Fold(fold=1, of=2), 0, keys_of)


ORDER = StageOrder(by="stage", stages=[2, "easy", 1])


def test_a_record_is_in_the_stage_of_its_value_as_json_or_as_text():
    assert [ORDER.stage_of(record) for record in in_stages(1, "2", 2.0, "easy", [1])] == [2, 0, 0, 1, 2]
    assert ORDER.check(in_stages(1, 2, 2)) == "stage 2 (2), then stage easy (0), then stage 1 (1)"
    # the name that stages had in an earlier version is read
    assert StageOrder.model_validate({"by": "stage", "lessons": [2, "easy", 1]}) == ORDER


def test_records_in_no_stage_are_counted_and_named():
    counted = r"no stage \(1\), stage 1, 2 \(1\), stage 3 \(2\); add the values to `stages`, or leave .* `data.where`$"
    with pytest.raises(RecordsError, match=f"`batch.order`: 4 of 5 train records are not in one stage: {counted}"):
        ORDER.check(in_stages(1, 3, 3, None, [1, 2]))
