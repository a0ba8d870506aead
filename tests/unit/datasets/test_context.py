"""Earlier answers in prompts: of the records, and of predictions files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.rows import write_lines

from lookonce.datasets.context import NOT_ANSWERED, ContextForm, as_shown, with_context, with_given
from lookonce.datasets.records import Context, Record, Turn
from lookonce.errors import RecordsError

FORM = ContextForm(by="stage", order=[1, 2, 3])
TURNS = ContextForm(by="stage", order=[1, 2, 3], form="turns")


def record(stage: object, question: str, answer: str = "yes", image: str = "a") -> Record:
    images, origin = (Path(image),) if image else (), f"{image}.jsonl:{stage}"
    return Record(images, (Turn(question, answer),), metadata={"stage": stage}, origin=origin)


def keys_of(record: Record) -> tuple[str, ...]:
    """Two paths may be one image."""
    return tuple(path.name.removesuffix("-copy") for path in record.images)


def known(records: list[Record], form: ContextForm = FORM) -> list[tuple[Turn, ...]]:
    return [one.known for one in with_context(records, form, keys_of)]


def test_a_question_follows_the_answers_of_earlier_stages_about_the_same_image():
    records = [
        *(record(3, "e?"), record(2, "c?", "2"), record("1", "b?", "no", "a-copy"), record(1, "a?")),
        *(record(1, "x?", image="b"), record(2, "d?", image="b"), record(4, "f?"), record(None, "g?")),
    ]
    a, b, c, x = Turn("a?", "yes"), Turn("b?", "no"), Turn("c?", "2"), Turn("x?", "yes")
    assert known(records) == [(b, a, c), (b, a), (), (), (), (x,), (), ()]


def test_images_must_be_exactly_the_same_and_there_must_be_some():
    both = replace(record(2, "b?"), images=(Path("a"), Path("b")))
    assert known([record(1, "a?"), both, record(1, "a?", image=""), record(2, "b?", image="")]) == [()] * 4


STAGED = st.builds(
    record, st.sampled_from([1, 2, 3, 4]), st.sampled_from("pqr"), st.sampled_from("xy"), st.sampled_from("ab")
)


@pytest.mark.guarantee("The context of a question never has its own answer or one of a later stage.")
@settings(max_examples=50)
@given(st.lists(STAGED, max_size=12), st.sampled_from([FORM, TURNS]))
def test_no_question_is_told_its_own_answer_or_one_of_a_later_stage(records, form):
    """Each record's own answer says which record it is of, so that it is known wherever it is shown."""
    numbered = [replace(one, turns=(replace(one.turns[0], answer=str(n)),)) for n, one in enumerate(records)]
    for one, found in zip(numbered, with_context(numbered, form, keys_of), strict=True):
        assert found.turns == one.turns
        for turn in found.known:
            source = numbered[int(turn.answer)]
            assert form.stage_of(source) < form.stage_of(one) and source.images == one.images
            assert turn.question != one.turns[0].question


def test_a_summary_is_a_text_in_the_question_and_turns_stand_before_it():
    records = [record(1, "a {question}?", "two\n lines;  {answers}"), record(1, "b?"), record(2, "c?")]
    written = "Known so far: a {question}? two lines; {answers}; b? yes\nc?"
    shown = with_context(records, FORM, keys_of)[2].shown
    assert (shown.turns, shown.context) == ((Turn(written, "yes"),), None)
    in_turns = with_context(records, TURNS, keys_of)[2]
    assert in_turns.shown.turns == (records[0].turns[0], records[1].turns[0], Turn("c?", "yes"))
    assert (in_turns.num_given, with_context(records, FORM, keys_of)[2].num_given, records[0].num_given) == (2, 0, 0)
    own = ContextForm(by="stage", order=[1, 2], each="{answer}", template="{question} ({answers})")
    told = (Turn("a?", "1"), Turn("b?", "2"))
    assert own.write(list(told), "c?") == Context(told, "c? (1; 2)")
    assert records[0].shown is records[0]


def test_the_same_answer_is_told_once():
    records = [record(1, "a?"), record(1, "a?"), record(1, "a?", "no"), record(2, "b?")]
    assert known(records)[3] == (Turn("a?", "yes"), Turn("a?", "no"))


def test_an_answer_that_is_empty_or_cut_off_or_spells_a_special_token_is_not_shown():
    assert (as_shown(" two ", "stop"), as_shown("a", None)) == ("two", "a")
    for text, ended in ((" ", "stop"), ("a", "length"), ("no<|im_end|>", "stop")):
        assert as_shown(text, ended) == NOT_ANSWERED


def test_a_stage_that_no_record_is_in_is_refused():
    with pytest.raises(RecordsError, match="`data.context`: no record has stage 3; values are 1, 2$"):
        FORM.check([record(1, "a?"), record(2, "b?")])
    with pytest.raises(RecordsError, match="no record has the field stage; records have no metadata; `data.stage_map`"):
        FORM.check([Record((), (Turn("a?", "b"),))])


def test_wrong_values_are_refused():
    nothing_else = "and nothing else in braces"
    for values, message in (
        ({"order": [1]}, "at least 2 items"),
        ({"order": [1, "1"]}, "has 1 twice"),
        ({"each": "{question}"}, f"must have {{answer}}, may have {{question}}, {nothing_else}"),
        ({"template": "{answers} {question} {image}"}, f"must have {{answers}} and {{question}}, {nothing_else}"),
    ):
        with pytest.raises(ValidationError, match=message):
            ContextForm(**{"by": "stage", "order": [1, 2]} | values)


TWO_STAGES = ContextForm(by="stage", order=[1, 2])


RECORDS = {
    split: [record(1, "a?", "true", image), record(2, "b?", "true", image)]
    for split, image in (("train", "x-copy"), ("val", "y-copy"))
}


def row(image: str, predicted: str, question: str = "a?", **more: object) -> dict[str, object]:
    return {"question": question, "image_keys": [image], "predicted": predicted} | more


@pytest.fixture
def read(tmp_path):
    """The contexts with files of these rows, and the records of training and validation."""

    def read(*files: list[object]) -> list[tuple[Turn, ...]]:
        paths = [write_lines(tmp_path / f"{number}.jsonl", *rows) for number, rows in enumerate(files)]
        found = with_given(RECORDS, TWO_STAGES, paths, keys_of)
        return [one.known for some in found.values() for one in some]

    return read


def test_answers_are_those_of_the_files_whatever_their_paths(read):
    own = [row("x", " no "), row("x", "other", "b?"), row("z", "unused")]
    assert read(own, [row("y", "cut", ended="length"), row("x", "no")]) == [
        *((), (Turn("a?", "no"),), (), (Turn("a?", NOT_ANSWERED),))
    ]
    assert read() == [(), (Turn("a?", "true"),), (), (Turn("a?", "true"),)]


def test_missing_answers_are_counted_and_named(read, tmp_path):
    with pytest.raises(RecordsError) as error:
        read([row("z", "no")])
    lacks = f'{tmp_path}/0.jsonl lacks 2 answers to earlier questions: "a?" of x-copy.jsonl:1, "a?" of y-copy.jsonl:1'
    advice = "name all predictions of the training and validation records"
    assert str(error.value) == f"`data.context.answers`: {lacks}; {advice}"


def test_a_file_that_is_missing_or_contradicts_itself_or_has_other_rows_is_refused(read, tmp_path):
    with pytest.raises(RecordsError, match="no predictions at .*nowhere.jsonl; write them with: lookonce eval RUN"):
        with_given(RECORDS, TWO_STAGES, [tmp_path / "nowhere.jsonl"], keys_of)
    with pytest.raises(RecordsError, match='1.jsonl:1 answers "a\\?" about the same image otherwise than .*0.jsonl; '):
        read([row("x", "no")], [row("x", "yes")])
    assert read([row("x", "no"), row("x", "yes"), row("y", "no")])[1] == (Turn("a?", "no"),)
    with pytest.raises(RecordsError, match="0.jsonl:1 is not a prediction with image keys: `image_keys` is missing"):
        read([{"question": "a?", "predicted": "no"}])
    with pytest.raises(RecordsError, match="0.jsonl:1 holds half a character"):
        read([row("x", "\ud800")])
