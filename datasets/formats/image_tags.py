"""`<image>` in texts: where it may stand, and taking it out.

Design: every record's images come before its first question, so that all questions about an image can share its tokens.
A mark at the beginning of the first question says just that. One at its end is moved to the beginning, as LLaVA itself
does. Anywhere else it says something that would be lost, and the record is refused.

With a mark goes one line end beside it, or spaces; so a question that itself begins with a line end can be written.
"""

from __future__ import annotations

import re

from lookonce.errors import RecordsError
from lookonce.text import count

MARK = "<image>"
LEADING = re.compile(r"\s*(?:<image>\s*)*<image>[ \t]*(?:\r?\n)?")
TRAILING = re.compile(r"(?:\r?\n)?[ \t]*<image>(?:\s*<image>)*\s*\Z")
WHERE = "lookonce shows images before the first question; move it there"


def without_marks(question: str, origin: str) -> tuple[str, int]:
    """The first question without the marks at its two ends, and how many there were.

    Raises:
        RecordsError: there is one between its words.
    """
    rest = question[match.end() :] if (match := LEADING.match(question)) else question
    rest = rest[: match.start()] if (match := TRAILING.search(rest)) else rest
    if MARK in rest:
        raise RecordsError(f"{origin}: {MARK} in the middle of the first question; {WHERE}")
    return rest, question.count(MARK)


def check_marks(num_marks: int, num_images: int, origin: str) -> None:
    """Check that there are as many marks as images, or none.

    Raises:
        RecordsError: there are more or fewer.
    """
    if num_marks not in (0, num_images):
        marks, images = count(num_marks, "mark"), count(num_images, "image")
        raise RecordsError(f"{origin}: {marks} {MARK} and {images}; expected as many, or no marks")


def with_marks(question: str, num_images: int, between: str = "") -> str:
    """A question with a mark an image before it, each followed by `between`."""
    needs_line_end = num_images and not between and question[:1].isspace()
    return (MARK + between) * num_images + ("\n" if needs_line_end else "") + question
