"""Greedy answers, and shuffled images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record, Turn
from lookonce.errors import UsageError
from lookonce.eval.answers.generate import greedy_answers, shuffle_images
from lookonce.train.data.collate_rows import RowCollator
from lookonce.train.data.features import CachedFeatures
from lookonce.train.data.tokenize import ChatTokenizer
from lookonce.train.model.load import load_without_tower


def index(num_images: int) -> ImageIndex:
    """An index with two files per image, which have the same bytes."""
    key_of = {Path(f"{number}{suffix}.jpg"): str(number) for number in range(num_images) for suffix in ("", "-copy")}
    return ImageIndex(key_of, {key: path for path, key in key_of.items()})


@pytest.mark.parametrize("num_images", [2, 3, 10])
def test_every_shuffled_image_has_other_content(num_images):
    images = index(num_images)
    records = [Record((path,), (Turn("q", str(path)),), origin=str(path)) for path in images.key_of]
    shuffled = shuffle_images(records, images)
    pairs = list(zip(records, shuffled, strict=True))
    assert all(images.key_of[a.images[0]] != images.key_of[b.images[0]] for a, b in pairs)
    assert {images.key_of[r.images[0]] for r in shuffled} == set(images.path_of)
    assert all((a.turns, a.origin) == (b.turns, b.origin) for a, b in pairs)


def test_one_image_cannot_be_shuffled():
    images = index(1)
    with pytest.raises(UsageError, match="at least two distinct images, and these records have 1"):
        shuffle_images([Record((path,), (Turn("q", "a"),)) for path in images.key_of], images)


def test_answers_are_greedy_whatever_the_models_generation_settings(built, sample, make_run, tmp_path):
    shutil.copytree(sample / "model", tmp_path / "model")
    settings = {"repetition_penalty": 50.0, "do_sample": True, "temperature": 9.0, "no_repeat_ngram_size": 1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    answers = []
    for folder in (sample / "model", tmp_path / "model"):
        model_folder = ModelFolder.open(str(folder))
        chat_tokenizer = ChatTokenizer(folder, model_folder.config)
        key = min(built.keys())
        record = Record((Path("a"),), (Turn("Is there text?", "yes"),))
        question = chat_tokenizer.question(record, 0, [key], [built.grid_thw(key)])
        collator = RowCollator(
            CachedFeatures(built), chat_tokenizer.image_token_id, chat_tokenizer.tokenizer.pad_token_id
        )
        model = load_without_tower(model_folder, torch.float32)
        answers.append(greedy_answers(model, chat_tokenizer.tokenizer, collator, [question], 12, "fp32"))
    assert answers[0] == answers[1] and answers[0][0].text and answers[0][0].logprob < 0
