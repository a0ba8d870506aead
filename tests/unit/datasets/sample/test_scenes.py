"""Scenes of the sample: facts, questions, stages, sizes, and the run file."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from lookonce.datasets.images import index_images
from lookonce.datasets.records import Record, read_records
from lookonce.datasets.sample.scene import (
    BOX,
    CLASS,
    DEFAULT_SEED,
    FORM,
    KVASIR_SHARES,
    KVASIR_SIZES,
    LESIONS,
    NUM_QUESTIONS,
    PANEL_WIDTH,
    PROCEDURE,
    PROTOCOL,
    SIDE,
    STAGED_KIND,
    TEXT,
    Scene,
    ask,
    ask_in_stages,
    cell,
    make_scenes,
    stratify_sizes,
    with_three_polyps,
)
from lookonce.datasets.sample.write import run_file
from lookonce.run.config import RunFile

SPLITS = ("train", "val", "test")
SCENES = list(make_scenes(DEFAULT_SEED))


def records_of(sample: Path) -> list[Record]:
    return [record for split in SPLITS for record in read_records(sample / f"{split}.jsonl")]


def scene_of(image: Path) -> Scene:
    return SCENES[int(image.stem.rpartition("-")[2])]


def pixels_of(image: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    with Image.open(image) as frame:
        return np.asarray(frame).astype(int)


def test_no_image_is_in_two_splits(sample):
    keys = {split: set(index_images(read_records(sample / f"{split}.jsonl")).path_of) for split in SPLITS}
    assert sum(map(len, keys.values())) == len(set.union(*keys.values())) == len(SCENES)


def test_every_split_has_every_kind_of_frame(sample):
    for split in SPLITS:
        kinds = {record.metadata["source"] for record in read_records(sample / f"{split}.jsonl")}
        assert kinds == {"normal", "polyps", "inflamed", "instrument"}, split


def test_two_files_are_copies_under_other_names(sample):
    index = index_images(records_of(sample))
    copies = [path for path in index.key_of if path.name.startswith("copy-of-")]
    assert len(copies) == index.num_files - index.num_distinct == 2
    for copy in copies:
        assert index.key_of[copy] == index.key_of[copy.with_name(copy.name.replace("copy-of", "frame"))]


def test_questions_per_image_are_distributed_as_in_the_real_dataset(sample):
    index = index_images(records_of(sample))
    named_once = [record for record in records_of(sample) if not record.images[0].name.startswith("copy-of-")]
    numbers = list(Counter(index.key_of[record.images[0]] for record in named_once).values())
    assert len(numbers) == index.num_distinct and max(numbers) == 17
    assert numbers.count(1) / len(numbers) == pytest.approx(0.38, abs=0.01)
    assert numbers.count(17) / len(numbers) == pytest.approx(0.28, abs=0.01)
    assert sum(numbers) / len(numbers) == pytest.approx(9.2, abs=0.2)


def test_positions_are_named_by_ninths_of_the_view():
    for (x, y), name in {
        **{(0, 0): "upper-left", (0.5, 0.32): "upper-center", (1, 0): "upper-right"},
        **{(0.3, 0.5): "center-left", (0.5, 0.5): "center", (0.7, 0.5): "center-right"},
        **{(0, 1): "lower-left", (0.5, 0.7): "lower-center", (1, 1): "lower-right"},
    }.items():
        assert cell(x, y) == name


def answers_about(scene: Scene) -> dict[str, str]:
    """The answers to all questions about a frame that is not normal."""
    return dict(ask(replace(scene, num_questions=NUM_QUESTIONS)))


def test_text_and_green_box_are_drawn_if_the_scene_has_them_and_answers_say_so(sample):
    for image in sorted((sample / "images").iterdir()):
        scene, pixels = scene_of(image), pixels_of(image)
        panel = pixels[:, : int(scene.width * PANEL_WIDTH * 0.8)]
        upper, lower = panel[: int(scene.height * 0.6)], panel[int(scene.height * 0.75) :]
        assert (upper.min(axis=-1).max() > 60, np.median(lower[..., 1]) > 100) == (scene.has_text, scene.has_box), image
        if scene.kind != "normal":
            answers = [answers_about(scene)[question] == "yes" for question in (TEXT, BOX)]
            assert answers == [scene.has_text, scene.has_box], image


def test_polyps_are_drawn_in_their_colour_at_their_position(sample):
    shown = [image for image in sorted((sample / "images").iterdir()) if scene_of(image).polyps]
    assert {scene_of(image).lesion for image in shown} == set(LESIONS)
    for image in shown:
        scene, pixels = scene_of(image), pixels_of(image)
        panel, answers = int(scene.width * PANEL_WIDTH), answers_about(scene)
        assert answers[SIDE] == "; ".join(sorted({cell(*polyp) for polyp in scene.polyps}))
        assert answers["How many polyps are in the image?"] == str(len(scene.polyps))
        for x, y in scene.polyps:
            seen = pixels[int(y * scene.height), panel + int(x * (scene.width - panel))]
            off = {lesion: np.abs(seen - np.array(lesion.rgb)).sum() for lesion in LESIONS}
            assert min(off, key=off.__getitem__) == scene.lesion and off[scene.lesion] < 80, (image, x, y)


STAGED = [with_three_polyps(scene) for scene in make_scenes(3, 288, (STAGED_KIND,))]
ANSWERS = [{question: answer for question, answer, _ in ask_in_stages(scene)} for scene in STAGED]


def answers_after(question: str, earlier: tuple[str, ...]) -> dict[tuple[str, ...], list[str]]:
    """The answers to a question for each combination of earlier answers."""
    found = defaultdict(list)
    for one in ANSWERS:
        found[tuple(one[name] for name in earlier)].append(one[question])
    return found


@pytest.mark.guarantee(
    "In the sample with stages, both earlier answers together determine a later one, and one of them alone does not."
)
@pytest.mark.parametrize(
    ("question", "earlier"), [(PROTOCOL, (PROCEDURE, TEXT)), (CLASS, (BOX, SIDE)), (FORM, (PROTOCOL, CLASS))]
)
def test_both_earlier_answers_tell_a_later_one_and_one_of_them_does_not(question, earlier):
    assert all(len(set(answers)) == 1 for answers in answers_after(question, earlier).values())
    for alone in earlier:
        for answers in answers_after(question, (alone,)).values():
            most = max(map(answers.count, answers))
            assert most / len(answers) < 1.2 * 1 / len(set(answers)) + 0.05 and len(set(answers)) > 1


def test_every_frame_is_asked_all_questions_stage_by_stage():
    stages = [[stage for _, _, stage in ask_in_stages(scene)] for scene in STAGED]
    assert stages == [[1, 1, 1, 1, 2, 2, 3]] * len(STAGED)


def test_each_size_has_its_share_and_only_sizes_change():
    numbered = list(enumerate(make_scenes(3, 1000)))
    assigned = stratify_sizes(numbered, KVASIR_SIZES, 3)
    found = Counter((scene.width, scene.height) for _, scene in assigned)
    assert found.keys() == KVASIR_SHARES.keys()
    assert all(abs(found[size] - 10 * share) <= 5 for size, share in KVASIR_SHARES.items())
    before, after = ([(n, replace(scene, width=0, height=0)) for n, scene in some] for some in (numbered, assigned))
    assert before == after
    again, other = (stratify_sizes(numbered, KVASIR_SIZES, seed) for seed in (3, 4))
    assert assigned == again != other


@pytest.mark.parametrize(
    ("stages", "name", "folder"), [(False, "sample", "data/sample"), (True, "staged", "data/stages")]
)
def test_in_the_usual_folder_it_is_the_run_file_of_the_experiments(root, stages, name, folder):
    text = (root / "experiments" / f"{name}.yaml").read_text()
    found = run_file(Path(folder), stages)
    expected = yaml.safe_load(text) | {"output": f"runs/{Path(folder).name}"}
    assert yaml.safe_load(found) == expected and "# the sample model is untrained" in found


@pytest.mark.parametrize("folder", ["a b", "/there/x", "null: {#1", 'quo"te', "-", "größe", "x\\y", "data/runs/a/x"])
def test_any_folder_is_named_by_it(folder):
    run = RunFile.model_validate(yaml.safe_load(run_file(Path(folder), False)))
    assert (run.model.path, str(run.output)) == (f"{folder}/model", f"runs/{Path(folder).name}")
    assert [str(path) for path in run.data.test] == [f"{folder}/test.jsonl"]
