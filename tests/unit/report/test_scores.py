"""Scores with intervals: those of an evaluation, and of the largest groups."""

from __future__ import annotations

from dataclasses import replace

from support.answers import questions, wrong

from lookonce.eval.scores.metrics import Evaluation
from lookonce.report.runs import MAX_GROUPS, score_run


def test_the_interval_of_all_is_that_of_the_evaluation():
    rows = wrong(questions(), 9)
    scores, evaluation = score_run(rows), Evaluation.of(rows)
    assert scores.overall.interval == evaluation.headline.interval and scores.num_images == 12
    assert (scores.overall.exact_match, scores.overall.majority) == (51 / 60, 0.5)
    for by, groups in scores.groups.items():
        expected = {
            name: (one.num_questions, one.exact_match, one.majority) for name, one in evaluation.groups[by].items()
        }
        assert {name: (one.num_questions, one.exact_match, one.majority) for name, one in groups.items()} == expected


def test_only_the_largest_groups_are_scored_and_one_about_a_single_image_has_no_interval():
    rows = [replace(row, category="one" if row.images == ("/gone/0.jpg",) else "others") for row in questions()]
    groups = score_run(rows).groups["category"]
    assert groups["one"].interval is None
    assert groups["others"].interval is not None and 0.6 < groups["others"].interval.low < 0.9
    rows = [replace(row, question=f"q {place // 2}", turn=place) for place, row in enumerate(questions(20))]
    rows += [replace(rows[-1], question="most", turn=place) for place in range(200, 203)]
    scores = score_run(rows)
    assert len(scores.groups["question"]) == MAX_GROUPS and "most" in scores.groups["question"]
    assert scores.num_groups["question"] == 51 and scores.groups["stage"] == {}
