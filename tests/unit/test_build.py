"""Building a cache: each image once, interruptions and bad images cost nothing else, features as stock has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.build import BuildReport, build_cache
from lookonce.cache.checkpoint import Checkpoint
from lookonce.cache.fingerprint import DTYPES, Fingerprint, raw_bytes
from lookonce.cache.folder import only_builder, read_plan
from lookonce.cache.pixels import ImageProcessor
from lookonce.cache.read import VisionCache
from lookonce.cache.shards import receipt_path, shard_path
from lookonce.cache.tower import Tower
from lookonce.datasets.images import image_key, index_images
from lookonce.datasets.records import Record, Turn
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing, ImageError
from lookonce.files import TEMPORARY_MARK
from lookonce.train.inputs import Inputs

HIDDEN = 8
FINGERPRINT = Fingerprint(1, "0" * 64, {"out_hidden_size": HIDDEN}, {}, 4, "float32")
SHARD_BYTES = 4_000
"""Two or three of the random images."""
NUM_IMAGES = 8
Images = dict[str, Path]
Build = Callable[..., BuildReport]


class FakeTower:
    """Gives a piece of its pixels for features; white images become NaN, and after `limit` images it dies."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.num_encoded = limit, 0

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        if self.num_encoded == self.limit:
            raise PowerCut
        self.num_encoded += len(grids)
        features = patches.view(-1, 4, patches.shape[1])[..., :HIDDEN]
        return [features * torch.nan if (patches == 1).all() else features]


class PowerCut(Exception):
    pass


def no_tower() -> Tower:
    pytest.fail("the tower was loaded")


def save_noise(path: Path, seed: int, size: tuple[int, int] | None = None) -> Path:
    rng = np.random.default_rng(seed)
    height, width = size or rng.integers(40, 200, 2)
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path


def by_key(*paths: Path) -> Images:
    return {image_key(path): path for path in paths}


def tensors(report: BuildReport) -> dict[str, bytes]:
    cache = VisionCache.open(report.folder)
    return {key: bytes(raw_bytes(cache[key])) for key in cache.entries}


def stamps(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Modification time and content of every shard and receipt."""
    files = [*folder.glob("shards/*"), *folder.glob("receipts/*")]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def quarantine_lines(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return by_key(*(save_noise(tmp_path / f"{number}.png", number) for number in range(NUM_IMAGES)))


@pytest.fixture
def build(sample: Path, tmp_path: Path) -> Build:
    """Builds with a fake tower below a root of the test's own."""
    processor = ImageProcessor(sample / "model")

    def build(
        images: Mapping[str, Path],
        load_tower: Callable[[], FakeTower] = FakeTower,
        root: str = "caches",
        shard_bytes: int = SHARD_BYTES,
    ) -> BuildReport:
        return build_cache(tmp_path / root, FINGERPRINT, processor, images, load_tower, shard_bytes, {"model": "fake"})

    return build


def test_building_twice_encodes_nothing_the_second_time_and_loads_no_tower(build, images):
    first = build(images)
    before = stamps(first.folder)
    second = build(images, no_tower)
    assert (first.num_encoded, first.num_reused) == (NUM_IMAGES, 0)
    assert (second.num_encoded, second.num_reused) == (0, NUM_IMAGES)
    assert stamps(second.folder) == before


def test_another_shard_size_leaves_a_finished_cache_alone(build, images):
    folder = build(images).folder
    before = stamps(folder)
    build(images, no_tower, shard_bytes=10 * SHARD_BYTES)
    assert stamps(folder) == before


def test_every_image_is_in_exactly_one_planned_shard(build, images):
    plan = read_plan(build(images).folder)
    assert len(plan.shards) > 2
    assert [key for shard in plan.shards for key in shard.keys] == sorted(images)


@pytest.mark.parametrize("limit", [0, 1, 4, NUM_IMAGES - 1])
def test_an_interrupted_build_keeps_finished_shards_and_ends_with_the_same_tensors(build, images, limit):
    undisturbed = build(images, root="undisturbed")
    with pytest.raises(PowerCut):
        build(images, lambda: FakeTower(limit))
    folder = undisturbed.folder.parents[1] / "caches" / undisturbed.folder.name
    kept, num_kept = stamps(folder), len(VisionCache.open(folder))
    sizes = [len(shard.keys) for shard in read_plan(folder).shards]
    assert num_kept == max(sum(sizes[:number]) for number in range(len(sizes)) if sum(sizes[:number]) <= limit)
    assert not list(folder.rglob(f"*{TEMPORARY_MARK}*"))

    tower = FakeTower()
    resumed = build(images, lambda: tower)
    assert tower.num_encoded == resumed.num_encoded == NUM_IMAGES - num_kept
    assert resumed.num_reused == num_kept
    assert stamps(folder).items() >= kept.items()
    assert tensors(resumed) == tensors(undisturbed)
    assert read_plan(folder) == read_plan(undisturbed.folder)


def test_a_build_interrupted_again_and_again_still_ends_with_the_same_tensors(build, images):
    attempts = 0
    while attempts < NUM_IMAGES:
        try:
            report = build(images, lambda: FakeTower(3))
            break
        except PowerCut:
            attempts += 1
    assert attempts > 1
    assert tensors(report) == tensors(build(images, root="undisturbed"))


def test_new_images_are_added_without_touching_the_shards_there_are(build, images, tmp_path):
    first = build(images)
    before = stamps(first.folder)
    new = by_key(*(save_noise(tmp_path / f"new-{number}.png", 100 + number) for number in range(3)))
    tower = FakeTower()
    second = build(images | new, lambda: tower)
    assert tower.num_encoded == second.num_encoded == 3
    assert stamps(second.folder).items() >= before.items()
    assert tensors(second).keys() == (images | new).keys()
    assert read_plan(second.folder).shards[: first.num_shards] == read_plan(first.folder).shards[: first.num_shards]


def test_a_run_that_wants_fewer_images_reuses_what_is_there(build, images):
    build(images)
    some = dict(list(images.items())[:3])
    report = build(some, no_tower)
    assert (report.num_wanted, report.num_encoded, report.num_reused) == (3, 0, 3)


def truncated_jpeg(path: Path) -> None:
    save_noise(path, 0)
    path.write_bytes(path.read_bytes()[:-500])


BAD_IMAGES = {
    "truncated.jpg": (truncated_jpeg, "truncated"),
    "text.jpg": (lambda path: path.write_text("no image"), "of no known image format"),
    "empty.png": (lambda path: path.write_bytes(b""), "of no known image format"),
    "stripe.png": (lambda path: save_noise(path, 0, (2, 1000)), "aspect ratio"),
    "white.png": (lambda path: Image.new("RGB", (64, 64), "white").save(path), "not finite"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_an_image_that_can_not_be_encoded_is_quarantined_and_all_others_are_done(build, images, tmp_path, name):
    write, reason = BAD_IMAGES[name]
    path = tmp_path / name
    write(path)
    bad = image_key(path)
    report = build(images | {bad: path})
    assert tensors(report).keys() == images.keys()
    assert report.quarantined.keys() == {bad}
    assert report.num_encoded == NUM_IMAGES
    [line] = quarantine_lines(report.folder)
    assert (line["key"], line["file"]) == (bad, str(path))
    assert str(path) in line["reason"] and reason in line["reason"]
    with pytest.raises(FeaturesMissing, match=reason):
        VisionCache.open(report.folder)[bad]


def test_bad_images_do_not_change_the_features_of_others(build, images, tmp_path):
    for name, (write, _) in BAD_IMAGES.items():
        write(tmp_path / name)
    bad = by_key(*(tmp_path / name for name in BAD_IMAGES))
    disturbed = build(images | bad)
    assert tensors(disturbed) == tensors(build(images, root="undisturbed"))
    assert disturbed.quarantined.keys() == bad.keys()


def test_a_quarantined_image_is_not_tried_again_but_reported_again(build, images, tmp_path):
    path = tmp_path / "bad.jpg"
    path.write_bytes(b"")
    first = build(images | by_key(path))
    second = build(images | by_key(path), no_tower)
    assert second.quarantined == first.quarantined
    assert len(quarantine_lines(second.folder)) == 1


def test_a_mended_image_is_encoded(build, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(b"")
    build(by_key(path))
    save_noise(path, 0)
    report = build(by_key(path))
    assert (report.num_encoded, report.quarantined) == (1, {})


def test_a_cache_of_bad_images_alone_is_whole(build, tmp_path):
    path = tmp_path / "bad.jpg"
    path.write_bytes(b"")
    report = build(by_key(path))
    assert (report.num_encoded, report.num_shards, len(VisionCache.open(report.folder))) == (0, 1, 0)
    build(by_key(path), no_tower)


def lose_a_byte(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


def flip_the_last_byte(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("damage", [lose_a_byte, flip_the_last_byte, Path.unlink])
def test_doing_what_the_message_says_mends_a_damaged_cache(build, images, damage):
    report = build(images)
    before = tensors(report)
    damage(shard_path(report.folder, "shard-00001"))
    with pytest.raises(CacheCorrupt) as caught:
        tensors(report)
    [receipt] = re.findall(r"delete (\S+\.json) and run: lookonce cache build", str(caught.value))
    Path(receipt).unlink()
    mended = build(images)
    assert 0 < mended.num_encoded < NUM_IMAGES
    assert tensors(mended) == before


def test_a_lost_shard_is_made_up_for_when_only_some_of_its_images_are_wanted(build, images):
    folder = build(images).folder
    [shard, *_] = [shard for shard in read_plan(folder).shards if len(shard.keys) > 1]
    receipt_path(folder, shard.name).unlink()
    wanted = {key: path for key, path in images.items() if key != shard.keys[0]}
    report = build(wanted)
    assert report.num_encoded == len(shard.keys) - 1
    assert tensors(report).keys() == wanted.keys()


def test_files_of_the_same_bytes_are_encoded_once(build, tmp_path):
    one = save_noise(tmp_path / "one.png", 0)
    copy = tmp_path / "copy.png"
    copy.write_bytes(one.read_bytes())
    turns = (Turn("What is it?", "noise"),)
    index = index_images([Record((one,), turns), Record((copy, one), turns)])
    tower = FakeTower()
    report = build(index.path_of, lambda: tower)
    assert index.num_files == 2
    assert tower.num_encoded == report.num_encoded == report.num_wanted == 1
    assert index.key_of[one] == index.key_of[copy]


def test_no_temporary_file_is_left(build, images):
    folder = build(images).folder
    assert not list(folder.rglob(f"*{TEMPORARY_MARK}*"))
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "plan.json", "receipts", "shards"]


def test_the_manifest_says_what_the_cache_was_made_from_and_with(build, images):
    manifest = json.loads((build(images).folder / "manifest.json").read_text())
    assert Fingerprint.from_json(manifest["fingerprint"]) == FINGERPRINT
    assert (manifest["format_version"], manifest["sha256"]) == (1, FINGERPRINT.sha256)
    assert manifest["provenance"]["model"] == "fake"
    assert manifest["provenance"].keys() >= {"created", "host", "python"}
    assert manifest["provenance"]["libraries"].keys() >= {"lookonce", "torch", "transformers", "pillow"}


def test_a_folder_made_from_something_else_is_refused(build, images):
    folder = build(images).folder
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["fingerprint"]["dtype"] = "bfloat16"
    path.write_text(json.dumps(manifest))
    before = stamps(folder)
    with pytest.raises(
        CacheMismatch,
        match=f"{folder} was made from something else; .*\n  dtype: this run 'float32', that cache 'bfloat16'",
    ):
        build(images, no_tower)
    assert stamps(folder) == before


def test_a_report_counts_and_reads_well(build, images, tmp_path):
    first = build(images)
    assert first.num_wanted == NUM_IMAGES
    assert first.num_shards == len(list((first.folder / "shards").iterdir()))
    assert first.size_bytes == sum(path.stat().st_size for path in (first.folder / "shards").iterdir())
    sizes = rf"{first.num_shards} shards, {first.size_bytes / 1000:.1f} kB"
    assert re.fullmatch(rf"cache {first.folder}: encoded 8 images in \d+\.\d s; {sizes}", first.text())
    assert build(images).text() == f"cache {first.folder}: nothing new encoded, 8 of 8 images reused; {sizes}"
    new = by_key(save_noise(tmp_path / "new.png", 100))
    assert ": encoded 1 image in " in build(images | new).text()
    assert ", 8 of 9 images reused; " in replace(first, num_wanted=9, num_encoded=1, num_reused=8).text()


def test_a_build_that_only_fails_does_not_say_that_nothing_was_to_do(build, tmp_path):
    (tmp_path / "bad.jpg").write_text("no image")
    for _ in range(2):
        report = build(by_key(tmp_path / "bad.jpg"))
        assert (report.num_encoded, report.num_reused, len(report.quarantined)) == (0, 0, 1)
        assert "0 of 1 image reused" in report.text() and "1 image could not be encoded" in report.text()


def test_a_shard_made_again_quarantines_its_images_once(build, images, tmp_path):
    (tmp_path / "bad.jpg").write_text("no image")
    images = images | by_key(tmp_path / "bad.jpg")
    folder = build(images).folder
    for receipt in (folder / "receipts").iterdir():
        receipt.unlink()
    build(images)
    assert len((folder / "quarantine.jsonl").read_text().splitlines()) == 1


def test_an_image_that_changed_after_it_was_hashed_stops_the_build(build, images):
    path = next(iter(images.values()))
    save_noise(path, 12345)
    with pytest.raises(ImageError, match=f"image {path} has changed since this build began"):
        build(images)


def test_an_image_that_the_disk_does_not_give_stops_the_build_and_is_not_quarantined(build, images):
    path = next(iter(images.values()))
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(ImageError, match=f"can not read image {path}"):
        build(images)
    path.write_bytes(content)
    assert not build(images).quarantined


def test_a_second_build_of_the_same_cache_waits_for_its_turn(build, images):
    folder = build(images).folder
    with only_builder(folder), pytest.raises(CacheError, match=f"another build is at work in {folder}"):
        build(images)
    assert build(images).num_reused == NUM_IMAGES


def test_a_report_names_the_first_few_quarantined_images(build, tmp_path):
    paths = [tmp_path / f"bad-{number}.jpg" for number in range(7)]
    for number, path in enumerate(paths):
        path.write_text(str(number))
    report = build(by_key(*paths))
    _, headline, *reasons = report.text().splitlines()
    assert headline == f"7 images could not be encoded (see {report.folder / 'quarantine.jsonl'}):"
    assert len(reasons) == 5
    assert all("can not decode image" in reason and str(tmp_path) in reason for reason in reasons)


def real_build(
    sample: Path, root: Path, images: Images, dtype: str = "float32", shard_bytes: int = 10**6
) -> BuildReport:
    checkpoint, processor = Checkpoint.open(str(sample / "model")), ImageProcessor(sample / "model")
    fingerprint = Fingerprint.of(checkpoint, processor, dtype)
    return build_cache(
        root, fingerprint, processor, images, lambda: Tower(checkpoint, DTYPES[dtype]), shard_bytes, provenance={}
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_do_not_depend_on_neighbours_or_on_the_order(sample, tmp_path, dtype):
    images = by_key(*sorted((sample / "images").glob("frame-*.jpg"))[::20])
    together = tensors(real_build(sample, tmp_path / "together", images, dtype))
    backwards = dict(reversed(images.items()))
    assert tensors(real_build(sample, tmp_path / "backwards", backwards, dtype, shard_bytes=1)) == together
    for key, path in images.items():
        assert tensors(real_build(sample, tmp_path / key, {key: path}, dtype)) == {key: together[key]}


def test_features_are_those_of_the_stock_model(sample, tmp_path):
    images = by_key(*sorted((sample / "images").glob("frame-*.jpg"))[::20])
    cache = VisionCache.open(real_build(sample, tmp_path, images).folder)
    model = Qwen3VLForConditionalGeneration.from_pretrained(sample / "model", dtype=torch.float32)
    processor = Qwen2VLImageProcessorPil.from_pretrained(sample / "model")
    for key, path in images.items():
        inputs = processor(images=[Image.open(path)], return_tensors="pt")
        with torch.no_grad():
            output = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], return_dict=True)
        assert list(cache.grid_thw(key)) == inputs["image_grid_thw"][0].tolist()
        expected = [output.pooler_output, *output.deepstack_features]
        assert len(expected) == cache[key].shape[1] == 4
        for level, tensor in enumerate(expected):
            torch.testing.assert_close(cache[key][:, level], tensor, rtol=0, atol=1e-6)


def test_a_bfloat16_cache_holds_what_a_bfloat16_model_would_see(sample, tmp_path):
    images = by_key(*sorted((sample / "images").glob("frame-*.jpg"))[:2])
    cache = VisionCache.open(real_build(sample, tmp_path, images, "bfloat16").folder)
    model = Qwen3VLForConditionalGeneration.from_pretrained(sample / "model", dtype=torch.bfloat16)
    for key, path in images.items():
        patches, grid = ImageProcessor(sample / "model").read(path)
        with torch.no_grad():
            output = model.model.visual(patches, grid_thw=torch.tensor([grid]), return_dict=True)
        expected = torch.stack([output.pooler_output, *output.deepstack_features], dim=1)
        assert cache[key].dtype == torch.bfloat16
        assert torch.equal(cache[key], expected)


def test_a_run_opens_its_cache_only_if_it_holds_all_images(make_run, sample):
    val = str(sample / "val.jsonl")
    few = Inputs.open(make_run(data={"train": val, "val": val, "test": val}))
    report = few.build()
    assert report.num_encoded == few.images.num_distinct == len(few.open_cache())
    everything = Inputs.open(make_run())
    [first, *_] = everything.records["train"]
    with pytest.raises(FeaturesMissing) as caught:
        everything.open_cache()
    num_missing = everything.images.num_files - few.images.num_files
    expected = f"lacks the features of {num_missing} of {everything.images.num_files} images"
    assert expected in str(caught.value)
    assert f"{first.images[0]} ({first.origin}): run: lookonce cache build" in str(caught.value)


def test_a_run_with_a_quarantined_image_names_record_and_reason(make_run, tmp_path):
    (tmp_path / "bad.jpg").write_text("no image")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"image_filename": "bad.jpg", "question": "q", "answer": "a"}))
    records = str(tmp_path / "bad.jsonl")
    inputs = Inputs.open(make_run(data={"train": records, "val": [], "test": []}))
    inputs.build()
    with pytest.raises(
        FeaturesMissing, match=r"bad\.jpg \(.*bad\.jsonl:1\): it is quarantined \(.*of no known image format"
    ):
        inputs.open_cache()
