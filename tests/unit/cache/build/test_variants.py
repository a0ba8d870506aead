"""Variants in a cache: encoded once each, whatever was built before, and looked after like images."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from PIL import Image
from support.small_caches import flip

from lookonce.cache.build.progress import index_from_plan
from lookonce.cache.maintenance.gc import cache_info
from lookonce.cache.maintenance.show import contact_sheet, show
from lookonce.cache.maintenance.verify import repair, verify
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.cache.store.metadata import checksum_line, plan_files, read_plan, receipt_path
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.datasets.augment import Augment
from lookonce.datasets.records import Record
from lookonce.errors import CacheCorrupt

RECIPE = {"rotate": 20, "crop": 0.8, "brightness": 0.3}
OTHER = {"contrast": 0.5}


def varied(images, variants: int = 3, recipe=None):
    """All images but the first two, which are not trained on, with variants."""
    return images.with_variants(
        Augment(variants=variants, **(recipe or RECIPE)), [Record(tuple(images.key_of)[2:], turns=())]
    )


@pytest.mark.guarantee(
    "A variant's features are those of its picture, whichever workers build it and whatever the cache held before; no "
    "image and no variant is encoded twice."
)
def test_variants_have_the_features_of_their_pictures_whatever_was_built_before(site, images):
    site.build(varied(images, 4))
    site.build(varied(images, recipe=OTHER))
    at_once = site.stored()
    steps = [images, varied(images, 2), varied(images, 4), varied(images, recipe=OTHER), varied(images, 3), images]
    encoded = [site.build(one, root="steps", worker=(number, 6)).num_encoded for number, one in enumerate(steps)]
    assert encoded == [8, 6, 12, 12, 0, 0]
    assert site.stored("steps") == at_once and len(at_once) == 8 + 6 * (3 + 2)
    for key, variant in (varied(images, 4).variants | varied(images, recipe=OTHER).variants).items():
        with Image.open(images.path_of[variant.of]) as image:
            variant.picture(image.convert("RGB")).save(site.path / "picture.png")
        patches, grid = site.processor.read(site.path / "picture.png")
        assert at_once[key] == bytes(raw_bytes(patches.contiguous()))
        assert VisionCache.open(site.folder()).grid_thw(key) == grid
        assert at_once[key] != at_once[variant.of]


def test_a_build_without_variants_has_the_plan_and_the_shards_that_it_always_had(site, images):
    site.build(images)
    before = {path: content for path, (_, content) in site.stamps().items() if path.parent.name == "shards"}
    plan = plan_files(site.folder())[0].read_bytes()
    assert b'"variants"' not in plan and b'"recipe"' not in plan
    site.build(varied(images))
    assert {path: path.read_bytes() for path in before} == before and plan_files(site.folder())[0].read_bytes() == plan
    extended = read_plan(site.folder())
    assert all(len({one.variant and one.variant.recipe for one in shard.images}) == 1 for shard in extended.shards)
    file_keys = {file: key for file, (key, _) in extended.files().items()}  # what an earlier version takes from a plan
    assert file_keys == {str(path): key for path, key in images.key_of.items()}


def test_a_worker_that_does_not_hash_plans_variants_with_the_tokens_of_their_images(site, files_are_old):
    images = site.index(*(site.noise(f"{number}.png", number) for number in range(8)))
    site.build(images)
    site.build(varied(index_from_plan(read_plan(site.folder()), images.key_of)), worker=(0, 1))
    tokens = {image.key: image.num_tokens for image in read_plan(site.folder()).images}
    assert len(tokens) > 8 and all(tokens[key] == tokens[one.of] > 0 for key, one in varied(images).variants.items())


@pytest.mark.parametrize("knows_recipe", [True, False])
@pytest.mark.parametrize("lacks_receipt", [True, False])
def test_repair_makes_a_damaged_shard_of_variants_again(site, images, knows_recipe, lacks_receipt):
    site.build(varied(images))
    before, folder = site.stored(), site.folder()
    shard = next(shard for shard in read_plan(folder).shards if shard.images[0].variant)
    flip(shard_path(folder, shard.name))
    problem = verify(folder).problems[0]
    assert f"variant {shard.images[-1].variant.number} of {site.path}" in problem.text() and "rotate" in problem.text()
    with pytest.raises(CacheCorrupt, match=f"variant . of {site.path}"):
        VisionCache.open(folder)[shard.keys[-1]]
    if lacks_receipt:
        flip(receipt_path(folder, shard.name))
    report, to_build = repair(folder, site.fingerprint, varied(images) if knows_recipe else images)
    assert report.removed == [shard.name] and report.num_again == len(shard.keys) and not report.lost
    site.build(to_build)
    assert site.stored() == before and verify(folder).problems == []
    images.path_of[shard.images[0].variant.of].unlink()
    flip(shard_path(folder, shard.name))
    report, _ = repair(folder, site.fingerprint, images)
    assert [*report.left] == [shard.name] and shard.keys[0] in report.text()


@pytest.mark.parametrize(
    "change", [{"variants": [["0" * 64, 1]]}, {"recipe": {"rotate": 1e9}}, {"recipe": {"zoom": 1}}]
)
def test_a_plan_whose_keys_are_not_those_of_its_variants_is_damaged(site, images, change):
    site.build(varied(images))
    path = plan_files(site.folder())[0]
    value = json.loads(path.read_bytes())
    shard = next(shard for shard in value["shards"] if "recipe" in shard)
    shard.update({"variants": change["variants"] * len(shard["keys"])} if "variants" in change else change)
    del value["xxh3_64"]
    body = json.dumps(value)[1:]
    path.write_text(checksum_line(body.encode()) + body)
    with pytest.raises(CacheCorrupt, match="is broken"):
        read_plan(site.folder())


def test_reports_count_variants_apart_from_images(site, images, tmp_path):
    report = site.build(varied(images))
    assert (report.num_wanted, report.num_variants) == (20, 12) and "12 of 20 are variants" in report.text()
    info = cache_info(site.folder())
    assert (info.num_images, [*asdict(info)["variants"].values()], info.is_complete) == (8, [12], True)
    assert "8 images and 12 variants" in info.lines()[0] and '12 variants by {"brightness": 0.3,' in info.lines()[1]
    cache, path = VisionCache.open(site.folder()), [*images.key_of][-1]
    assert 'variants 1, 2 by {"brightness": 0.3, "crop": 0.8, "rotate": 20.0}' in show(cache, str(path)).text()
    variant = next(key for key, one in varied(images).variants.items() if one.of == images.key_of[path])
    assert f"variant 1 of {path}" in show(cache, variant).text()
    sheet = contact_sheet(path, Augment(variants=5, **RECIPE))
    with Image.open(path) as image:
        width, height = image.width + 4, image.height + 4
        assert sheet.size == (3 * width, 2 * height)
        assert sheet.crop((0, 0, width - 4, height - 4)).tobytes() == image.tobytes()
