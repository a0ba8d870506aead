"""Route each question to one of several runs, such as the adapter that was trained on its stage.

Design: each run has answered all questions, so an answer is taken and not given again: what is routed is what each
adapter answers alone, to the bit, and no model is loaded. The cost: each adapter also answers the questions of the
others, which shows what it does on these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from lookonce.errors import UsageError
from lookonce.eval.comparison.join import in_one_order
from lookonce.eval.comparison.runs import Run
from lookonce.eval.scores.prediction import Prediction
from lookonce.text import count, listed, nfc

Label = Literal["stage", "category", "source"]
"""The labels of a question that are in its prediction."""


def route(runs: Mapping[str, Run], by: Label) -> list[Prediction]:
    """The prediction of each question by the run of its label, in the order of the first run; `runs` are by label.

    Raises:
        UsageError: the runs answered different questions, or questions have a label without a run.
    """
    rows = dict(zip(map(nfc, runs), in_one_order(list(runs.values())), strict=True))
    labels = [getattr(one.in_nfc, by) for one in next(iter(rows.values()))]
    check_labels(labels, list(rows), by)
    return [rows[label][number] for number, label in enumerate(labels)]


def check_labels(labels: Sequence[str | None], known: Sequence[str], by: Label) -> None:
    """Check that there is a run for the label of each question.

    Raises:
        UsageError: there is none for some; counts and names their labels.
    """
    if others := Counter(label for label in labels if label not in known):
        named = [f"{f'{by} {label}' if label else f'no {by}'} ({number:,})" for label, number in others.items()]
        raise UsageError(
            f"{others.total():,} of {count(len(labels), 'question')} have no run to be routed to: {listed(named)}; "
            f"there are runs for {by} {listed(known)}; name one for each {by}"
        )
