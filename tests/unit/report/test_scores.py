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
    assert (scores.overall.score, scores.overall.majority) == (51 / 60, 0.5)
    for by, groups in scores.groups.items():
        expected = {
            name: (one.num_questions, one.exact_match, one.majority) for name, one in evaluation.groups[by].items()
        }
        assert {name: (one.num_questions, one.score, one.majority) for name, one in groups.items()} == expected


def test_groups_are_scored_by_the_metric_as_if_they_were_all():
    """BLEU of a group is that of its answers alone, and questions without a box are in no group of the points."""
    rows = [replace(row, answer=f"{row.answer} it is so", predicted=f"{row.answer} it is so") for row in questions()]
    rows = [replace(row, predicted="no it is") if number % 10 == 0 else row for number, row in enumerate(rows)]
    scores = score_run(rows, "bleu")
    for name, group in scores.groups["question"].items():
        alone = [row for row in rows if row.question == name]
        assert group == Evaluation.of(alone, metric="bleu").headline and (group.score < 1) == (name == "q0")
    assert 0 < scores.groups["question"]["q0"].score < scores.overall.score < 1
    boxed = [replace(row, answer="[0, 0, 9, 9]", predicted="(1, 1)") for row in rows[:30:2]]
    points = score_run([*boxed, *rows[30:]], "point_inside")
    assert [group.num_questions for group in points.groups["question"].values()] == [3] * 5
    assert points.overall.score == 1 and points.num_images == 6


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
