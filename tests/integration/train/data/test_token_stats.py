"""Token counts of records and epochs equal those of the examples, groups and packs that training makes."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.audit.findings import Corpus
from lookonce.datasets.records import read_records
from lookonce.errors import ModelError
from lookonce.run.open import TO_BUILD, open_run
from lookonce.run.sections import BatchSection
from lookonce.train.data import tokenize
from lookonce.train.data.packing import group_examples, nested
from lookonce.train.data.sampler import Sampler
from lookonce.train.data.token_stats import Distribution, TokenCounter, TokenStats, count_tokens, findings, to_text
from lookonce.train.data.tokenize import ChatTokenizer, make_examples


@pytest.fixture(scope="module")
def counter(sample: Path) -> TokenCounter:
    return TokenCounter(sample / "model")


def stats_of(path: Path, counter: TokenCounter, **batch: int) -> TokenStats:
    return count_tokens(Corpus.read([path]), counter, "a model", BatchSection(**batch))


@pytest.mark.guarantee("The token counts of an audit equal those of training.")
def test_the_tokens_of_an_epoch_are_those_that_training_processes(sample: Path, make_run, counter):
    inputs = open_run(make_run(), TO_BUILD)
    chat_tokenizer = ChatTokenizer(sample / "model", inputs.model_folder.config)
    grids = {key: inputs.processor.read(path)[1] for key, path in inputs.images.path_of.items()}
    examples, _ = make_examples(chat_tokenizer, inputs.records["train"], inputs.key_of, grids.__getitem__, 4096)
    batch = BatchSection(samples_per_step=8, tokens_per_pack=256)
    packs = Sampler.of(examples, chat_tokenizer.image_token_id, batch, seed=0).pack_lengths(0)
    [file] = stats_of(sample / "train.jsonl", counter, samples_per_step=8, tokens_per_pack=256).files
    assert file.num_separate == sum(example.num_tokens for example in examples)
    groups = group_examples(examples, chat_tokenizer.image_token_id)
    assert file.num_shared == sum(nested(group, examples).num_tokens for group in groups)
    assert file.num_shared < sum(group.num_tokens for group in groups)
    assert (file.num_packed, file.num_packs) == (sum(packs), len(packs))
    assert file.num_supervised == sum(int(example.supervised.sum()) for example in examples)
    assert file.num_text_tokens + file.num_image_tokens == file.num_separate
    assert file.num_shared <= file.num_packed <= file.num_separate


def test_image_tokens_are_those_of_the_image_processor(sample: Path, counter):
    found = stats_of(sample / "val.jsonl", counter).image_tokens
    images = {image for record in read_records(sample / "val.jsonl") for image in record.images}
    processor = ImageProcessor(sample / "model")
    assert found == Counter(int(np.prod(processor.read(image)[1])) // 4 for image in images)


def test_images_of_unknown_size_count_no_tokens_and_are_reported(tmp_path, counter):
    """Two images are missing, and the processor refuses one."""
    Image.new("RGB", (6500, 10)).save(tmp_path / "c.png")
    names = ("a.jpg", "b.jpg", "c.png")
    lines = [{"image_filename": n, "question": q, "answer": "yes"} for n in names for q in ("Is it?", "Text?")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = stats_of(tmp_path / "train.jsonl", counter)
    [file] = found.files
    assert (found.num_unknown, file.num_image_tokens) == (3, 0)
    assert "3 images of unknown size" in to_text(found)


def test_records_that_are_too_long_or_refused_are_reported(tmp_path, counter, monkeypatch):
    """Training refuses special tokens of the model's own tokenizer; those of all models are malformed records."""
    special = [*counter.chat_tokenizer.special_tokens, "<|own|>"]
    monkeypatch.setattr(counter.chat_tokenizer, "special_tokens", special)
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    texts = [("Is it?", "yes"), ("Is it? " * 300, "yes"), ("Is <|own|> it?", "yes")]
    lines = [{"image_filename": "a.png", "question": question, "answer": answer} for question, answer in texts]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = stats_of(tmp_path / "train.jsonl", counter, max_tokens=200)
    [file] = found.files
    assert file.num_records == 1
    assert [item["place"] for item in file.too_long] == ["train.jsonl:2"]
    assert [item["place"] for item in file.refused] == ["train.jsonl:3"]
    assert {finding.code: finding.level for finding in findings(found)} == {"refused": "error", "too-long": "warning"}
    assert all(item["reason"].startswith(item["place"]) for item in file.refused)


def test_the_published_tokenizer_needs_no_model_weights(real_processor: Path, real_records: Path, monkeypatch):
    monkeypatch.setattr(tokenize, "_load_tokenizer", functools.cache(tokenize._load_tokenizer))  # takes half a second
    corpus = Corpus.read([real_records], real_records.parent / "images")
    found = count_tokens(corpus, TokenCounter(real_processor), "published", BatchSection())
    assert sum(found.image_tokens.values()) == 8 and found.num_unknown == 0
    smaller = count_tokens(corpus, TokenCounter(real_processor, max_pixels=100_000), "published", BatchSection())
    assert max(smaller.image_tokens) <= 100_000 // 32**2 < min(found.image_tokens)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        TokenCounter(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        TokenCounter(tmp_path)


@given(st.dictionaries(st.integers(0, 5000), st.integers(1, 50), min_size=1))
def test_the_distribution_equals_that_of_numpy(counts):
    numbers = list(Counter(counts).elements())
    found = Distribution.of(counts)
    assert (found.max, found.mean) == (max(numbers), pytest.approx(np.mean(numbers)))
    assert found.median == np.percentile(numbers, 50, method="lower")
    assert found.p99 == np.percentile(numbers, 99, method="higher")
