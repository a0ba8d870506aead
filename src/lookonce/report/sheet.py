"""Which answers are shown with their images: right, wrong, and those that one run has right and another wrong.

Design: drawn from a fixed seed, so that a page that is made again has the same images, and none is chosen by hand. The
kinds take turns until the sheet is full; within a kind, images that are not shown yet come first.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lookonce.eval.join import Run, in_one_order
from lookonce.eval.scores.prediction import Prediction

NUM_SHOWN = 48
SEED = "report 0"
Row = tuple[Prediction, ...]
"""The answers of all runs to one question."""


@dataclass(frozen=True)
class Kind:
    """Questions that are shown together, such as those that one run answers wrong."""

    title: str
    num_questions: int
    rows: list[Row]
    """Those that are shown."""


def draw_sheet(runs: Sequence[Run]) -> list[Kind]:
    """Draw `NUM_SHOWN` questions, each kind in turn; the runs answered the same questions."""
    kinds = _kinds(runs)
    random_order = random.Random(SEED)
    waiting = {title: _spread(random_order.sample(rows, len(rows))) for title, rows in kinds.items()}
    shown: dict[str, list[Row]] = {title: [] for title in kinds}
    while waiting and sum(map(len, shown.values())) < NUM_SHOWN:
        for title in list(waiting)[: NUM_SHOWN - sum(map(len, shown.values()))]:
            if waiting[title]:
                shown[title].append(waiting[title].pop(0))
            else:
                del waiting[title]
    return [Kind(title, len(kinds[title]), rows) for title, rows in shown.items()]


def _kinds(runs: Sequence[Run]) -> dict[str, list[Row]]:
    """All questions of each kind, by its title. Runs are compared with the first one."""
    rows = list(zip(*in_one_order(runs), strict=True))
    everywhere = " in all runs" if len(runs) > 1 else ""
    kinds = {
        f"Wrong{everywhere}": [row for row in rows if not any(one.is_right for one in row)],
        f"Right{everywhere}": [row for row in rows if all(one.is_right for one in row)],
    }
    for place, run in enumerate(runs[1:], start=1):
        won = f"Won by {run.name}: right there, wrong in {runs[0].name}"
        kinds[won] = [row for row in rows if row[place].is_right and not row[0].is_right]
        lost = f"Lost by {run.name}: wrong there, right in {runs[0].name}"
        kinds[lost] = [row for row in rows if row[0].is_right and not row[place].is_right]
    return kinds


def _spread(rows: Sequence[Row]) -> list[Row]:
    """The rows, the first one about each image before the others."""
    times: Counter[tuple[str, ...]] = Counter()
    rank = []
    for row in rows:
        rank.append(times[row[0].sources])
        times[row[0].sources] += 1
    return [row for _, row in sorted(zip(rank, rows, strict=True), key=lambda pair: pair[0])]
