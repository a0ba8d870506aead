"""Write the sample: frames, records split by image, a model to try everything with, and a run file that trains it.

Design: the same seed gives the same bytes (with the same library versions). The split is by image, and drawn within
each kind of frame. Two frames have a copy under another name, as in real datasets, in the split of their original.

The run file is that of `experiments/`, with the sample's folder in place of theirs: `run.yaml` and `staged.yaml` beside
this module are links to these, which become files in a wheel. Its paths begin where the sample was written.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from lookonce.datasets.records import Record, Turn, write_records
from lookonce.datasets.sample.scene import (
    DEFAULT_SEED,
    KVASIR_SIZES,
    NUM_IMAGES,
    STAGED_IMAGES,
    STAGED_KIND,
    STAGED_SHARES,
    FrameSize,
    Scene,
    ask,
    ask_in_stages,
    draw,
    make_scenes,
    stratify_sizes,
    with_three_polyps,
)
from lookonce.errors import UsageError
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.files import (
    TEMPORARY_MARK,
    follow_umask,
    naming_full_disk,
    read_object,
    threaded_map,
    write_json,
    write_text,
)
from lookonce.text import in_yaml

RUN_FILE = "run.yaml"
HEADER = "# The sample in this folder, for a tiny model on any CPU. Every key: docs/run-file.md\n"


def run_file(folder: Path, stages: bool) -> str:
    text = Path(__file__).with_name("staged.yaml" if stages else RUN_FILE).read_text()
    text = re.sub(r"\A(#.*\n)+", HEADER, text)
    text = re.sub(r"data/\w+/(\S+)", lambda path: in_yaml(folder / path[1]), text)
    output = in_yaml(f"runs/{folder.absolute().name}")
    return re.sub(r"^output: .*", lambda _: f"output: {output}", text, flags=re.M)


SPLIT_SHARES = {"train": 0.7, "val": 0.15, "test": 0.15}
NUM_COPIES = 2
STAMP = "sample.json"
JPEG_QUALITY = 92
SIZED_JPEG_QUALITY = 98
"""The JPEG quality of frames with given sizes, which are for measurements: about 3 bits per pixel, like real frames."""


@dataclass(frozen=True)
class SampleReport:
    folder: Path
    num_files: int
    num_images: int
    num_questions: dict[str, int]
    model: str
    fresh: bool
    """Whether the sample was written; False if the same sample already existed."""
    run_file: Path | None
    """A run file for it; None for models of real sizes and for towers alone, which serve to measure speed."""

    def text(self) -> str:
        questions = ", ".join(f"{number} {split}" for split, number in self.num_questions.items())
        state = "wrote" if self.fresh else "already exists:"
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
    family: str = DEFAULT.model_type,
    num_images: int | None = None,
    sizes: Literal["kvasir"] | None = None,
    tower_only: bool = False,
    stages: bool = False,
) -> SampleReport:
    """Write `images/`, `train.jsonl`, `val.jsonl`, `test.jsonl` and `model/` into `folder`.

    A tiny model gets a run file too, `run.yaml`. `family` is the family of the model and `model` its size. With `sizes`
    frames have those of Kvasir-VQA, each in its share. `tower_only` leaves the language model out, which is enough for
    a cache and takes a thirtieth of the bytes. With `stages` the questions are those of `ask_in_stages`. There are 64
    frames, or 128 with stages, unless `num_images` says otherwise. Of a sample that already exists, only a missing run
    file is written.

    Raises:
        UsageError: the folder holds something else, or `model` or `tokenizer` cannot be used.
    """
    num_images = num_images or (STAGED_IMAGES if stages else NUM_IMAGES)
    settings = {
        "seed": seed,
        "model": model,
        "family": family,
        "tokenizer": str(tokenizer) if tokenizer else None,
        "images": num_images,
        "sizes": f"stratified from {sizes}" if sizes else None,
        "tower_only": tower_only,
        "stages": stages,
    }
    if stamp := read_object(folder / STAMP):
        if differing := [key for key in settings if stamp.get(key) != settings[key]]:
            raise UsageError(
                f"{folder} holds another sample: {_words(stamp, differing)}, requested {_words(settings, differing)}; "
                f"choose another folder, or remove {folder}"
            )
        return _report(folder, stamp, fresh=False)
    if (folder / STAMP).exists():
        raise UsageError(f"{folder / STAMP} is broken; choose another folder or empty it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty and has no sample; choose another folder or empty it")
    target = folder.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}{TEMPORARY_MARK}")
    with scratch as unfinished, naming_full_disk(target, temporary=Path(unfinished)):
        from lookonce.datasets.sample.model import write_model  # torch and transformers are slow to import

        model_folder = Path(unfinished) / "model"  # first: it may be refused
        write_model(model_folder, model, seed, tokenizer, family=FAMILIES[family], tower_only=tower_only)
        content = _write(Path(unfinished), seed, num_images, KVASIR_SIZES if sizes else None, stages) | settings
        target.mkdir(exist_ok=True)
        for path in Path(unfinished).iterdir():
            os.replace(path, target / path.name)
    write_json(target / STAMP, content)  # last, since it marks the sample as complete
    return _report(folder, content, fresh=True)


def _write(
    folder: Path, seed: int, num_images: int, sizes: Sequence[FrameSize] | None, stages: bool
) -> dict[str, object]:
    """Write frames and records; without `sizes`, frames keep the sizes of their scenes."""
    images = folder / "images"
    images.mkdir()
    if stages:
        scenes = [with_three_polyps(scene) for scene in make_scenes(seed, num_images, (STAGED_KIND,))]
        splits = split_scenes(scenes, seed, STAGED_SHARES)
    else:
        splits = split_scenes(list(make_scenes(seed, num_images)), seed)
    num_questions = {}
    quality = SIZED_JPEG_QUALITY if sizes else JPEG_QUALITY
    for split, numbered in splits.items():
        if sizes:
            numbered = stratify_sizes(numbered, sizes, f"{seed} {split}")
        numbers, members = zip(*numbered, strict=True)
        paths = threaded_map(partial(_write_frame, images, quality), numbered)
        frames = [*zip(paths, members, strict=True), *(_write_copies(images, numbered) if split == "train" else [])]
        records = [record for path, scene in frames for record in _records(path, scene, stages)]
        write_records(folder / f"{split}.jsonl", records)
        num_questions[split] = len(records)
    follow_umask(folder)
    return {"num_files": num_images + NUM_COPIES, "num_images": num_images, "num_questions": num_questions}


def split_scenes(
    scenes: list[Scene], seed: int, shares: Mapping[str, float] = SPLIT_SHARES
) -> dict[str, list[tuple[int, Scene]]]:
    """Return the numbered scenes of each split; each kind of frame is split in the same proportions."""
    rng = random.Random(seed)
    splits: dict[str, list[tuple[int, Scene]]] = {split: [] for split in shares}
    for kind in sorted({scene.kind for scene in scenes}):
        alike = [(number, scene) for number, scene in enumerate(scenes) if scene.kind == kind]
        rng.shuffle(alike)
        num_val, num_test = (round(len(alike) * shares[split]) for split in ("val", "test"))
        splits["val"] += alike[:num_val]
        splits["test"] += alike[num_val : num_val + num_test]
        splits["train"] += alike[num_val + num_test :]
    return {split: sorted(members, key=lambda member: member[0]) for split, members in splits.items()}


def _write_frame(images: Path, quality: int, numbered: tuple[int, Scene]) -> Path:
    number, scene = numbered
    path = images / f"frame-{number:04d}.jpg"
    draw(scene).save(path, quality=quality)
    return path


def _write_copies(images: Path, scenes: list[tuple[int, Scene]]) -> list[tuple[Path, Scene]]:
    """Write byte-identical copies of the first frames, of normal ones if there are any, under other names."""
    copies = []
    for number, scene in sorted(scenes, key=lambda member: member[1].kind != "normal")[:NUM_COPIES]:
        copy = images / f"copy-of-{number:04d}.jpg"
        shutil.copyfile(images / f"frame-{number:04d}.jpg", copy)
        copies.append((copy, scene))
    return copies


def _records(path: Path, scene: Scene, stages: bool) -> list[Record]:
    metadata = {"image_id": path.stem, "source": scene.kind}
    questions = ask_in_stages(scene) if stages else [(*pair, None) for pair in ask(scene)]
    return [
        Record((path,), (Turn(question, answer),), metadata=metadata | ({"stage": stage} if stage else {}))
        for question, answer, stage in questions
    ]


def _report(folder: Path, stamp: dict[str, object], fresh: bool) -> SampleReport:
    keys = ("num_files", "num_images", "num_questions", "model")
    path = folder / RUN_FILE if stamp["model"] == "tiny" and not stamp["tower_only"] else None
    if path and not path.exists():
        write_text(path, run_file(folder, bool(stamp["stages"])))
    return SampleReport(folder=folder, fresh=fresh, run_file=path, **{key: stamp[key] for key in keys})  # type: ignore[arg-type]


def _words(stamp: dict[str, object], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}: {stamp.get(key)}" for key in keys)
