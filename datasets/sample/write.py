"""Write the sample: frames, records split by image, and a model to try everything on.

Design: the same seed gives the same bytes (with the same versions of the libraries). The split is by image, drawn
within each kind of frame so that all three parts hold some of each; two frames are there twice under another name,
as real sets have it, and a copy stays in the part of its original.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.datasets.records import Record, Turn, write_records
from lookonce.datasets.sample.draw import draw
from lookonce.datasets.sample.questions import ask
from lookonce.datasets.sample.scene import DEFAULT_SEED, NUM_IMAGES, Scene, make_scenes
from lookonce.datasets.sample.sizes import FrameSize, deal_sizes, read_sizes
from lookonce.errors import UsageError
from lookonce.files import TEMPORARY_MARK, follow_umask, write_json

SPLIT = {"train": 0.7, "val": 0.15, "test": 0.15}
NUM_COPIES = 2
STAMP = "sample.json"
JPEG_QUALITY = 92
SIZED_JPEG_QUALITY = 98
"""Of frames of given sizes, which are there to measure with: about 3 bits a pixel, as real frames have."""


@dataclass(frozen=True)
class SampleReport:
    """What `write_sample` made."""

    folder: Path
    num_files: int
    num_images: int
    num_questions: dict[str, int]
    model: str
    fresh: bool
    """False if the same sample was there already."""

    def text(self) -> str:
        questions = ", ".join(f"{number} {part}" for part, number in self.num_questions.items())
        state = "wrote" if self.fresh else "already there:"
        return (
            f"{state} {self.folder}: {self.num_files} images ({self.num_images} distinct), "
            f"questions: {questions}; model: {self.model}, random weights"
        )


def write_sample(
    folder: Path,
    seed: int = DEFAULT_SEED,
    model: str = "tiny",
    tokenizer: Path | None = None,
    *,
    num_images: int = NUM_IMAGES,
    sizes: Path | None = None,
    tower_only: bool = False,
) -> SampleReport:
    """Write `images/`, `train.jsonl`, `val.jsonl`, `test.jsonl` and `model/` into `folder`.

    `sizes` is a CSV file with columns `width` and `height`, or `KVASIR_SIZES`; frames then have sizes dealt from it.
    `tower_only` leaves the language model out, which is enough for a cache and a thirtieth of the bytes. Does nothing
    if the same sample is there already.

    Raises:
        UsageError: the folder holds something else, or `model`, `tokenizer` or `sizes` are nothing to use.
    """
    wanted = {
        "seed": seed,
        "model": model,
        "tokenizer": str(tokenizer) if tokenizer else None,
        "images": num_images,
        "sizes": f"dealt from {sizes}" if sizes else None,
        "tower_only": tower_only,
    }
    of_frames = read_sizes(sizes) if sizes else None
    found = _read_stamp(folder)
    if found:
        if others := [key for key in wanted if found.get(key) != wanted[key]]:
            raise UsageError(
                f"{folder} holds another sample ({_words(found, others)}); wanted {_words(wanted, others)}. "
                "Choose another folder, or remove that one"
            )
        return _report(folder, found, fresh=False)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty and holds no sample; choose another folder or empty it")
    place = folder.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f"{place.name}{TEMPORARY_MARK}") as unfinished:
        content = _write(Path(unfinished), seed, num_images, of_frames) | wanted
        _write_model(Path(unfinished) / "model", model, seed, tokenizer, tower_only)
        place.mkdir(exist_ok=True)
        for path in Path(unfinished).iterdir():
            os.replace(path, place / path.name)
    write_json(place / STAMP, content)  # last: it says that all else is there
    return _report(folder, content, fresh=True)


def _read_stamp(folder: Path) -> dict[str, object] | None:
    try:
        found: dict[str, object] = json.loads((folder / STAMP).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UsageError(f"{folder / STAMP} is broken ({error}); choose another folder or empty it") from None
    return {"images": NUM_IMAGES, "sizes": None, "tower_only": False} | found  # which samples of old do not say


def _write_model(folder: Path, model: str, seed: int, tokenizer: Path | None, tower_only: bool) -> None:
    from lookonce.datasets.sample.model import write_model  # torch and transformers are slow to import

    write_model(folder, model, seed, tokenizer, tower_only=tower_only)


def _write(folder: Path, seed: int, num_images: int, sizes: Sequence[FrameSize] | None) -> dict[str, object]:
    """Frames and records; of sizes of their own if none are given."""
    images = folder / "images"
    images.mkdir()
    parts = split(list(make_scenes(seed, num_images)), seed)
    num_questions = {}
    quality = SIZED_JPEG_QUALITY if sizes else JPEG_QUALITY
    for part, scenes in parts.items():
        if sizes:
            scenes = deal_sizes(scenes, sizes, f"{seed} {part}")
        numbers, members = zip(*scenes, strict=True)
        frames = _map_in_processes(functools.partial(_write_frame, images, quality), numbers, members)
        records = [record for frame in frames for record in frame]
        if part == "train":
            records += _write_copies(images, scenes)
        write_records(folder / f"{part}.jsonl", records)
        num_questions[part] = len(records)
    follow_umask(folder)
    return {"num_files": num_images + NUM_COPIES, "num_images": num_images, "num_questions": num_questions}


def split(scenes: list[Scene], seed: int) -> dict[str, list[tuple[int, Scene]]]:
    """Numbered scenes by part; within each kind of frame in the proportions of `SPLIT`."""
    rng = random.Random(seed)
    parts: dict[str, list[tuple[int, Scene]]] = {part: [] for part in SPLIT}
    for kind in sorted({scene.kind for scene in scenes}):
        alike = [(number, scene) for number, scene in enumerate(scenes) if scene.kind == kind]
        rng.shuffle(alike)
        num_held_out = round(len(alike) * SPLIT["val"])
        parts["val"] += alike[:num_held_out]
        parts["test"] += alike[num_held_out : 2 * num_held_out]
        parts["train"] += alike[2 * num_held_out :]
    return {part: sorted(members, key=lambda member: member[0]) for part, members in parts.items()}


def _map_in_processes(function: Callable[..., list[Record]], *arguments: Sequence[Any]) -> list[list[Record]]:
    """`map`, in several processes if there is much to do: drawing a large frame takes a tenth of a second."""
    if len(arguments[0]) <= NUM_IMAGES:
        return list(map(function, *arguments))
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        return list(processes.map(function, *arguments, chunksize=8))


def _write_frame(images: Path, quality: int, number: int, scene: Scene) -> list[Record]:
    path = images / f"frame-{number:04d}.jpg"
    draw(scene).save(path, quality=quality)
    return _records(path, scene)


def _write_copies(images: Path, scenes: list[tuple[int, Scene]]) -> list[Record]:
    """Byte-identical copies of the first normal frames: other names, the same images."""
    normal = [(number, scene) for number, scene in scenes if scene.kind == "normal"]
    records = []
    for number, scene in normal[:NUM_COPIES]:
        copy = images / f"copy-of-{number:04d}.jpg"
        shutil.copyfile(images / f"frame-{number:04d}.jpg", copy)
        records += _records(copy, scene)
    return records


def _records(path: Path, scene: Scene) -> list[Record]:
    metadata = {"image_id": path.stem, "source": scene.kind}
    return [Record(images=(path,), turns=(Turn(*pair),), metadata=metadata) for pair in ask(scene)]


def _report(folder: Path, stamp: dict[str, object], fresh: bool) -> SampleReport:
    keys = ("num_files", "num_images", "num_questions", "model")
    return SampleReport(folder=folder, fresh=fresh, **{key: stamp[key] for key in keys})  # type: ignore[arg-type]


def _words(stamp: dict[str, object], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}: {stamp.get(key)}" for key in keys)
