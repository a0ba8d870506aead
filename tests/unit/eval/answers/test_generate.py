"""Greedy answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.engines import greedy_answers
from lookonce.train.data.batches import CachedFeatures, RowCollator
from lookonce.train.data.tokenize import ChatTokenizer
from lookonce.train.model.load import load_without_tower


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
