"""Finding and opening a cache by its manifest, and the refusals of another or a broken one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import NUM_DIFFERENCES
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch

BUILD = "lookonce cache build"


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_folder_without_a_manifest_is_not_a_cache(small):
    (small.folder / "manifest.json").unlink()
    with pytest.raises(CacheError, match=f"{small.folder} is not a cache: .*manifest.json.*{BUILD}") as caught:
        VisionCache.open(small.folder)
    assert not isinstance(caught.value, CacheCorrupt)


def without(*names: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        edit_json(path, lambda value: [value.pop(name) for name in names])

    return remove


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_text("{"), id="not JSON"),
        pytest.param(lambda path: path.write_text("[]"), id="a list"),
        pytest.param(without("format_version"), id="no version"),
        pytest.param(without("fingerprint"), id="no fingerprint"),
        pytest.param(lambda path: edit_json(path, lambda value: value["fingerprint"].pop("dtype")), id="no dtype"),
        pytest.param(
            lambda path: edit_json(path, lambda value: value["fingerprint"].update(dtype="float99")), id="unknown dtype"
        ),
    ],
)
def test_a_broken_manifest_is_refused_by_name(small, damage):
    path = small.folder / "manifest.json"
    damage(path)
    with pytest.raises(CacheCorrupt, match=f"{path} is broken"):
        VisionCache.open(small.folder)


def test_another_format_version_is_refused_with_both_versions(small):
    edit_json(small.folder / "manifest.json", lambda value: value.update(format_version=7))
    with pytest.raises(CacheError, match=f"format version 7, this program reads version 2; .*{BUILD}") as caught:
        VisionCache.open(small.folder)
    assert not isinstance(caught.value, CacheCorrupt)


def test_find_cache_opens_the_cache_with_the_fingerprint(small):
    shutil.copytree(small.folder, small.folder.with_name("another"))
    cache = find_cache(small.folder.parent, small.fingerprint, check=False)
    assert (cache.folder, cache.fingerprint, cache.check) == (small.folder, small.fingerprint, False)


def refusal(root: Path, wanted: Fingerprint) -> list[str]:
    """The lines of the error of `find_cache`."""
    with pytest.raises(CacheMismatch) as caught:
        find_cache(root, wanted)
    return str(caught.value).splitlines()


def test_find_cache_names_the_differing_fields_with_both_values(small):
    wanted = replace(
        small.fingerprint,
        dtype="bfloat16",
        image_processor=small.fingerprint.image_processor | {"max_pixels": 9999},
    )
    assert refusal(small.folder.parent, wanted) == [
        f"no cache in {small.folder.parent} fits this model and these pixels; {small.folder.name} differs in",
        "  dtype: this run 'bfloat16', that cache 'float32'",
        "  image_processor.max_pixels: this run 9999, that cache 25600",
        f"Change the run file back, or build a cache for this run with: {BUILD} RUN.yaml",
    ]


def test_find_cache_compares_with_the_most_similar_cache(small):
    far = replace(small.fingerprint, tower_sha256="1" * 64, num_levels=1, dtype="bfloat16")
    small.write_manifest(small.folder.with_name("00-far"), far)
    found = refusal(small.folder.parent, replace(small.fingerprint, dtype="bfloat16"))
    assert found[0].endswith(f"{small.folder.name} differs in")
    assert found[1:-1] == ["  dtype: this run 'bfloat16', that cache 'float32'"]


def test_find_cache_names_the_version_of_a_cache_of_another_format(small):
    old = replace(small.fingerprint, format_version=1)
    small.write_manifest(small.folder, old)
    small.folder.rename(small.folder.with_name(old.folder_name))
    found = refusal(small.folder.parent, small.fingerprint)
    assert found[0].endswith(f"{old.folder_name} differs in")
    assert found[1:-1] == ["  format_version: this run 2, that cache 1"]
    assert BUILD in found[-1]


@pytest.mark.parametrize("manifest", ["{", "[]", '{"format_version": 99, "fingerprint": {}}'])
def test_find_cache_skips_unreadable_manifests(small, manifest):
    other = small.folder.with_name("00-other")
    other.mkdir()
    (other / "manifest.json").write_text(manifest)
    assert refusal(small.folder.parent, replace(small.fingerprint, dtype="bfloat16"))[0].endswith(
        f"{small.folder.name} differs in"
    )


def test_find_cache_shortens_long_lists_of_differences(small):
    extra = {f"option_{number}": number for number in range(NUM_DIFFERENCES + 3)}
    found = refusal(
        small.folder.parent,
        replace(small.fingerprint, tower_config=small.fingerprint.tower_config | extra),
    )
    assert len(found) == 1 + NUM_DIFFERENCES + 1 + 1
    assert found[-2] == "  and 3 more"


def test_find_cache_refuses_a_folder_with_another_manifest(small):
    small.write_manifest(small.folder, replace(small.fingerprint, dtype="bfloat16"))
    assert "  dtype: this run 'float32', that cache 'bfloat16'" in refusal(small.folder.parent, small.fingerprint)


def test_without_a_cache_find_cache_names_folder_and_command(small, tmp_path):
    with pytest.raises(CacheError, match=f"no cache in {tmp_path / 'nowhere'}; build it with: {BUILD}") as caught:
        find_cache(tmp_path / "nowhere", small.fingerprint)
    assert not isinstance(caught.value, CacheMismatch)
