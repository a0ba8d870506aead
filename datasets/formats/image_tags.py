"""Image tags (`<image>`) in texts: where they may be, and removing them.

Design: the images of a record come before its first question, so that all questions about an image can share its
tokens. A tag at the beginning of the first question means exactly that. A tag at its end is moved to the beginning, as
LLaVA itself does. Anywhere else its position has a meaning that would be lost, and the record is refused.

Removing a tag also removes one line break beside it, or spaces, so a question that itself begins with a line break can
be written and read back.
"""

from __future__ import annotations

import re

from lookonce.errors import RecordsError
from lookonce.text import count

TAG = "<image>"
LEADING = re.compile(r"\s*(?:<image>\s*)*<image>[ \t]*(?:\r?\n)?")
TRAILING = re.compile(r"(?:\r?\n)?[ \t]*<image>(?:\s*<image>)*\s*\Z")
MOVE_IMAGES = "lookonce shows images before the first question; move it there"


def remove_tags(question: str, origin: str) -> tuple[str, int]:
    """Return the first question without the tags at its two ends, and how many tags there were.

    Raises:
        RecordsError: there is a tag between its words.
    """
    rest = question[match.end() :] if (match := LEADING.match(question)) else question
    rest = rest[: match.start()] if (match := TRAILING.search(rest)) else rest
    if TAG in rest:
        raise RecordsError(f"{origin}: {TAG} in the middle of the first question; {MOVE_IMAGES}")
    return rest, question.count(TAG)


def check_num_tags(num_tags: int, num_images: int, origin: str) -> None:
    """Check that there is one tag for each image, or none.

    Raises:
        RecordsError: there are more tags or fewer.
    """
    if num_tags not in (0, num_images):
        tags, images = count(num_tags, f"{TAG} tag"), count(num_images, "image")
        raise RecordsError(f"{origin}: {tags} and {images}; expected one tag for each image, or no tags")


def add_tags(question: str, num_images: int, between: str = "") -> str:
    """Return a question with a tag for each image before it, each followed by `between`."""
    needs_line_break = num_images and not between and question[:1].isspace()
    return (TAG + between) * num_images + ("\n" if needs_line_break else "") + question
