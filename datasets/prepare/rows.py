"""One question about one image as the source has it, before it is cleaned and becomes a record.

Design: the texts of a row may be empty or "nan", because rules must see that; those of a record may not. A row is
immutable and keeps its original texts, so that every change by a rule can be traced.
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
    """The image key; empty if the row has no image, see `problem`."""
    image: str = ""
    """The image's file name below `images/`."""
    image_id: str = ""
    """The dataset's name for the image; empty if it has none."""
    split: str = ""
    """The official split of the row: train, val, test, or empty."""
    variant: str = ""
    """The number of the augmented variant of the image; empty for the image itself."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    problem: str = ""
    """Why the row has no image."""
    read_as: tuple[str, str] | None = None
    """Question and answer before any rule; None if no rule has changed them."""

    @property
    def as_read(self) -> tuple[str, str]:
        return self.read_as or (self.question, self.answer)

    @property
    def scene(self) -> str:
        """What the image shows, whatever its bytes: an image and its augmented variants are one scene."""
        return self.image_id or self.key


def text_of(value: Any) -> str:
    """A value of a column as text: missing values are empty, whole numbers have no `.0`."""
    if value is None:
        return ""
    if isinstance(value, float) and not math.isnan(value) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else str(value)
