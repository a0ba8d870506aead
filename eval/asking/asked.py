"""The questions of a user: from a records file, or the same ones about each of some images.

Design: a question is a turn of a record, as in an evaluation. Reading is not strict here: a malformed record is
reported with its reason and the others are answered.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lookonce.datasets.formats.image_references import IMAGE_SUFFIX, SUFFIXES
from lookonce.datasets.records import Record, RecordsFile, Turn
from lookonce.errors import RecordsError, UsageError
from lookonce.files import files_below

if TYPE_CHECKING:
    from lookonce.eval.answers.questions import Asked


def read_questions(path: Path, image_root: Path | None = None) -> tuple[list[Asked], dict[str, RecordsError]]:
    """All questions of a records file, and the errors of malformed records by their places.

    The last question of a record may lack its answer.

    Raises:
        RecordsError: the file is missing or has no questions.
    """
    broken: dict[str, RecordsError] = {}
    records = list(RecordsFile(path, image_root, unanswered=True, broken=broken.__setitem__))
    if not records:
        raise next(iter(broken.values()))
    return [(record, turn) for record in records for turn in range(len(record.turns))], broken


def ask_each(prompts: Iterable[tuple[Path, ...]], questions: Sequence[str], system: str | None = None) -> list[Asked]:
    """Each question about each prompt's images: all questions of the first prompt, then those of the second.

    Raises:
        UsageError: a question is empty.
    """
    if empty := [number for number, text in enumerate(questions, start=1) if not text.strip()]:
        raise UsageError(f"question {empty[0]} of {len(questions)} is empty; leave it out or write one")
    return [
        (Record(images, (Turn(text, ""),), system, origin=f"{_named(images)}:{number}"), 0)
        for images in (tuple(map(absolute, prompt)) for prompt in prompts)
        for number, text in enumerate(questions, start=1)
    ]


def match_images(patterns: Iterable[str]) -> list[Path]:
    """The files that patterns such as `folder/*.jpg` match, sorted, each once; `**` matches any number of folders.

    A folder stands for the images in it and in its subfolders, by their suffixes.

    Raises:
        UsageError: a pattern matches no file, or a folder has no image.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        name = os.path.expanduser(pattern)
        if os.path.isdir(name):
            matches = sorted(str(path) for path in files_below(Path(name)) if IMAGE_SUFFIX.search(path.name))
            problem = (
                f"is a folder without images: no name in it or in its subfolders ends in .{', .'.join(SUFFIXES)}; name "
                "another folder, or a pattern of files"
            )
        else:
            matches = (
                [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
            )
            problem = "matches no file; put the pattern into quotes, and check the folder"
        if not matches:
            raise UsageError(f"--images {pattern} {problem}")
        found |= dict.fromkeys(map(Path, matches))
    return list(found)


def absolute(path: Path) -> Path:
    """The path without `..`, which marks the paths that lead out of the root of a records file."""
    return Path(os.path.abspath(path.expanduser()))


def _named(images: tuple[Path, ...]) -> str:
    return ", ".join(map(str, images)) or "question"
