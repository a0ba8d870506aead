"""`lookonce adapter merge` of a trained run: stock transformers gives its answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from click.testing import CliRunner
from support.sample import stock_answer
from transformers import AutoModelForImageTextToText

from lookonce.cache.store.reader import VisionCache
from lookonce.cli import main
from lookonce.eval.run import evaluate_run
from lookonce.run.config import RunFile
from lookonce.workflow import train

NUM_ASKED = 8


@pytest.fixture(scope="module")
def trained(
    built: VisionCache, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory
) -> RunFile:
    """A run of a few steps with all validation questions answered, and embeddings trained in full."""
    run = make_run_in(
        tmp_path_factory.mktemp("trained"),
        cache={"dir": str(built.folder.parent)},
        lora={"modules_to_save": ["embed_tokens"], "rank": 32, "alpha": 64},
        train={"steps": 30, "learning_rate": 2.5e-3},
    )
    train(run, notify=lambda note: None)
    evaluate_run(run.output, "val")
    return run


@pytest.mark.guarantee("Stock transformers gives the answers of a merged model without PEFT.")
def test_stock_transformers_gives_the_answers_of_the_run_without_peft(trained, tmp_path, stock_processor):
    words = ["adapter", "merge", str(trained.output), str(tmp_path / "merged"), "--dtype", "fp32"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0 and "in fp32" in result.stdout and "0.00% of what the adapter changes" in result.stdout
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    processor = stock_processor(tmp_path / "merged")
    lines = (trained.output / "predictions" / "val.jsonl").read_text().splitlines()
    for line in map(json.loads, lines[:NUM_ASKED]):
        assert stock_answer(model, processor, line, trained.eval.max_new_tokens) == line["predicted"], line
