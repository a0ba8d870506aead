"""The interval of the headline: exact match, by resampling images."""

from __future__ import annotations

from collections.abc import Sequence

from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.statistics.bootstrap import Interval, share_interval
from lookonce.eval.statistics.clusters import clusters_of


def exact_match_interval(predictions: Sequence[Prediction]) -> Interval | None:
    """The 95 % interval of the share of right answers; None if all questions are about one image."""
    if not predictions:
        return None
    return share_interval([one.is_right for one in predictions], clusters_of([one.sources for one in predictions]))
