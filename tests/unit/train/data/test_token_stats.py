"""Tokens of records and epochs are those of the examples, groups and packs that training makes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.audit.corpus import Material
from lookonce.datasets.records import read_records
from lookonce.errors import ModelError
from lookonce.run.config import BatchSection
from lookonce.run.inputs import Inputs
from lookonce.train.data.groups import group_examples
from lookonce.train.data.sampler import Order
from lookonce.train.data.token_stats import Costs, Ruler, Spread, measure
from lookonce.train.data.tokenize import Prompter, make_examples


@pytest.fixture(scope="module")
def ruler(sample: Path) -> Ruler:
    return Ruler(sample / "model")


def costs(path: Path, ruler: Ruler, assumed: int | None = None, **batch: int) -> Costs:
    return measure(Material.read([path]), ruler, "a model", BatchSection(**batch), assumed)


def test_an_epoch_costs_what_training_would_run(sample: Path, make_run, ruler):
    inputs = Inputs.open(make_run())
    prompter = Prompter(sample / "model", inputs.model_folder.config)
    grids = {key: inputs.processor.read(path)[1] for key, path in inputs.images.path_of.items()}
    examples, _ = make_examples(prompter, inputs.records["train"], inputs.key_of, grids.__getitem__, 4096)
    batch = BatchSection(samples_per_step=8, tokens_per_pack=256)
    packs = Order.of(examples, prompter.image_token_id, batch, seed=0).lengths(0)
    [cost] = costs(sample / "train.jsonl", ruler, samples_per_step=8, tokens_per_pack=256).files
    assert cost.num_separate == sum(example.num_tokens for example in examples)
    assert cost.num_shared == sum(group.num_tokens for group in group_examples(examples, prompter.image_token_id))
    assert (cost.num_packed, cost.num_packs) == (sum(packs), len(packs))
    assert cost.num_supervised == sum(int(example.supervised.sum()) for example in examples)
    assert cost.num_text_tokens + cost.num_image_tokens == cost.num_separate
    assert cost.num_shared <= cost.num_packed <= cost.num_separate


def test_image_tokens_are_those_of_the_image_processor(sample: Path, ruler):
    found = costs(sample / "val.jsonl", ruler).image_tokens
    images = {image for record in read_records(sample / "val.jsonl") for image in record.images}
    processor = ImageProcessor(sample / "model")
    assert found == Counter(int(np.prod(processor.read(image)[1])) // 4 for image in images)


@pytest.mark.parametrize("assumed", [None, 100])
def test_images_of_unknown_size_count_what_is_assumed_and_are_told(tmp_path, ruler, assumed):
    lines = [{"image_filename": f"{n}.jpg", "question": q, "answer": "yes"} for n in "ab" for q in ("Is it?", "Text?")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = costs(tmp_path / "train.jsonl", ruler, assumed)
    [cost] = found.files
    assert (found.num_unknown, cost.num_image_tokens) == (2, 4 * (assumed or 0))
    assert cost.num_separate - cost.num_shared >= 2 * (assumed or 0)
    assert "2 images of unknown size" in found.text() and ("--image-tokens" in found.text())


def test_records_that_are_too_long_or_refused_are_named(tmp_path, ruler):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    texts = [("Is it?", "yes"), ("Is it? " * 300, "yes"), ("Is <|im_end|> it?", "yes")]
    lines = [{"image_filename": "a.png", "question": question, "answer": answer} for question, answer in texts]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = costs(tmp_path / "train.jsonl", ruler, max_tokens=200)
    [cost] = found.files
    assert cost.num_records == 1
    assert [item["place"] for item in cost.too_long] == ["train.jsonl:2"]
    assert [item["place"] for item in cost.refused] == ["train.jsonl:3"]
    assert {finding.code: finding.level for finding in found.findings()} == {"refused": "error", "too-long": "warning"}
    assert all(item["reason"].startswith(item["place"]) for item in cost.refused)


def test_an_image_that_the_processor_refuses_is_of_unknown_size(tmp_path, ruler):
    Image.new("RGB", (6500, 10)).save(tmp_path / "a.png")
    (tmp_path / "train.jsonl").write_text('{"image_filename": "a.png", "question": "Is it?", "answer": "yes"}')
    assert costs(tmp_path / "train.jsonl", ruler).num_unknown == 1


def test_the_published_tokenizer_needs_no_model_beside_it(real_processor: Path, real_records: Path):
    material = Material.read([real_records], real_records.parent / "images")
    found = measure(material, Ruler(real_processor), "published", BatchSection())
    assert sum(found.image_tokens.values()) == 8 and found.num_unknown == 0
    smaller = measure(material, Ruler(real_processor, max_pixels=100_000), "published", BatchSection())
    assert max(smaller.image_tokens) <= 100_000 // 32**2 < min(found.image_tokens)


def test_a_folder_without_a_tokenizer_is_told(tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        Ruler(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        Ruler(tmp_path)


@given(st.dictionaries(st.integers(0, 5000), st.integers(1, 50), min_size=1))
def test_spread_is_that_of_the_numbers(counts):
    numbers = list(Counter(counts).elements())
    found = Spread.of(counts)
    assert (found.max, found.mean) == (max(numbers), pytest.approx(np.mean(numbers)))
    assert found.median == np.percentile(numbers, 50, method="lower")
    assert found.p99 == np.percentile(numbers, 99, method="higher")
