"""A contact sheet: some images as small JPEGs, each with a question and its answer, drawn from a seed."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import ImageOps

from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.audit.image_info import distinct
from lookonce.datasets.images import UNDECODABLE, open_image, read_many
from lookonce.errors import ImageError
from lookonce.threads import threaded_map

NUM_IMAGES = 48
SIDE = 300
"""The longer side of a thumbnail, in pixels."""
JPEG_QUALITY = 78


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
        return data_url(self.jpeg)


def draw_contact_sheet(corpus: Corpus, seed: int = 0, num_images: int = NUM_IMAGES) -> list[Thumbnail]:
    """Draw at most `num_images` distinct images from the seed; images that cannot be decoded are left out."""
    path_of = {key: info.path for key, info in distinct(corpus.images).items() if not info.problem}
    keys = sorted(path_of)
    rng = random.Random(f"sheet {seed}")
    chosen = rng.sample(keys, min(num_images, len(keys)))
    questions = _questions(corpus, set(chosen))
    small = small_jpegs(path_of[key] for key in chosen)
    return [
        Thumbnail(path_of[key].name, *rng.choice(questions[key]), small[path_of[key]])
        for key in chosen
        if small[path_of[key]]
    ]


def small_jpegs(paths: Iterable[Path], side: int = SIDE) -> dict[Path, bytes]:
    """The images at some paths as JPEGs of at most `side` pixels; empty for those that cannot be read or decoded."""
    return dict(threaded_map(partial(_shrink, side=side), read_many(paths)))


def data_url(jpeg: bytes) -> str:
    """A JPEG as a URL that holds it."""
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _questions(corpus: Corpus, keys: set[str]) -> dict[str, list[tuple[str, str, str]]]:
    """Return file, question and answer of all questions about each image."""
    found: dict[str, list[tuple[str, str, str]]] = {key: [] for key in keys}
    for file in corpus.files:
        for record in file.records:
            for key in {corpus.identity(image) for image in record.images} & keys:
                found[key] += [(file.name, turn.question, turn.answer) for turn in record.turns]
    return found


def _shrink(read: tuple[Path, bytes | ImageError], side: int) -> tuple[Path, bytes]:
    path, data = read
    if isinstance(data, ImageError):
        return path, b""
    try:
        with open_image(data) as image:
            image.draft("RGB", (side, side))
            small = ImageOps.exif_transpose(image).convert("RGB")
    except (*UNDECODABLE, MemoryError):
        return path, b""
    small.thumbnail((side, side))
    target = io.BytesIO()
    small.save(target, "JPEG", quality=JPEG_QUALITY)
    return path, target.getvalue()
