"""What each record weighs with `batch.balance`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.datasets.balance import balance_weights, record_weights
from lookonce.datasets.records import Record, Turn
from lookonce.errors import RecordsError


def record(question: str, *answers: str, **metadata: object) -> Record:
    turns = tuple(Turn(question, answer) for answer in answers)
    return Record((Path("a.jpg"),), turns, metadata=metadata, origin="train.jsonl:7")


@pytest.mark.guarantee(
    "With `batch.balance: answer`, all answers to a question have the same total weight, and each question the number "
    "of its records; with `category`, all categories have the same total weight."
)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xxxxyz")), min_size=1))
def test_alternatives_have_equal_shares_and_groups_keep_theirs(classes):
    total: Counter[object] = Counter()
    for name, weight in zip(classes, balance_weights(classes), strict=True):
        total[name] += weight
    for group, number in Counter(group for group, _ in classes).items():
        shares = [weight for (of, _), weight in total.items() if of == group]
        assert shares == pytest.approx([number / len(shares)] * len(shares))


def test_answers_are_balanced_within_a_question_and_categories_over_all_records():
    notes: list[str] = []
    records = [
        *[record("Text?", "yes", category="closed")] * 6,
        *[record("Text?", "no\u0308", category="closed"), record("Text?", "n\u00f6", category="closed")],
        *[record("Where?", "yes", category=2)] * 2,
    ]
    assert record_weights(records, "answer", notes.append) == pytest.approx([4 / 6] * 6 + [2] * 2 + [1] * 2)
    assert record_weights(records, "category") == pytest.approx([5 / 8] * 8 + [5 / 2] * 2)
    assert notes == ['`batch.balance: answer`: records of 3 answers weigh from 0.67 ("yes") to 2 ("n\u00f6")']


ANSWERED = [record("Text?", "yes")] * 2


@pytest.mark.parametrize(
    ("records", "by", "message"),
    [
        (
            [record("Text?", "yes", "no"), *ANSWERED],
            "answer",
            "train.jsonl:7 has 2 questions, .* --to flat, or",
        ),
        (ANSWERED, "answer", "changes nothing, because there are no two answers"),
        (
            [record("Where?", f"({n}, 5)") for n in range(9)],
            "answer",
            "9 records have 9 different ones, as texts and p",
        ),
        (ANSWERED, "category", "train.jsonl:7 has 0 values of `category`.*; `data.stage_map` gives"),
        ([record("Text?", "yes", category=["a", "b"])], "category", "has 2 values of `category`"),
        (
            [record("Text?", "yes", category="a")] * 2,
            "category",
            "changes nothing, because there are no two categories",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(records, by, message):
    with pytest.raises(RecordsError, match=message):
        record_weights(records, by)
