"""One question about one image, before it is a record: with whatever dirt it has.

Design: a row is text that may be empty or say "nan", because rules have to see that; a record may not. It is immutable,
and what it was when it was read stays with it, so that nothing that a rule does is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Field = Literal["question", "answer"]


@dataclass(frozen=True)
class Row:
    """One row of a source, after its image was found."""

    question: str
    answer: str
    key: str
    """Of the image: sha256 of its bytes. Empty if there is none, see `problem`."""
    image: str = ""
    """The image's file name below `images/`."""
    image_id: str = ""
    """What the set calls the image; empty if it does not."""
    split: str = ""
    """The part that the set itself puts this row into: train, val, test, or empty."""
    variant: str = ""
    """Which transformed variant of the image this is; empty for the image itself."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    problem: str = ""
    """Why there is no image."""
    read_as: tuple[str, str] | None = None
    """Question and answer before any rule; None as long as none has changed them."""

    @property
    def as_read(self) -> tuple[str, str]:
        return self.read_as or (self.question, self.answer)

    @property
    def scene(self) -> str:
        """What the image shows, whatever its bytes: an image and its transformed variants are one scene."""
        return self.image_id or self.key


def text_of(value: Any) -> str:
    """A value of a column as text: what is missing is empty, whole numbers have no `.0`."""
    if value is None:
        return ""
    if isinstance(value, float) and not math.isnan(value) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else str(value)
