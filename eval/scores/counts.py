"""Answers that are wrong in kind: empty, cut at the token limit, or not an answer that the training records have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from lookonce.datasets.formats.record import Record
from lookonce.eval.scores.prediction import Prediction
from lookonce.text import nfc

TrainingAnswers = Mapping[str, AbstractSet[str]]
"""The answers of the training records to each question."""


@dataclass(frozen=True)
class Counts:
    """The numbers of such answers; None if not known."""

    empty: int
    cut: int | None
    """Answers that ended at `eval.max_new_tokens`."""
    outside_training: int | None
    """Answers that no training record has for the question, or for any question if training lacks this one."""
    distinct_wrong: int
    """Different wrong answers, all questions together."""

    @classmethod
    def of(cls, predictions: Sequence[Prediction], training: TrainingAnswers | None = None) -> Counts:
        """Count them; `training` are the `training_answers` of the run."""
        endings = [prediction.ended for prediction in predictions if prediction.ended]
        return cls(
            empty=sum(not prediction.predicted.strip() for prediction in predictions),
            cut=endings.count("length") if endings else None,
            outside_training=_num_outside(predictions, training) if training else None,
            distinct_wrong=len({prediction.predicted.strip() for prediction in predictions if not prediction.is_right}),
        )

    def text(self) -> str:
        """One line, without what is not known."""
        known = [
            f"{self.distinct_wrong:,} different wrong",
            f"{self.empty:,} empty",
            f"{self.cut:,} cut" if self.cut is not None else "",
            f"{self.outside_training:,} never seen in training" if self.outside_training is not None else "",
        ]
        return ", ".join(filter(None, known))


def training_answers(records: Iterable[Record]) -> dict[str, set[str]]:
    """The answers to each question in some records, with all references; both in NFC."""
    answers: dict[str, set[str]] = {}
    for record in records:
        for turn in record.turns:
            texts = (nfc(text).strip() for text in (turn.answer, *record.references))
            answers.setdefault(nfc(turn.question), set()).update(texts)
    return answers


def _num_outside(predictions: Iterable[Prediction], training: TrainingAnswers) -> int:
    of_all = set().union(*training.values())
    return sum(p.predicted.strip() not in training.get(p.question, of_all) for p in predictions)
