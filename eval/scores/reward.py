"""What answers are worth (`grpo.reward`): a weighted sum of scores, each from 0 to 1 but for functions of one's own.

By a metric, an answer is worth what it scores in the evaluation. A question teaches only if its answers are worth
different amounts, so there are rewards besides that tell wrong answers apart (docs/grpo.md#rewards). The distance d of
points counts as 1 / (1 + d / D), with a tenth of the range as D: 0.1 if the reference is in parts of 1, else 100, as of
Qwen3-VL's range of 1000. A reward that does not apply to a question is 0 for all answers, so it teaches nothing there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lookonce.datasets.points import NUMBER, reference_numbers
from lookonce.errors import UsageError
from lookonce.eval.scores import match
from lookonce.eval.scores.metric import MATCHED, Matched, own_function, own_score, place_of, right_answers
from lookonce.eval.scores.prediction import Prediction
from lookonce.run.grpo import REWARDS, GrpoSection
from lookonce.text import nfc

APPLIES: Mapping[str, tuple[str, Callable[[Sequence[str]], bool]]] = {
    "count": ("a number", lambda references: any(_number(text) is not None for text in references)),
    "point_inside": ("a box", lambda references: bool(match.reference_boxes(references))),
    "point_distance": ("a point or a box", lambda references: any(map(reference_numbers, references))),
}
"""The rewards that are 0 for all answers to some questions: what a reference must be, and whether some are that."""
MOST = 1_000_000
"""The largest reward, with its weight: differences of larger ones are lost in rounding."""
UNITS = (0.1, 100.0)
"""The distance of points that is worth one half: in parts of 1, and in other units."""


def count(answer: str, references: Sequence[str]) -> float:
    """How near the number that an answer is comes to a reference; 0 if it is none."""
    number, right = _number(answer), [_number(text) for text in references]
    if number is None:
        return 0.0
    return max((1 / (1 + abs(number - value)) for value in right if value is not None), default=0.0)


def _number(text: str) -> float | None:
    """The number that a text is, apart from the spaces and the full stop around it."""
    text = text.strip().removesuffix(".")
    return float(text) if NUMBER.fullmatch(text) and math.isfinite(float(text)) else None


def point_distance(answer: str, references: Sequence[str]) -> float:
    """How near an answer's point comes to a reference point or box; 0 if one of them is none."""
    if (point := match.answer_point(answer)) is None:
        return 0.0
    return max((_nearness(point, reference_numbers(text)) for text in references), default=0.0)


def _nearness(point: match.Point, reference: tuple[float, ...]) -> float:
    if not reference:
        return 0.0
    nearest = [
        min(max(value, min(ends)), max(ends))
        for value, ends in zip(point, (reference[::2], reference[1::2]), strict=True)
    ]
    unit = UNITS[0] if all(0 <= value <= 1 for value in reference) else UNITS[1]
    return 1 / (1 + math.dist(point, nearest) / unit)


def form(answer: str, references: Sequence[str]) -> bool:
    """Whether an answer has the form of a reference."""
    return any(_has_form(answer, text) for text in references)


def _has_form(answer: str, reference: str) -> bool:
    if reference_numbers(reference):
        return match.answer_point(answer) is not None
    if _number(reference) is not None:
        return _number(answer) is not None
    return match.is_closed(answer) if match.is_closed(reference) else bool(answer.strip())


SCORES: Mapping[str, Matched] = {
    **{name: MATCHED[name] for name in REWARDS if name in MATCHED},
    "count": count,
    "point_distance": point_distance,
    "format": form,
}
"""The rewards that need no function of the user's own, by their keys."""


class Reward:
    """What answers are worth by the rewards of a run file."""

    def __init__(self, options: GrpoSection) -> None:
        """The rewards of a run file; raises UsageError if a user's function cannot be imported, or has another form."""
        self.weights, self._punishes_cut = dict(options.reward), options.cut == "punished"
        for name in self.weights.keys() - SCORES.keys():
            own_function(name, "reward")

    def __call__(
        self, row: Prediction, answers: Sequence[str], are_cut: Sequence[bool], metadata: Mapping[str, Any]
    ) -> list[float]:
        """What some answers to the question of a row are worth; its own answer does not matter.

        Those that were cut off and are punished are worth no more than any other, nor than the weights allow of scores
        from 0 to 1. `metadata` is that of the record, for functions of the user's own.

        Raises:
            UsageError: a function of the user's own failed, or returned no finite number; names the record.
        """
        row, worth = row.in_nfc, dict[str, float]()
        for answer, is_cut in zip(map(nfc, answers), are_cut, strict=True):
            if answer not in worth and not (is_cut and self._punishes_cut):
                scored = {
                    name: weight * self._score(name, row, answer, metadata) for name, weight in self.weights.items()
                }
                for name, value in scored.items():
                    if abs(value) > MOST:
                        raise UsageError(
                            f"the reward {name} is {value:g} with its weight for {place_of(row, answer)}, and at most "
                            f"{MOST:,} from 0 can be learned from; divide it, or lower its weight in grpo.reward"
                        )
                worth[answer] = math.fsum(scored.values())
        lowest = min(worth.values(), default=0.0)
        lowest = min(lowest, math.fsum(min(weight, 0.0) for weight in self.weights.values()))
        return [
            lowest if is_cut and self._punishes_cut else worth[nfc(answer)]
            for answer, is_cut in zip(answers, are_cut, strict=True)
        ]

    def _score(self, name: str, row: Prediction, answer: str, metadata: Mapping[str, Any]) -> float:
        if name in SCORES:
            return float(SCORES[name](answer, right_answers(row)) or 0)
        return own_score(name, answer, row, metadata)
