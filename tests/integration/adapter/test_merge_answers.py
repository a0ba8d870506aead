"""`lookonce adapter merge` of a trained run: answers of both models are counted; stock transformers gives the same."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from support.sample import stock_answer
from transformers import AutoModelForImageTextToText

from lookonce.adapter import merge
from lookonce.adapter.merge import compare, draw_questions
from lookonce.cache.store.reader import VisionCache
from lookonce.cli import main
from lookonce.errors import TrainingError
from lookonce.eval.run import evaluate_run
from lookonce.run.config import RunFile
from lookonce.run.open import FROM_CACHE, open_run
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


def lookonce(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["adapter", "merge", *map(str, arguments)])


@pytest.mark.guarantee("The answers that a merge compares are those of `lookonce eval`.")
def test_both_models_answer_as_an_evaluation_of_the_run(trained, tmp_path):
    result = lookonce(trained.output, tmp_path / "merged", "--dtype", "fp32", "--questions", "500", "--json")
    assert result.exit_code == 0, result.output
    comparison = json.loads(result.stdout)["comparison"]
    scores = json.loads((trained.output / "metrics" / "val.json").read_text())["overall"]
    assert comparison["num_questions"] == scores["num_questions"] and comparison["num_different"] == 0
    assert comparison["adapter"] == comparison["merged"] == pytest.approx(scores["exact_match"])
    assert comparison["adapter"] > 0


def test_the_second_answers_are_those_of_the_merged_folder(trained, sample):
    """Here it is the untuned model, whose score is another."""
    session = open_run(trained, FROM_CACHE)
    questions = draw_questions(session, 500)
    assert questions
    found = compare(questions, trained.output / "adapter", sample / "model")
    untuned, _ = evaluate_run(trained.output, "val", ("untuned",))
    assert found.num_different > 0 and found.merged == pytest.approx(untuned.overall.exact_match)


@pytest.mark.guarantee("Stock transformers gives the answers of a merged model without PEFT.")
def test_stock_transformers_gives_the_answers_of_the_run_without_peft(trained, tmp_path, stock_processor):
    assert lookonce(trained.output, tmp_path / "merged", "--dtype", "fp32", "--questions", "0").exit_code == 0
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    processor = stock_processor(tmp_path / "merged")
    lines = (trained.output / "predictions" / "val.jsonl").read_text().splitlines()
    for line in map(json.loads, lines[:NUM_ASKED]):
        assert stock_answer(model, processor, line, trained.eval.max_new_tokens) == line["predicted"], line


def test_the_text_says_what_changed_and_what_rounding_costs(trained, tmp_path):
    result = lookonce(trained.output, tmp_path / "merged", "--questions", "20")
    assert result.exit_code == 0, result.output
    assert "in bf16" in result.stdout and "of what the adapter changes" in result.stdout
    assert re.search(r"answers +\d+ of (1\d|20) differ \(val, in fp32\)", result.stdout)
    assert "exact match" in result.stdout and "with the adapter" in result.stdout


def test_a_comparison_that_fails_keeps_the_merged_files_for_the_next_command(trained, tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise TrainingError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(merge, "compare", fails)
        assert lookonce(trained.output, tmp_path / "merged").exit_code == 1
    assert not (tmp_path / "merged").exists()
    weights = (tmp_path / "merged.partial" / "model.safetensors").stat().st_ino
    assert lookonce(trained.output, tmp_path / "merged", "--questions", "0").exit_code == 0
    assert (tmp_path / "merged" / "model.safetensors").stat().st_ino == weights


def test_without_its_cache_a_run_is_merged_if_nothing_is_asked(trained, tmp_path):
    shutil.copytree(trained.output, tmp_path / "run")
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace(str(trained.cache.dir), str(tmp_path / "caches")))
    result = lookonce(tmp_path / "run", tmp_path / "merged")
    assert result.exit_code == 1 and "lookonce cache build" in result.stderr and "--questions 0" in result.stderr
    assert lookonce(tmp_path / "run", tmp_path / "merged", "--questions", "0").exit_code == 0


def test_a_folder_that_exists_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "merged").mkdir()
    result = lookonce(tmp_path / "no-run", tmp_path / "merged")
    assert result.exit_code == 2 and "choose another DIR" in result.stderr
