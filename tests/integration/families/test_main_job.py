"""The main job on a tiny random model of each family: plan, build, verify, train, evaluate, ask, and leave for PEFT."""

from __future__ import annotations

import json
import sys
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from support.challenge import BASE, NAME, run_script
from support.sample import stock_answer

from lookonce.adapter.card import BaseModel
from lookonce.adapter.challenge import task1_files
from lookonce.cache.maintenance.verify import verify
from lookonce.cache.model.tower import Tower
from lookonce.checks.check import check
from lookonce.eval.answerer import Answerer
from lookonce.eval.submission import SubmissionInfo
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, Needs, open_run
from lookonce.run.records import read_split
from lookonce.workflow import train

NUM_ASKED = 6
SHARED, EXPERTS = "shared", "experts"
pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(scope="module")
def trained(site, sample) -> dict[str, RunFile]:
    """A finished run on a few images, and one that trains experts."""
    data, runs = site.few(sample, 24), {}
    for name in (SHARED, EXPERTS) if site.family.experts else (SHARED,):
        batch = {"tokens_per_pack": 700}
        lora, output = {"experts": name == EXPERTS}, str(site.folder / name)
        run = site.make_run(data=data, batch=batch, lora=lora, output=output)
        inputs = open_run(run, TO_BUILD)
        inputs.write_plan()
        inputs.build()
        train(run, notify=lambda note: None)
        runs[name] = run
    return runs


def worth(question: str, answer: str, reference: str, record: Any) -> float:
    """Another reward for almost each answer."""
    return zlib.crc32(answer.encode()) % 100 / 100


@pytest.mark.guarantee(
    "Drawn tokens have the log-probabilities in training that they had in decoding, to 1e-5 in float32."
)
def test_each_family_learns_from_rewards(trained, site, sample, monkeypatch):
    """Log-probabilities in decoding are those in training; the first step, whose learning rate is 0, changes none."""
    monkeypatch.setitem(sys.modules, "worth", SimpleNamespace(worth=worth))
    start = trained[SHARED]
    changes = {"output": str(site.folder / "rewards"), "batch": {"tokens_per_pack": 700}, "data": site.few(sample, 24)}
    grpo = {"samples": 3, "max_new_tokens": 4, "reward": "worth:worth", "cut": "kept", "kl": 0.1, "iterations": 2}
    begin = {"objective": "grpo", "start_from": str(start.output), "warmup": 1, "learning_rate": 1e-2}
    run = site.make_run(lora={"experts": False}, grpo=grpo, train=begin, **changes)
    train(run, notify=lambda note: None)
    logged = [line for line in lines(run, "log.jsonl") if "clipped_share" in line]
    near = 1e-4 if "linear_attention" in site.family.layer_types else 1e-5
    assert len(logged) == 4 and all(line["log_prob_distance"] < near for line in logged[::2]), logged
    assert logged[1]["kl"] < 1e-7 < logged[3]["kl"] and logged[1]["clipped_share"] == 0


def lines(run: RunFile, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.output / name).read_text().splitlines()]


def test_the_cache_is_whole(trained):
    [folder] = [path for path in trained[SHARED].cache.dir.iterdir() if (path / "plan.json").exists()]
    assert verify(folder).problems == []


@pytest.mark.guarantee(
    "In each family of models, the adapter gives the same answers on the stock model with its tower."
)
def test_answers_are_those_of_stock_libraries_with_the_tower(trained, site, stock_processor):
    """With PEFT's adapter on the stock model, and `generate`."""
    for run in trained.values():
        assert_stock_answers(run, site, stock_processor(site.model))


def assert_stock_answers(run: RunFile, site: Any, processor: Any) -> None:
    stock = transformers.AutoModelForImageTextToText.from_pretrained(site.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(stock, str(run.output / "adapter")).eval()
    adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
    written = load_file(run.output / "adapter" / "adapter_model.safetensors")
    assert {name.replace(".default.", ".") for name in adapted} == written.keys()
    assert any(".experts." in name for name in written) == run.lora.experts
    asked = lines(run, "predictions/val.jsonl")[::4]
    assert len(asked) == NUM_ASKED
    for line in asked:
        answer = stock_answer(model, processor, line, run.eval.max_new_tokens)
        assert answer == line["predicted"], line


@pytest.mark.guarantee("An exported script answers as the run in each family of models.")
def test_the_script_for_a_challenge_gives_the_same_answers(trained, site, monkeypatch, tmp_path):
    for run in trained.values():
        base = BaseModel(BASE, None, None)
        script = task1_files(run, base, NAME, "medvqa-gi", SubmissionInfo())["submission_task1.py"]
        written = run_script(script, read_split(run, "val"), site.model, run.output / "adapter", monkeypatch, tmp_path)
        answers = [line["predicted"] for line in lines(run, "predictions/val.jsonl")]
        assert [row["answer"] for row in written["predictions"]] == answers and len(answers) == 24


def test_questions_are_answered_afterwards_with_either_engine(trained):
    run = trained[SHARED]
    line = lines(run, "predictions/val.jsonl")[0]
    [answer] = Answerer.open(run.output).answer(line["images"], line["question"])
    assert answer.text == line["predicted"]
    other = run.model_copy(update={"eval": run.eval.model_copy(update={"engine": "generate"})})
    answerer = Answerer(open_run(other, Needs("tests", model="open")), run.output / "adapter")
    assert answerer.answer(line["images"], line["question"])[0].text == line["predicted"]


def test_a_check_finds_nothing_wrong_and_says_what_has_no_lora_weights(trained, site):
    (site.folder / "run.yaml").write_text(trained[SHARED].to_yaml())
    found = check(site.folder / "run.yaml").results
    assert [result for result in found if result.level == "error"] == []
    [adapter] = [result.value for result in found if result.what == "adapter"]
    is_hybrid, has_experts = "linear_attention" in site.family.layer_types, bool(site.family.experts)
    assert ("no LoRA weights for" in adapter) == (is_hybrid or has_experts), adapter
    assert (" mlp.experts.down_proj" in adapter) == (has_experts and not is_hybrid), "the first four are named"
    assert (" linear_attn.conv1d.weight" in adapter) == is_hybrid, adapter
    assert ("; lora.experts: true includes the experts" in adapter) == has_experts, adapter


def test_the_fast_tower_agrees_with_the_stock_one(trained):
    """Several images of different sizes at once, and each alone with the stock tower."""
    model_folder = open_run(trained[SHARED], Needs("tests", model="open")).model_folder
    grids = [(1, 4, 6), (1, 8, 4), (1, 2, 2), (1, 8, 10)]
    vision = model_folder.vision_config
    dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = torch.randn(sum(h * w for _, h, w in grids), dim, generator=torch.Generator().manual_seed(0))
    fast, stock = Tower(model_folder, torch.float32, fast=True), Tower(model_folder, torch.float32)
    pieces = torch.split(patches, [h * w for _, h, w in grids])
    expected = torch.cat([stock.encode(piece, [grid]) for piece, grid in zip(pieces, grids, strict=True)])
    assert (fast.encode(patches, grids) - expected).norm() < 1e-5 * expected.norm()
