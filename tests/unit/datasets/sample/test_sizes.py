"""Samples for measurements have the same amount of work for every seed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.datasets.sample.scene import KVASIR_SHARES, KVASIR_SIZES, make_scenes, read_sizes, stratify_sizes
from lookonce.datasets.sample.write import split_scenes, write_sample
from lookonce.errors import UsageError


def tokens(width, height):
    """The image tokens of Qwen3-VL."""
    return round(width / 32) * round(height / 32)


MEAN = sum(tokens(*size) * share for size, share in KVASIR_SHARES.items()) / sum(KVASIR_SHARES.values())


@pytest.mark.parametrize(("num_images", "tolerance"), [(64, 0.13), (128, 0.07), (256, 0.04)])
def test_tokens_per_question_are_the_same_for_every_seed(num_images, tolerance):
    for seed in range(20):
        splits = split_scenes(list(make_scenes(seed, num_images)), seed)
        assigned = stratify_sizes(splits["train"], read_sizes(KVASIR_SIZES), seed)
        num_questions = sum(scene.num_questions for _, scene in assigned)
        num_tokens = sum(tokens(scene.width, scene.height) * scene.num_questions for _, scene in assigned)
        assert num_tokens / num_questions == pytest.approx(MEAN, rel=tolerance)


def test_each_size_has_its_share_and_only_sizes_change():
    numbered = list(enumerate(make_scenes(3, 1000)))
    assigned = stratify_sizes(numbered, read_sizes(KVASIR_SIZES), 3)
    found = Counter((scene.width, scene.height) for _, scene in assigned)
    assert found.keys() == KVASIR_SHARES.keys()
    assert all(abs(found[size] - 10 * share) <= 5 for size, share in KVASIR_SHARES.items())
    assert [(n, replace(scene, width=0, height=0)) for n, scene in assigned] == [
        (n, replace(scene, width=0, height=0)) for n, scene in numbered
    ]
    again, other = (stratify_sizes(numbered, read_sizes(KVASIR_SIZES), seed) for seed in (3, 4))
    assert assigned == again != other


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("width,height\n", "no rows"),
        ("width,height\n3,x\n", "invalid literal"),
        ("a,b\n1,2\n", r"KeyError\('width'\)"),
        (None, "No such"),
    ],
)
def test_a_file_without_sizes_is_refused(tmp_path: Path, content, expected):
    path = tmp_path / "sizes.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=f"neither `kvasir` nor a CSV file.*{expected}"):
        read_sizes(path)


def test_sizes_are_read_with_a_byte_order_mark_and_other_columns(tmp_path: Path):
    (tmp_path / "sizes.csv").write_bytes(b"\xef\xbb\xbfwidth,source,height\r\n622,polyp,529\r\n")
    assert read_sizes(tmp_path / "sizes.csv") == [(622, 529)]


@pytest.mark.parametrize("word", ["stratified", "drawn"])
def test_a_sample_with_sizes_is_found_again_whichever_word_its_version_wrote(tmp_path: Path, word):
    stamp = {"seed": 3, "model": "tiny", "tokenizer": None, "images": 64, "sizes": f"{word} from kvasir"}
    made = {"num_files": 66, "num_images": 64, "num_questions": {"train": 1}, "tower_only": False}
    (tmp_path / "sample.json").write_text(json.dumps(stamp | made))
    assert not write_sample(tmp_path, sizes=KVASIR_SIZES).fresh
    with pytest.raises(UsageError, match="holds another sample"):
        write_sample(tmp_path)
