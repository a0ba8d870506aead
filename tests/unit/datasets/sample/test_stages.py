"""The sample with stages: later answers follow from earlier ones, and from nothing less."""

from __future__ import annotations

from collections import defaultdict

import pytest

from lookonce.datasets.sample.scene import (
    BOX,
    CLASS,
    FORM,
    PROCEDURE,
    PROTOCOL,
    SIDE,
    STAGED_KIND,
    TEXT,
    ask_in_stages,
    make_scenes,
    with_three_polyps,
)

SCENES = [with_three_polyps(scene) for scene in make_scenes(3, 288, (STAGED_KIND,))]
ANSWERS = [{question: answer for question, answer, _ in ask_in_stages(scene)} for scene in SCENES]


def answers_after(question: str, earlier: tuple[str, ...]) -> dict[tuple[str, ...], list[str]]:
    """The answers to a question for each combination of earlier answers."""
    found = defaultdict(list)
    for one in ANSWERS:
        found[tuple(one[name] for name in earlier)].append(one[question])
    return found


@pytest.mark.parametrize(
    ("question", "earlier"), [(PROTOCOL, (PROCEDURE, TEXT)), (CLASS, (BOX, SIDE)), (FORM, (PROTOCOL, CLASS))]
)
def test_both_earlier_answers_tell_a_later_one_and_one_of_them_does_not(question, earlier):
    assert all(len(set(answers)) == 1 for answers in answers_after(question, earlier).values())
    for alone in earlier:
        for answers in answers_after(question, (alone,)).values():
            most = max(map(answers.count, answers))
            assert most / len(answers) < 1.2 * 1 / len(set(answers)) + 0.05 and len(set(answers)) > 1


def test_every_frame_is_asked_all_questions_stage_by_stage():
    stages = [[stage for _, _, stage in ask_in_stages(scene)] for scene in SCENES]
    assert stages == [[1, 1, 1, 1, 2, 2, 3]] * len(SCENES)
