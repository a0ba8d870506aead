"""Images, questions and answers of the sample follow from its scenes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lookonce.datasets.images import index_images
from lookonce.datasets.records import Record, read_records
from lookonce.datasets.sample.draw import PANEL_WIDTH, draw
from lookonce.datasets.sample.scene import (
    DEFAULT_SEED,
    LESIONS,
    NORMAL_QUESTION,
    NUM_QUESTIONS,
    QUESTIONS,
    SIZES,
    Scene,
    ask,
    cell,
    make_scenes,
)

SPLITS = ("train", "val", "test")


SCENES = list(make_scenes(DEFAULT_SEED))


def records_of(sample: Path) -> list[Record]:
    return [record for split in SPLITS for record in read_records(sample / f"{split}.jsonl")]


def scene_of(image: Path) -> Scene:
    return SCENES[int(image.stem.rpartition("-")[2])]


def pixels_of(image: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    with Image.open(image) as frame:
        return np.asarray(frame).astype(int)


def test_no_image_is_in_two_splits(sample: Path) -> None:
    keys = {split: set(index_images(read_records(sample / f"{split}.jsonl")).path_of) for split in SPLITS}
    assert sum(map(len, keys.values())) == len(set.union(*keys.values())) == len(SCENES)


def test_every_split_has_every_kind_of_frame(sample: Path) -> None:
    for split in SPLITS:
        kinds = {record.metadata["source"] for record in read_records(sample / f"{split}.jsonl")}
        assert kinds == {"normal", "polyps", "inflamed", "instrument"}, split


def test_two_files_are_copies_under_other_names(sample: Path) -> None:
    index = index_images(records_of(sample))
    copies = [path for path in index.key_of if path.name.startswith("copy-of-")]
    assert len(copies) == index.num_files - index.num_distinct == 2
    for copy in copies:
        assert index.key_of[copy] == index.key_of[copy.with_name(copy.name.replace("copy-of", "frame"))]


def test_questions_per_image_are_distributed_as_in_the_real_dataset(sample: Path) -> None:
    index = index_images(records_of(sample))
    named_once = [record for record in records_of(sample) if not record.images[0].name.startswith("copy-of-")]
    counts = Counter(index.key_of[record.images[0]] for record in named_once)
    numbers = list(counts.values())
    assert len(numbers) == index.num_distinct
    assert numbers.count(1) / len(numbers) == pytest.approx(0.38, abs=0.01)
    assert numbers.count(17) / len(numbers) == pytest.approx(0.28, abs=0.01)
    assert sum(numbers) / len(numbers) == pytest.approx(9.2, abs=0.2)
    assert max(numbers) == 17


def yes(fact: object) -> str:
    return "yes" if fact else "no"


def is_easy(scene: Scene) -> str:
    if not scene.polyps:
        return "yes" if scene.kind == "inflamed" else "not relevant"
    return yes(scene.lesion.size != "5-10mm")


def abnormality(scene: Scene) -> str:
    if scene.kind == "inflamed":
        return {"colonoscopy": "ulcerative colitis", "gastroscopy": "oesophagitis"}[scene.procedure]
    return "polyp" if scene.polyps else "none"


TRUTH: dict[str, Callable[[Scene], str]] = {
    "Does this image contain any finding?": lambda scene: yes(scene.polyps or scene.kind == "inflamed"),
    "What type of procedure is the image taken from?": lambda scene: scene.procedure,
    "Is there text?": lambda scene: yes(scene.has_text),
    "Is there a green/black box artefact?": lambda scene: yes(scene.has_box),
    "Have all polyps been removed?": lambda scene: "no" if scene.polyps else "not relevant",
    "Is this finding easy to detect?": is_easy,
    "How many findings are present?": lambda scene: str(len(scene.polyps) + (scene.kind == "inflamed")),
    "How many polyps are in the image?": lambda scene: str(len(scene.polyps)),
    "What type of polyp is present?": lambda scene: scene.lesion.paris_type if scene.polyps else "none",
    "What is the size of the polyp?": lambda scene: scene.lesion.size if scene.polyps else "none",
    "What color is the abnormality? If more than one separate with ;": lambda scene: (
        scene.lesion.color if scene.polyps else "red" if scene.kind == "inflamed" else "none"
    ),
    "Where in the image is the abnormality?": lambda scene: (
        "; ".join(sorted({cell(*polyp) for polyp in scene.polyps})) if scene.polyps else "none"
    ),
    "Are there any abnormalities in the image? Check all that are present.": abnormality,
    "How many instruments are in the image?": lambda scene: "1" if scene.instrument else "0",
    "Are there any instruments in the image? Check all that are present.": lambda scene: (
        scene.instrument.name if scene.instrument else "none"
    ),
    "Where in the image is the instrument?": lambda scene: (
        cell(scene.instrument.x, scene.instrument.y) if scene.instrument else "none"
    ),
    "Are there any anatomical landmarks in the image? Check all that are present.": lambda scene: (
        scene.landmark or "none"
    ),
    "Where in the image is the anatomical landmark?": lambda scene: "center" if scene.landmark else "none",
}


@pytest.mark.parametrize("question", (NORMAL_QUESTION, *QUESTIONS))
def test_answer_follows_from_the_scene(sample: Path, question: str) -> None:
    asked = [record for record in records_of(sample) if record.turns[0].question == question]
    assert len(asked) > 1
    for record in asked:
        assert record.turns[0].answer == TRUTH[question](scene_of(record.images[0])), record.origin


def test_every_question_is_asked_about_most_frames_that_show_something(sample: Path) -> None:
    asked = Counter(record.turns[0].question for record in records_of(sample))
    assert min(asked[question] for question in QUESTIONS) >= 0.6 * 40


def test_no_question_is_asked_twice_about_one_file(sample: Path) -> None:
    asked = Counter((record.images[0], record.turns[0].question) for record in records_of(sample))
    assert max(asked.values()) == 1


def test_texture_changes_pixels_but_no_answers() -> None:
    for scene in SCENES[24:26]:
        full = replace(scene, num_questions=NUM_QUESTIONS)
        other = replace(full, seed=full.seed + 1)
        assert ask(full) == ask(other)
        assert draw(full).tobytes() != draw(other).tobytes()


@pytest.mark.parametrize(
    ("x", "y", "name"),
    [
        (0, 0, "upper-left"),
        (0.5, 0.32, "upper-center"),
        (1, 0, "upper-right"),
        (0.3, 0.5, "center-left"),
        (0.5, 0.5, "center"),
        (0.7, 0.5, "center-right"),
        (0, 1, "lower-left"),
        (0.5, 0.7, "lower-center"),
        (1, 1, "lower-right"),
    ],
)
def test_positions_are_named_by_ninths_of_the_view(x: float, y: float, name: str) -> None:
    assert cell(x, y) == name


def test_frames_have_several_of_the_real_sizes(sample: Path) -> None:
    heights_widths = {image: pixels_of(image).shape[:2] for image in (sample / "images").iterdir()}
    assert len(set(heights_widths.values())) > 2
    for image, (height, width) in heights_widths.items():
        assert (width, height) == (scene_of(image).width, scene_of(image).height), image
        assert (width, height) in SIZES


def test_text_and_green_box_are_drawn_if_the_scene_has_them(sample: Path) -> None:
    for image in sorted((sample / "images").iterdir()):
        scene, pixels = scene_of(image), pixels_of(image)
        panel = pixels[:, : int(scene.width * PANEL_WIDTH * 0.8)]
        upper, lower = panel[: int(scene.height * 0.6)], panel[int(scene.height * 0.75) :]
        assert (upper.min(axis=-1).max() > 60, np.median(lower[..., 1]) > 100) == (scene.has_text, scene.has_box), image


def test_polyps_are_drawn_in_their_colour_at_their_position(sample: Path) -> None:
    shown = [image for image in sorted((sample / "images").iterdir()) if scene_of(image).polyps]
    assert {scene_of(image).lesion for image in shown} == set(LESIONS)
    for image in shown:
        scene, pixels = scene_of(image), pixels_of(image)
        panel = int(scene.width * PANEL_WIDTH)
        for x, y in scene.polyps:
            seen = pixels[int(y * scene.height), panel + int(x * (scene.width - panel))]
            off = {lesion: np.abs(seen - np.array(lesion.rgb)).sum() for lesion in LESIONS}
            assert min(off, key=off.__getitem__) == scene.lesion and off[scene.lesion] < 80, (image, x, y)
