"""The sample: the same for the same seed, whole or not there, true to its scenes, and shaped like real data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from lookonce.datasets.images import image_key, index_images
from lookonce.datasets.records import Record, read_records
from lookonce.datasets.sample import write
from lookonce.datasets.sample.draw import PANEL_WIDTH, draw
from lookonce.datasets.sample.model import random_model
from lookonce.datasets.sample.questions import NORMAL_QUESTION, NUM_QUESTIONS, QUESTIONS, ask, cell
from lookonce.datasets.sample.scene import DEFAULT_SEED, LESIONS, SIZES, Scene, make_scenes
from lookonce.datasets.sample.sizes import KVASIR_SIZES
from lookonce.datasets.sample.tokenizer import SPECIAL_TOKENS
from lookonce.datasets.sample.write import write_sample
from lookonce.errors import UsageError

PARTS = ("train", "val", "test")
OTHER_SEED = DEFAULT_SEED + 1
SCENES = list(make_scenes(DEFAULT_SEED))


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): image_key(path) for path in folder.rglob("*") if path.is_file()}


def records_of(sample: Path) -> list[Record]:
    return [record for part in PARTS for record in read_records(sample / f"{part}.jsonl")]


def scene_of(image: Path) -> Scene:
    return SCENES[int(image.stem.rpartition("-")[2])]


def pixels_of(image: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    with Image.open(image) as frame:
        return np.asarray(frame).astype(int)


def test_same_seed_gives_the_same_bytes_of_every_file(sample: Path, tmp_path: Path) -> None:
    write_sample(tmp_path)
    assert contents(tmp_path) == contents(sample)


def test_another_seed_gives_other_scenes_questions_and_pixels() -> None:
    other = list(make_scenes(OTHER_SEED))
    assert SCENES != other
    assert [ask(scene) for scene in SCENES] != [ask(scene) for scene in other]
    assert draw(SCENES[0]).tobytes() != draw(other[0]).tobytes()


@pytest.mark.parametrize("seed", [DEFAULT_SEED, OTHER_SEED])
def test_weights_are_those_of_the_seed(sample: Path, seed: int) -> None:
    written = load_file(sample / "model" / "model.safetensors")
    drawn = random_model(AutoConfig.from_pretrained(sample / "model"), seed, torch.float32).state_dict()
    assert written.keys() == drawn.keys()
    matrices = [name for name, weight in written.items() if weight.ndim > 1]
    assert {torch.equal(written[name], drawn[name]) for name in matrices} == {seed == DEFAULT_SEED}


def test_sample_that_is_there_already_is_kept(sample: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sample.rglob("*")}
    report = write_sample(sample)
    assert not report.fresh
    assert report.text().startswith(f"already there: {sample}: 66 images (64 distinct)")
    assert {path: path.stat().st_mtime_ns for path in sample.rglob("*")} == before


def test_report_counts_what_was_written(sample: Path) -> None:
    report, index = write_sample(sample), index_images(records_of(sample))
    assert (report.num_files, report.num_images) == (index.num_files, index.num_distinct)
    assert report.num_files == len(list((sample / "images").iterdir()))
    assert report.num_questions == {part: len(read_records(sample / f"{part}.jsonl")) for part in PARTS}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"seed": OTHER_SEED}, rf"\(seed: {DEFAULT_SEED}\); wanted seed: {OTHER_SEED}\. "),
        ({"model": "2b"}, r"\(model: tiny\); wanted model: 2b\. "),
        ({"tokenizer": Path("other")}, r"\(tokenizer: None\); wanted tokenizer: other\. "),
        ({"num_images": 128}, r"\(images: 64\); wanted images: 128\. "),
        ({"sizes": KVASIR_SIZES}, r"\(sizes: None\); wanted sizes: dealt from kvasir\. "),
        ({"tower_only": True}, r"\(tower_only: False\); wanted tower_only: True\. "),
    ],
    ids=lambda value: [*value][0] if isinstance(value, dict) else "",
)
def test_another_sample_is_refused_by_what_differs_and_kept(sample: Path, wanted: dict[str, Any], expected) -> None:
    before = contents(sample)
    with pytest.raises(UsageError, match=f"holds another sample {expected}Choose another folder"):
        write_sample(sample, **wanted)
    assert contents(sample) == before


def test_samples_that_differ_in_sizes_or_number_are_told_apart(tmp_path: Path) -> None:
    """The default is no exception, nor are sizes that were drawn, which samples of old have."""
    folder = tmp_path / "sample"
    write_sample(folder, num_images=8, sizes=KVASIR_SIZES, tower_only=True)
    held = "images: 8, sizes: dealt from kvasir, tower_only: True"
    with pytest.raises(UsageError, match=rf"\({held}\); wanted images: 64"):
        write_sample(folder)
    stamp = json.loads((folder / "sample.json").read_text())
    (folder / "sample.json").write_text(json.dumps(stamp | {"sizes": "kvasir"}))
    with pytest.raises(UsageError, match=r"\(sizes: kvasir\); wanted sizes: dealt from kvasir"):
        write_sample(folder, num_images=8, sizes=KVASIR_SIZES, tower_only=True)


def test_a_default_sample_of_old_says_less_and_is_kept(tmp_path: Path, sample: Path) -> None:
    folder = tmp_path / "sample"
    folder.mkdir()
    stamp = json.loads((sample / "sample.json").read_text())
    old = {key: value for key, value in stamp.items() if key not in ("images", "sizes", "tower_only")}
    (folder / "sample.json").write_text(json.dumps(old))
    assert not write_sample(folder).fresh


def test_folder_with_foreign_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("of a year's work")
    with pytest.raises(UsageError, match="is not empty and holds no sample; choose another folder or empty it"):
        write_sample(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of a year's work"]


def test_interrupted_writing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def interrupted(scene: Scene) -> Image.Image:
        if len(drawn) == 3:
            raise KeyboardInterrupt
        drawn.append(scene)
        return draw(scene)

    monkeypatch.setattr(write, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_sample(tmp_path / "sample")
    assert len(drawn) == 3
    assert list(tmp_path.iterdir()) == []


def test_no_image_is_in_two_parts(sample: Path) -> None:
    keys = {part: set(index_images(read_records(sample / f"{part}.jsonl")).path_of) for part in PARTS}
    assert sum(map(len, keys.values())) == len(set.union(*keys.values())) == len(SCENES)


def test_every_part_holds_every_kind_of_frame(sample: Path) -> None:
    for part in PARTS:
        kinds = {record.metadata["source"] for record in read_records(sample / f"{part}.jsonl")}
        assert kinds == {"normal", "polyps", "inflamed", "instrument"}, part


def test_two_files_are_copies_under_other_names(sample: Path) -> None:
    index = index_images(records_of(sample))
    copies = [path for path in index.key_of if path.name.startswith("copy-of-")]
    assert len(copies) == index.num_files - index.num_distinct == 2
    for copy in copies:
        assert index.key_of[copy] == index.key_of[copy.with_name(copy.name.replace("copy-of", "frame"))]


def test_questions_an_image_are_spread_as_in_the_real_set(sample: Path) -> None:
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


def test_every_question_is_asked_of_most_frames_that_show_something(sample: Path) -> None:
    asked = Counter(record.turns[0].question for record in records_of(sample))
    assert min(asked[question] for question in QUESTIONS) >= 0.6 * 40


def test_no_question_is_asked_twice_of_one_file(sample: Path) -> None:
    asked = Counter((record.images[0], record.turns[0].question) for record in records_of(sample))
    assert max(asked.values()) == 1


def test_texture_changes_pixels_and_no_answer() -> None:
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
def test_places_are_named_by_ninths_of_the_view(x: float, y: float, name: str) -> None:
    assert cell(x, y) == name


def test_frames_come_in_several_of_the_real_sizes(sample: Path) -> None:
    heights_widths = {image: pixels_of(image).shape[:2] for image in (sample / "images").iterdir()}
    assert len(set(heights_widths.values())) > 2
    for image, (height, width) in heights_widths.items():
        assert (width, height) == (scene_of(image).width, scene_of(image).height), image
        assert (width, height) in SIZES


def test_text_and_green_box_are_on_the_panel_exactly_where_the_scene_has_them(sample: Path) -> None:
    for image in sorted((sample / "images").iterdir()):
        scene, pixels = scene_of(image), pixels_of(image)
        panel = pixels[:, : int(scene.width * PANEL_WIDTH * 0.8)]
        upper, lower = panel[: int(scene.height * 0.6)], panel[int(scene.height * 0.75) :]
        assert (upper.min(axis=-1).max() > 60, np.median(lower[..., 1]) > 100) == (scene.has_text, scene.has_box), image


def test_polyps_have_their_colour_where_the_scene_has_them(sample: Path) -> None:
    shown = [image for image in sorted((sample / "images").iterdir()) if scene_of(image).polyps]
    assert {scene_of(image).lesion for image in shown} == set(LESIONS)
    for image in shown:
        scene, pixels = scene_of(image), pixels_of(image)
        panel = int(scene.width * PANEL_WIDTH)
        for x, y in scene.polyps:
            seen = pixels[int(y * scene.height), panel + int(x * (scene.width - panel))]
            off = {lesion: np.abs(seen - np.array(lesion.rgb)).sum() for lesion in LESIONS}
            assert min(off, key=off.__getitem__) == scene.lesion and off[scene.lesion] < 80, (image, x, y)


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
        ("eos_token_id", "<|im_end|>"),
        ("pad_token_id", "<|endoftext|>"),
    ],
)
def test_configuration_names_the_tokenizers_special_tokens(sample: Path, name: str, token: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sample / "model")
    assert tokenizer.encode(token) == [getattr(AutoConfig.from_pretrained(sample / "model"), name)]


def test_special_tokens_end_the_vocabulary(sample: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sample / "model")
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(len(tokenizer) - len(SPECIAL_TOKENS), len(tokenizer)))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_special_tokens_are_qwens_in_qwens_order(real_processor: Path) -> None:
    published = json.loads((real_processor / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    in_order = [published[number]["content"] for number in sorted(published, key=int)]
    assert tuple(in_order[: len(SPECIAL_TOKENS)]) == SPECIAL_TOKENS


@pytest.mark.parametrize(
    "text", ["Is there text?", "Où ? 漢字 🙂", " two  blanks\n\n\tand line ends\r\n", "it's 12,345"]
)
def test_any_text_survives_the_tokenizer(sample: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(sample / "model" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_writes_turns_as_qwens_does(sample: Path) -> None:
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is there text?"}]}
    messages = [{"role": "system", "content": "Be brief."}, user]
    tokenizer = AutoTokenizer.from_pretrained(sample / "model")
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Is there text?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_stock_transformers_loads_the_model_and_sees_three_deepstack_levels(sample: Path) -> None:
    model, loaded = Qwen3VLForConditionalGeneration.from_pretrained(sample / "model", output_loading_info=True)
    assert not any(loaded.values())
    processor = Qwen2VLImageProcessorPil.from_pretrained(sample / "model")
    inputs = processor(images=[draw(SCENES[0])], return_tensors="pt")
    with torch.no_grad():
        seen = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    num_tokens = int(inputs["image_grid_thw"].prod()) // 4
    levels = [seen.pooler_output, *seen.deepstack_features]
    assert [level.shape for level in levels] == [(num_tokens, model.config.text_config.hidden_size)] * 4
    assert all(not torch.allclose(one, other) for one, other in zip(levels, levels[1:], strict=False))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_frame_of_any_size_costs_about_twenty_visual_tokens(sample: Path, size: tuple[int, int]) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(sample / "model")
    grid = processor(images=[Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"]
    assert 18 <= int(grid.prod()) // 4 <= 25


def test_stamp_says_how_the_sample_was_made(sample: Path) -> None:
    stamp = json.loads((sample / "sample.json").read_text())
    assert {name: stamp[name] for name in ("seed", "model", "tokenizer")} == {
        "seed": DEFAULT_SEED,
        "model": "tiny",
        "tokenizer": None,
    }


def test_the_current_folder_stays_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sample(Path("."))
    assert (Path.cwd() / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (lambda folder: folder.write_text("a file"), {}, "is not empty"),
        (lambda folder: (folder.mkdir(), (folder / "sample.json").write_text("{")), {}, "sample.json is broken"),
        (lambda folder: None, {"model": "huge"}, "no model of size 'huge'; choose one of tiny, 2b"),
        (lambda folder: None, {"tokenizer": Path("nowhere")}, "nowhere has no tokenizer"),
    ],
)
def test_what_can_not_be_written_is_refused(tmp_path: Path, prepare: Any, options: Any, message: str) -> None:
    prepare(tmp_path / "sample")
    with pytest.raises(UsageError, match=message):
        write_sample(tmp_path / "sample", **options)
