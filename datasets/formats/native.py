"""The project's own two record formats, canonical and flat; one file may mix them.

    {"images": ["images/a.jpg"], "turns": [{"question": "Is there text?", "answer": "yes"}],
     "system": "Answer briefly.", "metadata": {"source": "polyps"}}

    {"image_id": "a", "image_filename": "a.jpg", "question": "Is there text?", "answer": "yes", "stage": 1}

Canonical can hold every record. Flat is one question about one image, and all other keys are metadata, so it is also
the format of tables (CSV, parquet). Flat accepts the usual names of columns (readers/image_column.py), `img_id` with a
file of that name beside the records or in `images/` there, and a list under `answers`: its most frequent answer is
trained on, and each of them is right. Texts are read unchanged: `<image>` in them is a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookonce.datasets.formats.checks import Row, answer_text, items, keys_of, kind, need, shown, text
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.record import Record, Turn
from lookonce.datasets.readers.image_column import ANSWER_NAMES, IMAGE_ID_NAMES, IMAGE_NAMES, QUESTION_NAMES
from lookonce.errors import RecordsError

RANKS = {name: rank for rank, name in enumerate(IMAGE_NAMES)}
"""The first image column counts, and embedded bytes before names."""


def read_canonical(row: Row, finder: Finder, origin: str) -> Record:
    """Read a canonical record; a key that is not part of the format is an error."""
    unknown = sorted(set(row) - {"images", "turns", "system", "metadata"})
    if unknown:
        raise RecordsError(f"{origin}: unknown key `{unknown[0]}`; put extra keys under `metadata`")
    turns = items(need(row, "turns", origin), "turns", origin)
    if not turns:
        raise RecordsError(f"{origin}: `turns` is empty; expected at least one question and answer")
    system, metadata = row.get("system"), row.get("metadata")
    if not isinstance(metadata, dict | None):
        raise RecordsError(f"{origin}: `metadata` must be an object, got {kind(metadata)}")
    return Record(
        images=tuple(finder.find(name, origin) for name in items(row.get("images", []), "images", origin)),
        turns=tuple(_turn(turn, origin) for turn in turns),
        system=None if system is None else text(system, "system", origin),
        metadata=metadata or {},
        origin=origin,
    )


def write_canonical(record: Record, images: list[str]) -> Row:
    """Write all of a record."""
    turns = [{"question": turn.question, "answer": turn.answer} for turn in record.turns]
    return {"images": images, "turns": turns, "system": record.system, "metadata": dict(record.metadata)}


def read_flat(row: Row, finder: Finder, origin: str) -> Record:
    """Read a record of one question about one image, or about a list of them."""
    asked = first_of(row, QUESTION_NAMES) or need(row, QUESTION_NAMES[0], origin)
    given = first_of(row, ANSWER_NAMES) or need(row, ANSWER_NAMES[0], origin)
    named = [(isinstance(_listed(row[key])[0], str), RANKS[key], key) for key in row if key in RANKS and row[key]]
    key = min(named)[2] if named else None
    images = [finder.find(one, origin) for one in _listed(row[key])] if key else [_by_id(row, finder, origin)]
    answer, references = _answers(row[given], given, origin)
    turn = Turn(text(row[asked], asked, origin), answer_text(answer, given, origin))
    metadata = {name: value for name, value in row.items() if name not in (key, asked, given)}
    return Record(tuple(images), (turn,), metadata=references | metadata, origin=origin)


def first_of(row: Row, names: Sequence[str]) -> str | None:
    """The first of some keys that a row has."""
    for name in names:
        if name in row:
            return name
    return None


def _listed(value: Any) -> list[Any]:
    """The images under one key, of which most rows have one and some have a list."""
    return value if isinstance(value, list) else [value]


def _by_id(row: Row, finder: Finder, origin: str) -> Path:
    """The image of a row without its file name."""
    key = first_of(row, IMAGE_ID_NAMES)
    if key and (image := finder.find_id(text(str(row[key]), key, origin))):
        return image
    called = f"no file in the image root is called {shown(str(row[key]))}" if key else ""
    hint = f"; lookonce data prepare finds images by `{key}`, too; {called}" if key else ""
    if empty := first_of(row, IMAGE_NAMES):
        hint = f"; `{empty}` is empty{hint}"
    raise RecordsError(f"{origin}: expected the key `{IMAGE_NAMES[0]}`, got {keys_of(row)}{hint}")


def _answers(value: Any, key: str, origin: str) -> tuple[Any, dict[str, Any]]:
    """The answer to train on, and the references if there are several answers."""
    if not isinstance(value, list) or key == ANSWER_NAMES[0]:
        return value, {}
    answers = [answer_text(one, key, origin) for one in value]
    if not answers:
        raise RecordsError(f"{origin}: `{key}` must be text that is not empty, got an empty list")
    ordered = [answer for answer, _ in Counter(answers).most_common()]
    return ordered[0], {"references": ordered} if len(ordered) > 1 else {}


def write_flat(record: Record, images: list[str]) -> Row:
    """Write one question about one image, with the metadata as further keys.

    Raises:
        RecordsError: the record has another number of either, or a system text.
    """
    for number, what in ((len(images), "image"), (len(record.turns), "question")):
        if number != 1:
            raise RecordsError(f"it holds one {what} a record, and this one has {number}")
    if record.system is not None:
        raise RecordsError("it cannot hold a system text")
    turn = {"question": record.turns[0].question, "answer": record.turns[0].answer}
    return {"image_filename": images[0], **turn} | dict(record.metadata)


def _turn(value: Any, origin: str) -> Turn:
    if not isinstance(value, dict) or value.keys() != {"question", "answer"}:
        raise RecordsError(f"{origin}: a turn must be an object with `question` and `answer`, got {kind(value)}")
    return _question_and_answer(value, origin)


def _question_and_answer(value: Row, origin: str) -> Turn:
    return Turn(text(value["question"], "question", origin), answer_text(value["answer"], "answer", origin))
