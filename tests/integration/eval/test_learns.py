"""The sample run: the adapter learns, it uses the images, and stock libraries get the same answers from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from support.sample import stock_answer
from transformers import Qwen3VLForConditionalGeneration

from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.records import read_records
from lookonce.eval.asking.answerer import Answerer
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.headline import Baseline
from lookonce.eval.scores.metrics import Score
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.status.summary import Summary
from lookonce.workflow.train import train

SPLITS = ("val", "test")
NUM_ASKED = 40
"""Number of questions that the stock model is asked; it runs its tower for each."""


@pytest.fixture(scope="module")
def trained(root: Path, sample: Path, built: VisionCache, tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """The trained run of `experiments/sample.yaml`; only its paths are changed."""
    folder = tmp_path_factory.mktemp("trained")
    values = yaml.safe_load((root / "experiments" / "sample.yaml").read_text())
    values["model"] |= {"path": str(sample / "model")}
    values["data"] = {split: str(sample / f"{split}.jsonl") for split in ("train", *SPLITS)}
    values["cache"] |= {"dir": str(built.folder.parent)}
    run = RunFile.model_validate(values | {"output": str(folder / "run")})
    train(run, notify=lambda note: None)
    return run


def scores(run: RunFile, *baselines: Baseline) -> Score:
    """The scores of both held-out splits together."""
    found = [evaluate_run(run.output, split, baselines)[0].overall for split in SPLITS]
    total = sum(score.num_questions for score in found)

    def mean(name: str) -> float:
        return sum(getattr(score, name) * score.num_questions for score in found) / total

    return Score(total, mean("exact_match"), mean("majority"))


def test_it_beats_the_majority_baseline_on_held_out_images(trained):
    score = scores(trained)
    assert score.exact_match >= score.majority + 0.20


def test_with_other_images_accuracy_falls_to_the_majority_baseline(trained):
    score = scores(trained, "shuffled")
    assert score.exact_match <= score.majority + 0.05


def test_stock_peft_on_the_stock_model_gives_the_same_answers(trained, sample, stock_processor):
    evaluate_run(trained.output, "test")
    lines = (trained.output / "predictions" / "test.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines][-NUM_ASKED:]
    model = Qwen3VLForConditionalGeneration.from_pretrained(sample / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(trained.output / "adapter")).eval()
    processor = stock_processor(sample / "model")
    for line in asked:
        answer = stock_answer(model, processor, line, trained.eval.max_new_tokens)
        assert answer == line["predicted"], line


def test_predict_gives_the_answer_of_the_evaluation(trained):
    lines = (trained.output / "predictions" / "val.jsonl").read_text().splitlines()
    line = json.loads(lines[0])
    [answer] = Answerer.open(trained.output).answer(line["images"], line["question"])
    assert answer.text == line["predicted"]


def test_the_summary_has_the_figures_of_the_run(trained, sample):
    summary = Summary.read(RunFolder(trained.output))
    num_records = len(read_records(sample / "train.jsonl"))
    assert (summary.num_files, summary.num_distinct) == (66, 64)
    assert summary.num_samples == num_records * trained.train.epochs
    text = summary.text()
    for words in ("66 files, 64 distinct", "exact match", "majority", "adapter"):
        assert words in text
    assert Path(summary.adapter, "adapter_config.json").exists()
    assert f"lookonce predict {trained.output} --image " in summary.next_command
