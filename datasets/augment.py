"""Variants of images for training: turned, cropped, mirrored, brighter, with more contrast (`cache.augment`).

Design: a variant is an image with a key of its own in the cache, the hash of the image's key, the recipe and the
variant's number. Everything about it is drawn from that key, so any worker makes the same pixels in any order, and more
variants leave the existing ones as they are. Variant 0 is the image itself, with its own key. A recipe names only the
changes that it makes, so a later kind of change leaves keys as they are.

The decoded picture is changed before the image processor and keeps its size, so packs and steps are those of a training
without variants. Colours come first; then one bicubic resampling turns, crops and mirrors. What lies outside of the
picture is black.

Each epoch takes one variant of an image, in a random order that the seed and the image decide, so each is seen once
before any is seen again, and a resumed training needs only the number of its epoch.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated

from PIL import Image, ImageEnhance
from pydantic import Field, model_validator

from lookonce.datasets.formats.record import Record
from lookonce.datasets.points import find_coordinates, has_coordinates
from lookonce.errors import UsageError
from lookonce.settings import Section
from lookonce.text import listed, quoted

STEPS = 1000
"""Draws are multiples of one over this number."""
MAX_TILT = 45
"""Degrees by which a picture may be turned while its left stays left."""
SIDES = re.compile(r"(?<![a-z])(?:left|right)(?:most|wards?|hand(?:ed)?|sided?)?(?![a-z])", re.IGNORECASE)
"""Words that say left or right; "upper-left" and "left_lung" have one."""
Strength = Annotated[float, Field(ge=0, le=0.9)]


class Changes(Section):
    """What may differ between an image and its variants."""

    rotate: Annotated[float, Field(ge=0, le=180)] = 0
    """Turn by up to this many degrees, in both directions."""
    crop: Annotated[float, Field(ge=0.1, le=1)] = 1
    """Show a part of the image at the size of the whole: its sides are at least this share of the image's."""
    hflip: bool = False
    """Mirror every second variant, left to right."""
    brightness: Strength = 0
    """Make brighter or darker by up to this share."""
    contrast: Strength = 0
    """Raise or lower the contrast by up to this share."""

    @property
    def recipe(self) -> str:
        """The changes that are made, as canonical JSON, in which equal recipes are equal."""
        return json.dumps(self.model_dump(include={*Changes.model_fields}, exclude_defaults=True), sort_keys=True)

    @classmethod
    @lru_cache
    def of_recipe(cls, recipe: str) -> Changes:
        return cls.model_validate(json.loads(recipe))


class Augment(Changes):
    """Changed copies of each training image, which training takes in turn."""

    variants: Annotated[int, Field(ge=1, le=1000)] = 4
    """How many variants each training image has; the first is the image itself. Each takes the space of an image."""
    force: bool = False
    """Mirror, and turn by more than 45 degrees, although questions or answers say left or right; and turn, crop and
    mirror although they have numbers among words that may be coordinates."""

    @model_validator(mode="after")
    def _changes_something(self) -> Augment:
        if self.variants > 1 and self.recipe == "{}":
            names = "rotate, crop, hflip, brightness or contrast"
            raise ValueError(f"{self.variants} variants are all the image itself; set {names}, or variants: 1")
        if self.variants > 2 and self.recipe == Changes(hflip=True).recipe:
            raise ValueError(f"hflip alone makes 2 variants, not {self.variants}; set variants: 2, or another change")
        return self

    def of(self, key: str) -> Iterator[Variant]:
        """The variants of an image but for the first, which is the image itself."""
        recipe = self.recipe
        return (Variant(key, recipe, number) for number in range(1, self.variants))

    def check(self, records: Iterable[Record]) -> None:
        """Check that the answers of records stay true of the variants of their images.

        Raises:
            UsageError: an answer is a point or a box, or a text has coordinates, which geometry moves; or a text says
                left or right, which a mirror exchanges.
        """
        if self.variants == 1:
            return
        geometry = listed(sorted(json.loads(self.recipe).keys() & {"rotate", "crop", "hflip"}))
        mirrors = (self.hflip or self.rotate > MAX_TILT) and not self.force
        for record in records if geometry else ():
            questions = [turn.question for turn in record.turns if record.images]
            answers = [*(turn.answer for turn in record.turns), *record.references] if record.images else []
            colours, force = "change only brightness and contrast", "set cache.augment.force=true"
            if text := next(filter(find_coordinates, answers), ""):
                raise UsageError(
                    f"cache.augment: {geometry} would move the point in the answer {quoted(text)} of {record.origin}; "
                    f"{colours}"
                )
            if text := next(filter(has_coordinates, () if self.force else (*questions, *answers)), ""):
                raise UsageError(
                    f"cache.augment: {geometry} would move what is at the coordinates in {quoted(text)} of "
                    f"{record.origin}; {colours}, or if these are none, {force}"
                )
            if mirrors and (text := next(filter(SIDES.search, (*questions, *answers)), "")):
                raise UsageError(
                    f"cache.augment: hflip, and rotate above {MAX_TILT} degrees, exchange left and right, which "
                    f"{quoted(text)} of {record.origin} says; leave them out, or if no text means a side, {force}"
                )


@dataclass(frozen=True)
class Variant:
    of: str
    """The key of the image."""
    recipe: str
    number: int
    """From 1; 0 would be the image itself."""

    @cached_property
    def key(self) -> str:
        """The key of its features: 64 hexadecimal digits, as images have."""
        return hashlib.sha256(f"variant {self.number} of {self.of} by {self.recipe}".encode()).hexdigest()

    def text(self, image: str) -> str:
        """What it is, of an image that is called `image`."""
        return f"variant {self.number} of {image}, by {self.recipe}"

    def picture(self, image: Image.Image) -> Image.Image:
        """The variant of a decoded image, RGB, in the same size."""
        changes = Changes.of_recipe(self.recipe)
        if changes.brightness:
            image = ImageEnhance.Brightness(image).enhance(1 + changes.brightness * self._draw("brightness"))
        if changes.contrast:
            image = ImageEnhance.Contrast(image).enhance(1 + changes.contrast * self._draw("contrast"))
        width, height = image.size
        angle = math.radians(changes.rotate * self._draw("rotate"))
        mirror = -1 if changes.hflip and self.number % 2 else 1
        side = 1 - (1 - changes.crop) * (1 + self._draw("crop")) / 2  # the shown part's, as a share of the image's
        cos, sin = (round(side * function(angle), 12) for function in (math.cos, math.sin))
        columns, rows = (mirror * cos, -sin), (mirror * sin, cos)  # from a pixel of the variant to one of the image
        if (columns, rows) == ((1, 0), (0, 1)):
            return image
        x, y = (size / 2 * (1 + (1 - side) * self._draw(axis)) for size, axis in ((width, "x"), (height, "y")))
        start = (center - (a * width + b * height) / 2 for center, (a, b) in ((x, columns), (y, rows)))
        data = (*columns, next(start), *rows, next(start))
        return image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.BICUBIC, fillcolor="black")

    def _draw(self, name: str) -> float:
        """A number from -1 to 1."""
        digest = hashlib.sha256(f"{self.key} {name}".encode()).digest()
        return int.from_bytes(digest[:8]) % (2 * STEPS + 1) / STEPS - 1


@dataclass(frozen=True)
class EpochVariants:
    """Which variant of an image an epoch shows."""

    augment: Augment
    seed: int

    def keys(self, image_keys: Iterable[str], epoch: int) -> tuple[str, ...]:
        """The keys of the variants of some images."""
        cycle, place = divmod(epoch, self.augment.variants)
        return tuple(_variant_key(self.augment, self.seed, cycle, place, key) for key in image_keys)


@lru_cache(1 << 16)
def _variant_key(augment: Augment, seed: int, cycle: int, place: int, key: str) -> str:
    numbers = list(range(augment.variants))
    random.Random(f"seed {seed}, cycle {cycle}, image {key}").shuffle(numbers)  # see sampler.py: the same everywhere
    number = numbers[place]
    return Variant(key, augment.recipe, number).key if number else key
