"""Records: conversations about images, as JSONL files.

Two forms are read. The canonical one, which is also the one written:

    {"images": ["images/a.jpg"], "turns": [{"question": "Is there text?", "answer": "yes"}],
     "system": "Answer briefly.", "metadata": {"source": "polyps"}}

and the flat one, in which a line is one question about one image and all other keys become metadata:

    {"image_id": "a", "image_filename": "a.jpg", "question": "Is there text?", "answer": "yes", "stage": 1}

Design: strict. A line that is not just so is an error that names file, line and what was expected, because a record
skipped in silence is a hole in somebody's training set. Image paths are relative to the records file or to an image
root, and may lead into an archive (archives.py); links inside the root are followed, since shared image folders are
often links. Whether an image can be read is not asked here. A path that leads out of the root keeps its `..` parts,
which no other path has; it is never opened, and counts as an image that can not be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookonce.errors import RecordsError
from lookonce.files import write_text


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Record:
    """A conversation of one or more turns about an image, several, or none."""

    images: tuple[Path, ...]
    """Absolute and in their shortest form, but for `root/../a.jpg`, which leads out of the root and is not opened."""
    turns: tuple[Turn, ...]
    system: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    """Where it was read from, "train.jsonl:12"; for messages."""


def read_records(path: Path, image_root: Path | None = None) -> list[Record]:
    """The records of a JSONL file, in order.

    `image_root` is what image paths are relative to; without it, the records file's own folder.

    Raises:
        RecordsError: the file is missing, empty, or a line of it is broken.
    """
    root = image_root if image_root is not None else path.parent
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines, which cuts at U+2028
    except FileNotFoundError:
        raise RecordsError(f"no records file at {path.absolute()}; check the `data` section of the run file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordsError(f"can not read {path}: {error}; expected a JSONL file in UTF-8") from None
    records = [_parse(line, root, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise RecordsError(f"{path} holds no records; expected one JSON object a line")
    return records


def write_records(path: Path, records: Iterable[Record], image_root: Path | None = None) -> None:
    """Write records in the canonical form, images relative to `image_root` or to the file's own folder.

    Raises:
        RecordsError: an image lies outside of that folder.
    """
    root = image_root if image_root is not None else path.parent
    write_text(path, "".join(json.dumps(_to_json(record, root), ensure_ascii=False) + "\n" for record in records))


def _to_json(record: Record, root: Path) -> dict[str, Any]:
    images = [_relative(image, root) for image in record.images]
    turns = [{"question": turn.question, "answer": turn.answer} for turn in record.turns]
    return {"images": images, "turns": turns, "system": record.system, "metadata": dict(record.metadata)}


def _relative(image: Path, root: Path) -> str:
    relative = os.path.relpath(image, root)
    if relative == os.pardir or relative.startswith(os.pardir + os.sep):
        raise RecordsError(f"image {image} lies outside of {root}; move it there or give another image root")
    return Path(relative).as_posix()


def _parse(line: str, root: Path, origin: str) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordsError(f"{origin}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise RecordsError(f"{origin}: not JSON that can be read ({error})") from None
    if not isinstance(value, dict):
        raise RecordsError(f"{origin}: expected a JSON object, got {_kind(value)}")
    if "turns" in value:
        return _parse_canonical(value, root, origin)
    if "question" in value:
        return _parse_flat(value, root, origin)
    raise RecordsError(
        f"{origin}: expected the key `turns` (canonical form) or `question` (flat form), got {sorted(value)}"
    )


def _parse_canonical(value: dict[str, Any], root: Path, origin: str) -> Record:
    unknown = sorted(set(value) - {"images", "turns", "system", "metadata"})
    if unknown:
        raise RecordsError(f"{origin}: unknown key `{unknown[0]}`; put what you want to keep under `metadata`")
    turns = _list(value["turns"], "turns", origin)
    if not turns:
        raise RecordsError(f"{origin}: `turns` is empty; expected at least one question and answer")
    system, metadata = value.get("system"), value.get("metadata")
    if not isinstance(metadata, dict | None):
        raise RecordsError(f"{origin}: `metadata` must be an object, got {_kind(metadata)}")
    return Record(
        images=tuple(_image(name, root, origin) for name in _list(value.get("images", []), "images", origin)),
        turns=tuple(_turn(turn, origin) for turn in turns),
        system=None if system is None else _text(system, "system", origin),
        metadata=metadata or {},
        origin=origin,
    )


def _parse_flat(value: dict[str, Any], root: Path, origin: str) -> Record:
    for key in ("image_filename", "answer"):
        if key not in value:
            raise RecordsError(f"{origin}: expected the key `{key}`, got {sorted(value)}")
    metadata = {key: item for key, item in value.items() if key not in ("image_filename", "question", "answer")}
    image = _image(value["image_filename"], root, origin)
    return Record(images=(image,), turns=(_question_and_answer(value, origin),), metadata=metadata, origin=origin)


def _turn(value: Any, origin: str) -> Turn:
    if not isinstance(value, dict) or value.keys() != {"question", "answer"}:
        raise RecordsError(f"{origin}: a turn must be an object with `question` and `answer`, got {_kind(value)}")
    return _question_and_answer(value, origin)


def _question_and_answer(value: dict[str, Any], origin: str) -> Turn:
    return Turn(_text(value["question"], "question", origin), _text(value["answer"], "answer", origin))


def _text(value: Any, key: str, origin: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RecordsError(f"{origin}: `{key}` must be text that is not empty, got {value!r}")
    return value


def _list(value: Any, key: str, origin: str) -> list[Any]:
    if not isinstance(value, list):
        raise RecordsError(f"{origin}: `{key}` must be a list, got {_kind(value)}")
    return value


def _image(name: Any, root: Path, origin: str) -> Path:
    """The absolute path of an image; lexical, so that one that leads out of the root is known without the disk."""
    anchor = os.path.abspath(root)
    path = os.path.normpath(os.path.join(anchor, _text(name, "image", origin)))
    if os.path.commonpath((anchor, path)) != anchor:
        return Path(anchor, os.path.relpath(path, anchor))
    return Path(path)


def _kind(value: Any) -> str:
    """What a JSON value is, for messages."""
    if isinstance(value, dict):
        return f"an object with {sorted(value)}"
    return "a list" if isinstance(value, list) else repr(value)
