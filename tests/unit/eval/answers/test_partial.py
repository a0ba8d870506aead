"""Answers are on disk when they are given, and only those of the same evaluation are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookonce.eval.answers.files import PartialAnswers
from lookonce.eval.decoding.dialogue import Answer

TEXTS = {0: ["yes", "no"], 3: ["zwölf", ""], 7: ["a\nb", "\u2028"]}
ANSWERS = {batch: [Answer(text, (7, 9), -0.1 / 3, "stop") for text in texts] for batch, texts in TEXTS.items()}
SIX = Answer("six", (6,), -2.5, "length")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file of an evaluation that was interrupted."""
    with PartialAnswers(tmp_path, "val", "e1") as partial:
        for number, answers in ANSWERS.items():
            partial.add(number, answers)
            assert PartialAnswers(tmp_path, "val", "e1").read()[number] == answers
    [path] = tmp_path.iterdir()
    return path


def test_answers_of_all_ranks_are_read(written):
    with PartialAnswers(written.parent, "val", "e1", rank=1) as partial:
        partial.add(5, [SIX])
    again = PartialAnswers(written.parent, "val", "e1", rank=2)
    assert again.read() == ANSWERS | {5: [SIX]}
    again.remove()
    assert not list(written.parent.iterdir())


def test_answers_of_another_split_stay(written):
    for name in ("test", "va", "val-shuffled"):
        other = PartialAnswers(written.parent, name, "e2")
        assert other.read() == {}
        other.remove()
    assert written.exists()
    assert PartialAnswers(written.parent, "val", "e2").read() == {} and not written.exists(), "another evaluation"


def test_a_line_that_is_cut_short_is_asked_again_and_harms_no_other(written):
    whole = written.read_bytes()
    for length in range(0, len(whole), 7):
        written.write_bytes(whole[:length])
        partial = PartialAnswers(written.parent, "val", "e1")
        found = partial.read()
        assert found == {number: ANSWERS[number] for number in found}
        with partial:
            partial.add(9, [SIX])
        assert partial.read() == found | {9: [SIX]}
        assert [*map(json.loads, written.read_text().splitlines())][0] == {"evaluation": "e1"}
    assert len(found) == len(ANSWERS) - 1


@pytest.mark.parametrize(
    "line", ["[]", "{", '{"batch": "x", "answers": []}', '{"batch": 1}', '{"batch": 1, "answers": ["yes"]}']
)
def test_a_line_that_is_not_ours_is_dropped(written, line):
    with written.open("a") as file:
        file.write(f"{line}\n")
    assert PartialAnswers(written.parent, "val", "e1").read() == ANSWERS
