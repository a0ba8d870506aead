"""A run's answers as the submission JSON of a challenge: MediaEval Medico or ImageCLEFmed MEDVQA-GI, task 1.

The keys and their order are those of the challenges' own scripts (submission_task1.py of the package medvqa, 0.15.7),
which write predictions_1.json and use one reference. A challenge scores its own rows in its own order: the file is
complete only if the run answered exactly these.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

from lookonce.datasets.records import Record
from lookonce.errors import UsageError
from lookonce.eval.answers.files import AnsweringCost
from lookonce.eval.scores import match
from lookonce.eval.scores.prediction import Prediction
from lookonce.settings import Section
from lookonce.text import count, listed, nfc, quoted

Challenge = Literal["medico", "medvqa-gi"]
NUM_NAMED = 3
PUBLIC = ("bleu", "rouge1", "rouge2", "rougeL", "meteor")


class SubmissionInfo(Section):
    """Who submits: the keys of `submission_info`, which the challenges name."""

    Participant_Names: str = ""
    Affiliations: str = ""
    Contact_emails: list[str] = []
    Team_Name: str = ""
    Country: str = ""
    Notes_to_organizers: str = ""


@dataclass(frozen=True)
class Rules:
    """How a challenge's script writes answers and scores."""

    title: str
    competition: str
    """What the organisers' tool calls it."""
    strips_answers: bool
    digits: int
    num_public: int | None
    """The number of rows of the public part, where the script has one."""


RULES: dict[Challenge, Rules] = {
    "medico": Rules("MediaEval Medico 2026", "medico-2026", True, 4, 1500),
    "medvqa-gi": Rules("ImageCLEFmed MEDVQA-GI 2026", "gi-2026", False, 2, None),
}


def submission(
    predictions: Sequence[Prediction], challenge: Challenge, info: SubmissionInfo, cost: AnsweringCost
) -> dict[str, Any]:
    """The content of predictions_1.json. Without a measured `cost` its figures are null.

    Raises:
        UsageError: a question has not exactly one image or is a later turn, or the extra `metrics` is not installed.
    """
    rules = RULES[challenge]
    rows = [_row(number, prediction, rules) for number, prediction in enumerate(predictions)]
    seconds = cost.seconds / cost.num_answered if cost.num_answered else None
    packages = [{"name": package.metadata["Name"], "version": package.version} for package in distributions()]
    return {
        "submission_info": info.model_dump(),
        "public_scores": _public_scores(predictions, [row["answer"] for row in rows], rules),
        "predictions": rows,
        "total_time": round(seconds * len(rows), 4) if seconds else None,
        "time_per_item": seconds,
        "memory_used_mb": cost.used_mb if seconds else None,
        "model_memory_mb": cost.model_mb if seconds else None,
        "gpu_name": cost.device,
        "debug": {
            "packages": sorted(packages, key=lambda package: package["name"].lower()),  # as pip list has them
            "system": {
                "python": platform.python_version(),
                "os": platform.system(),
                "platform": platform.platform(),
                "arch": platform.machine(),
            },
        },
    }


def why_incomplete(predictions: Sequence[Prediction], records: Sequence[Record]) -> str:
    """Which questions of the `records` are not answered; empty if none."""
    turns = [(record, turn) for record in records for turn in record.turns]
    pairs = [((_names(record.images), nfc(turn.question)), record.origin) for record, turn in turns]
    origin_of, needed = dict(pairs), Counter(question for question, _ in pairs)
    answered = Counter((_names(row.images), nfc(row.question)) for row in predictions)
    missing = [*(needed - answered).elements()]
    if not missing:
        return ""
    named = listed([f"{quoted(key[1])} ({origin_of[key]})" for key in missing], NUM_NAMED)
    return f"{len(missing):,} of {count(needed.total(), 'question')} of the split are not answered: {named}"


def too_few(num_answers: int, challenge: Challenge) -> str:
    """That a challenge scores more answers than there are, as a message; empty if it does not."""
    num_public = RULES[challenge].num_public
    return _other_number(challenge, num_answers) if num_public and num_answers < num_public else ""


def _names(images: Iterable[str | Path]) -> tuple[str, ...]:
    """The names of image files; their folder may have been moved."""
    return tuple(Path(image).name for image in images)


def _other_number(challenge: Challenge, num_answers: int) -> str:
    return (
        f"{challenge} scores {RULES[challenge].num_public:,} public rows, and this split has {num_answers:,} questions"
    )


def notes(value: dict[str, Any], challenge: Challenge) -> list[str]:
    """What is unusual about a submission, for the user."""
    messages, num_public = lacking(SubmissionInfo(**value["submission_info"])), RULES[challenge].num_public
    if num_public and len(value["predictions"]) != num_public:
        messages.append(_other_number(challenge, len(value["predictions"])))
    if value["total_time"] is None:
        messages.append("time and memory were not measured by this evaluation, so they are null")
    return messages


def lacking(info: SubmissionInfo) -> list[str]:
    """What the participants have not said of themselves, for the user; at most one message."""
    empty = [key for key, text in info.model_dump().items() if not text and key != "Notes_to_organizers"]
    return [f"submission_info lacks {', '.join(empty)}; give them with --info FILE"] if empty else []


def _row(number: int, row: Prediction, rules: Rules) -> dict[str, Any]:
    if len(row.images) != 1 or row.turn:
        raise UsageError(
            f"{row.origin}: the challenge asks one question about one image, and "
            f"{quoted(row.question)} is turn {row.turn + 1} about {len(row.images)} images; "
            "export a split of such questions with --split"
        )
    answer = row.predicted.strip() if rules.strips_answers else row.predicted
    return {"index": number, "img_id": Path(row.images[0]).stem, "question": row.question, "answer": answer}


def _public_scores(predictions: Sequence[Prediction], answers: list[str], rules: Rules) -> dict[str, float]:
    if not match.has_text_metrics():
        raise UsageError(f"the public scores of a submission need BLEU, ROUGE and METEOR, {match.NOT_INSTALLED}")
    scores = match.TextMetrics([(row.answer,) for row in predictions]).scores(answers)
    return {name: round(scores[name], rules.digits) for name in PUBLIC}


def to_text(value: dict[str, Any]) -> str:
    """The content of the file, indented as the challenges' scripts write it."""
    return json.dumps(value, indent=4, ensure_ascii=False) + "\n"
