"""The majority baseline of an audit, and which questions the report lists."""

from __future__ import annotations

from lookonce.datasets.audit.report import to_text
from lookonce.datasets.majority import Majority
from lookonce.datasets.records import read_records

CLEAN = [("a.png", "Is there text?", "yes"), ("b.png", "Is there text?", "no"), ("a.png", "What is it?", "a polyp")]


def test_the_majority_baseline_counts_right_answers_of_the_other_file(folder, write, look):
    train = write(folder / "train.jsonl", [*CLEAN, ("c.png", "Is there text?", "no")])
    test = write(folder / "test.jsonl", [(f"{n}.png", q, "no") for n in "xyz" for q in ("Is there text?", "Never?")])
    [baseline] = look(train, test).baselines
    majority = Majority.of_records(read_records(train))
    turns = [turn for record in read_records(test) for turn in record.turns]
    assert baseline.num_right == sum(majority.answer(turn.question) == turn.answer for turn in turns)
    assert (baseline.learned_on, baseline.scored_on, baseline.num_questions) == ("train.jsonl", "test.jsonl", 6)


def test_in_a_single_file_a_question_asked_once_counts_as_unknown(folder, write, look):
    rows = [*CLEAN, ("c.png", "Is there text?", "no"), ("c.png", "Is it red?", "no"), ("c.png", "Who?", "a nurse")]
    [baseline] = look(write(folder / "train.jsonl", rows)).baselines
    assert (baseline.learned_on, baseline.scored_on) == ("train.jsonl", "train.jsonl")
    assert (baseline.num_right, baseline.num_questions) == (3, 6)


def test_questions_asked_once_are_counted_and_not_listed(folder, write, look):
    text = to_text(look(write(folder / "train.jsonl", [("a.png", f"What is {n}?", "yes") for n in "xyz"])))
    assert "3 questions asked once each" in text and "What is x?" not in text
