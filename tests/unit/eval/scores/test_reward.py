"""Rewards: what the metrics give, what tells wrong answers apart, and functions of the user's own."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lookonce.errors import UsageError
from lookonce.eval.scores.metric import MATCHED, own_function
from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.scores.reward import SCORES, Reward
from lookonce.run.grpo import REWARDS, GrpoSection


def row(*references: str) -> Prediction:
    return Prediction("a.jsonl:7", ("x.png",), "What is it?", references[0], "", "", references[1:], ("key",))


def worth(answer: str, *references: str, **options: Any) -> float:
    [found] = Reward(GrpoSection(**options))(row(*references), [answer], [False], {"grade": 3})
    return found


def test_every_name_has_a_score_and_a_metric_has_its_own():
    assert SCORES.keys() == REWARDS.keys() and MATCHED.keys() < REWARDS.keys()
    assert all(SCORES[name] is MATCHED[name] for name in MATCHED)


@pytest.mark.parametrize(
    ("reward", "answer", "references", "expected"),
    [
        ("exact_match", "cafe\u0301", ["tea", "caf\u00e9"], 1),  # of the second, in another normal form
        ("exact_match", "Tea", ["tea"], 0),
        ("exact_match_lower", "Tea", ["tea"], 1),
        ("label_f1", "b; c", ["a; b"], 0.5),
        ("label_set_match", "b; a", ["a; b"], 1),
        ("token_recall", "a red polyp", ["polyp", "large polyp"], 1),
        ("count", "3", ["3"], 1),
        ("count", " 2. ", ["4", "3"], 0.5),
        ("count", "-1", ["1"], 1 / 3),
        ("count", "two", ["2"], 0),
        ("count", "2 or 3", ["2"], 0),
        ("count", "9" * 400, ["2"], 0),
        ("count", "2", ["two"], 0),  # not a question that counts
        ("point_inside", "(5, 5)", ["[0, 0, 9, 9]"], 1),
        ("point_distance", "(5, 5)", ["[0, 0, 9, 9]"], 1),
        ("point_distance", "(109, 5)", ["[9, 9, 0, 0]"], 0.5),  # corners in any order
        ("point_distance", "(39, 49)", ["[0, 0, 9, 9]"], 2 / 3),
        ("point_distance", "(0, 100)", ["(500, 500)", "(0, 200)"], 0.5),
        ("point_distance", "(0.5, 0.6)", ["(0.5, 0.5)"], 0.5),
        ("point_distance", "left", ["(5, 5)"], 0),
        ("point_distance", "(5, 5)", ["left"], 0),
        ("format", "no", ["yes"], 1),
        ("format", "none", ["yes"], 0),
        ("format", "7", ["3"], 1),
        ("format", "seven", ["3"], 0),
        ("format", "(1, 2)", ["[0, 0, 9, 9]"], 1),
        ("format", "there", ["(3, 4)"], 0),
        ("format", "anything", ["polyp"], 1),
        ("format", " ", ["polyp"], 0),
    ],
)
def test_what_an_answer_is_worth(reward, answer, references, expected):
    assert worth(answer, *references, reward=reward) == pytest.approx(expected)


def test_rewards_are_summed_by_their_weights_and_the_lowest_sum_is_for_cut_answers_that_are_punished():
    weights = {"exact_match": 1, "count": 0.5, "format": -0.25}
    assert worth("4", "3", reward=weights) == 0.5 * 0.5 - 0.25
    given = (row("3"), ["3", "3", "4"], [True, False, False], {})
    masked, punished = (Reward(GrpoSection(reward=weights, cut=cut)) for cut in ("masked", "punished"))
    assert (masked(*given), punished(*given)) == ([1.25, 1.25, 0.0], [-0.25, 1.25, 0.0])


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def short(question, answer, reference, record):\n"
        "    assert question == 'What is it?' and record['origin'] == 'a.jsonl:7'\n"
        "    return 1 / len(answer) if reference != 'worst' else -record['grade']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)
    own_function.cache_clear()


def test_a_function_of_ones_own_gives_the_best_of_the_references_and_its_error_names_the_record(own):
    weights = {"my_rewards:short": 2, "exact_match": 1}
    assert worth("abcd", "worst", "abcd", reward=weights) == 1.5
    with pytest.raises(UsageError, match=r"my_rewards:short failed on a\.jsonl:7 .*.What is it\?.*ZeroDivisionError"):
        worth("", "a", reward=weights)
    assert worth("a", "worst", reward={"my_rewards:short": 0.5}) == -1.5, "any number, and the record's metadata"
    punished = Reward(GrpoSection(reward="my_rewards:short", cut="punished"))
    assert punished(row("worst"), ["a", "a"], [True, False], {"grade": 9}) == [-9, -9]
    for name in ("my_rewards:long", "os:system"):
        with pytest.raises(UsageError, match=name):
            Reward(GrpoSection(reward=name))
