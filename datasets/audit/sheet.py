"""Some images beside a question and its answer, as small JPEGs: what no table shows. Which, a seed decides."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from lookonce.datasets.audit.corpus import Material
from lookonce.datasets.audit.pictures import distinct
from lookonce.datasets.images import UNDECODABLE, read_many
from lookonce.errors import ImageError
from lookonce.threads import ahead

NUM_IMAGES = 48
SIDE = 300
"""Pixels of the longer side."""
QUALITY = 78


@dataclass(frozen=True)
class Thumbnail:
    """A small image, and one of the questions about it."""

    name: str
    file: str
    question: str
    answer: str
    jpeg: bytes

    @property
    def url(self) -> str:
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode()}"


def draw_sheet(material: Material, seed: int = 0, num_images: int = NUM_IMAGES) -> list[Thumbnail]:
    """At most so many distinct images, in an order from the seed; those that can not be decoded are left out."""
    path_of = {key: picture.path for key, picture in distinct(material.pictures).items() if not picture.problem}
    keys = sorted(path_of)
    rng = random.Random(f"sheet {seed}")
    chosen = rng.sample(keys, min(num_images, len(keys)))
    asked = _questions(material, set(chosen))
    small = dict(ahead(_shrink, read_many(path_of[key] for key in chosen)))
    return [
        Thumbnail(path_of[key].name, *rng.choice(asked[key]), small[path_of[key]])
        for key in chosen
        if small[path_of[key]]
    ]


def _questions(material: Material, keys: set[str]) -> dict[str, list[tuple[str, str, str]]]:
    """File, question and answer, of all questions about each image."""
    found: dict[str, list[tuple[str, str, str]]] = {key: [] for key in keys}
    for file in material.files:
        for record in file.records:
            for key in {material.identity(image) for image in record.images} & keys:
                found[key] += [(file.name, turn.question, turn.answer) for turn in record.turns]
    return found


def _shrink(read: tuple[Path, bytes | ImageError]) -> tuple[Path, bytes]:
    path, data = read
    if isinstance(data, ImageError):
        return path, b""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (SIDE, SIDE))
            small = ImageOps.exif_transpose(image).convert("RGB")
    except (*UNDECODABLE, MemoryError):
        return path, b""
    small.thumbnail((SIDE, SIDE))
    target = io.BytesIO()
    small.save(target, "JPEG", quality=QUALITY)
    return path, target.getvalue()
