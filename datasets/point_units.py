"""Answers that are points or boxes, in another unit: `lookonce data convert --points FROM:TO`.

Each family of models was trained on coordinates in its own unit: Qwen3-VL on parts of 1000, Qwen2.5-VL on pixels of the
resized image, OS-Atlas and ScreenSpot on ratios.

Design: only the numbers of an answer that is points or boxes change. In questions and among words a number need not be
a coordinate, so these texts stay, and are counted. Rounding keeps the order of coordinates and costs half a unit of the
coarser unit: pixels survive a conversion to ratios of four decimals and back for sides of less than 10,000 pixels, and
to parts of 1000 for sides of at most 1,000. Refused are signs of another unit: a number beyond the image, only ratios
where there should be pixels, and a box with width and height in place of right and bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Literal, cast, get_args

from lookonce.datasets.formats.record import Record
from lookonce.datasets.images import ImageInfo, Size, inspect_images
from lookonce.datasets.points import find_coordinates, has_coordinates
from lookonce.errors import RecordsError, UsageError
from lookonce.text import quoted

Unit = Literal["pixels", "ratio", "1000", "resized"]
"""Pixels of the file as it is shown, ratios of 0 to 1, parts of 1000, or pixels of the image that the model sees."""


@dataclass(frozen=True)
class Conversion:
    source: Unit
    target: Unit
    resized: Callable[[Size], Size] | None = None
    """Width and height of an image that the model sees, by those of the file; the unit `resized` needs it."""

    @classmethod
    def parse(cls, text: str, resized: Callable[[Size], Size] | None = None) -> Conversion:
        """The conversion of a text such as "pixels:1000"; raises UsageError if it is none, or needs a model."""
        source, _, target = text.partition(":")
        units = get_args(Unit)
        if source not in units or target not in units or source == target:
            raise UsageError(
                f"--points {text}: write FROM:TO, two different ones of {', '.join(units)}: --points pixels:1000"
            )
        if "resized" in (source, target) and resized is None:
            raise UsageError(f"--points {text}: `resized` depends on the model; add --model DIR, a model folder")
        return cls(cast(Unit, source), cast(Unit, target), resized)

    def sides(self, unit: Unit, size: Size) -> tuple[float, float]:
        """The width and height of an image of this many pixels, in a unit."""
        if unit == "pixels":
            return size
        if unit == "resized":
            assert self.resized
            return self.resized(size)
        return (1, 1) if unit == "ratio" else (1000, 1000)

    def of_text(self, text: str, size: Size, origin: str) -> str:
        """An answer, a point or a box, in the other unit; raises RecordsError if its numbers are not in the unit."""
        limits, sides = self.sides(self.source, size), self.sides(self.target, size)
        parts, end = list[str](), 0
        found = find_coordinates(text)
        for numbers in found:
            self._check([number.value for number in numbers], limits, text, size, origin)
        for number in sorted((one for numbers in found for one in numbers), key=lambda one: one.start):
            value = number.value / limits[number.place % 2] * sides[number.place % 2]
            parts += [text[end : number.start], f"{value:.4f}" if self.target == "ratio" else f"{round(value)}"]
            end = number.end
        return "".join(parts) + text[end:]

    def _check(self, numbers: Sequence[float], limits: tuple[float, float], text: str, size: Size, origin: str) -> None:
        """Check that a point or a box is in the unit, and a box from left to right and from top to bottom."""
        if any(not 0 <= number <= limits[n % 2] for n, number in enumerate(numbers)):
            raise RecordsError(
                f"{origin}: {quoted(text)} is not in `{self.source}`, which is 0 to {limits[0]:g} and 0 to "
                f"{limits[1]:g} in this image of {size[0]} x {size[1]} pixels; name another unit in --points"
            )
        if len(numbers) == 4 and (numbers[2] < numbers[0] or numbers[3] < numbers[1]):
            raise RecordsError(
                f"{origin}: {quoted(text)} is no box of left, top, right and bottom; write one of left, top, width and "
                "height so first"
            )


@dataclass(frozen=True)
class Converted:
    """Records whose points and boxes have another unit, also those in `references`."""

    records: list[Record]
    num_texts: int = 0
    """How many answers and references changed."""
    left: Sequence[str] = ()
    """The texts that stay although coordinates seem to be in them, each after the origin of its record."""


def convert_points(records: Sequence[Record], conversion: Conversion) -> Converted:
    """Convert the answers and references that are points or boxes.

    Raises:
        RecordsError: there is no point; or a record with one has not one image, an image that cannot be read, or
            numbers in another unit.
    """
    has_points = [any(map(find_coordinates, _answers(record))) for record in records]
    pointed = list(compress(records, has_points))
    if not pointed:
        raise RecordsError("--points: no answer is a point or a box, such as (120, 34); leave the option out")
    for record in pointed:
        if len(record.images) != 1:
            raise RecordsError(f"{record.origin}: its answer is a point, and it has {len(record.images)} images, not 1")
    changed = [text for record in pointed for text in _answers(record) if find_coordinates(text)]
    largest = max(number.value for text in changed for numbers in find_coordinates(text) for number in numbers)
    if largest <= 1 and conversion.source != "ratio":
        raise RecordsError(
            f"--points: no number is above 1, so these are ratios and not `{conversion.source}`; write: "
            f"--points ratio:{conversion.target}"
        )
    images = inspect_images(record.images[0] for record in pointed)
    pairs = zip(records, has_points, strict=True)
    done = [_converted(record, conversion, images) if has_point else record for record, has_point in pairs]
    left = []
    for record in records:
        answers = [text for text in _answers(record) if not find_coordinates(text)]
        texts = [*(turn.question for turn in record.turns), *answers]
        left += [f"{record.origin}: {quoted(text)}" for text in texts if has_coordinates(text)]
    return Converted(done, len(changed), left)


def _answers(record: Record) -> Iterable[str]:
    """The answers, and other right ones than the first, which is the answer."""
    return (*(turn.answer for turn in record.turns), *record.references[1:])


def _converted(record: Record, conversion: Conversion, images: Mapping[Path, ImageInfo]) -> Record:
    image = images[record.images[0]]
    if image.size is None:
        raise RecordsError(f"{record.origin}: {image.problem}; its points cannot be converted without its size")
    size = image.size

    def of(text: str) -> str:
        return conversion.of_text(text, size, record.origin)

    references = {"references": [of(text) for text in record.references]} if record.references else {}
    turns = tuple(replace(turn, answer=of(turn.answer)) for turn in record.turns)
    return replace(record, turns=turns, metadata={**record.metadata, **references})
