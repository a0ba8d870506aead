"""The project's own two record formats, canonical and flat; one file may mix them.

    {"images": ["images/a.jpg"], "turns": [{"question": "Is there text?", "answer": "yes"}],
     "system": "Answer briefly.", "metadata": {"source": "polyps"}}

    {"image_id": "a", "image_filename": "a.jpg", "question": "Is there text?", "answer": "yes", "stage": 1}

Canonical can hold every record. Flat is one question about one image, and all other keys are metadata, so it is also
the format of tables (CSV, parquet). Flat accepts several usual names for the image's column. Texts are read unchanged:
`<image>` in them is a word.
"""

from __future__ import annotations

from typing import Any

from lookonce.datasets.formats.checks import Row, answer_text, items, kind, need, text
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.record import Record, Turn
from lookonce.errors import RecordsError

IMAGE_KEYS = ("image_filename", "file_name", "image_path", "image")
"""The keys under which a flat record may have its image: the first one present counts, embedded bytes before names."""


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
    """Read a record of one question about one image."""
    need(row, "question", origin)
    key = min((key for key in IMAGE_KEYS if key in row), key=lambda key: isinstance(row[key], str), default=None)
    if key is None:
        hint = "; lookonce data prepare finds images by `img_id`" if "img_id" in row else ""
        raise RecordsError(f"{origin}: expected the key `{IMAGE_KEYS[0]}`, got {sorted(row)}{hint}")
    need(row, "answer", origin)
    image = finder.find(row[key], origin)
    turn = _question_and_answer(row, origin)
    metadata = {name: value for name, value in row.items() if name not in (key, "question", "answer")}
    return Record((image,), (turn,), metadata=metadata, origin=origin)


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
