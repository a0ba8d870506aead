"""The adapter of a run on quantised weights in stock libraries: on weights quantised alike, and merged into others."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from support.challenge import BASE, NAME, run_script
from transformers import BitsAndBytesConfig, Qwen3VLForConditionalGeneration

from lookonce.adapter.card import BaseModel
from lookonce.adapter.challenge import task1_files
from lookonce.cli import main
from lookonce.errors import RunFolderError
from lookonce.eval.answerer import Answerer
from lookonce.eval.run import evaluate_run
from lookonce.eval.submission import SubmissionInfo
from lookonce.run.config import RunFile
from lookonce.run.records import read_split
from lookonce.workflow import train

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'lookonce[qlora]'")

FLAG = "--onto-unquantised"
IDS = torch.arange(5, 40)[None]
EXACT = 1e-5
"""The largest difference of two logits, as a share of the largest logit."""


@pytest.fixture(scope="module", params=["nf4", "int8"])
def trained(request, make_run_in, built, tmp_path_factory) -> RunFile:
    run = make_run_in(
        tmp_path_factory.mktemp("quantised"),
        cache={"dir": str(built.folder.parent)},
        lora={"rank": 16, "alpha": 32},
        train={"steps": 80, "frozen": request.param, "learning_rate": 5e-3, "logging_steps": 50},
    )
    train(run, notify=lambda note: None)
    return run


def lookonce(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def stock(folder: Path, **options: Any) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, **options)


def test_the_merged_model_is_the_adapter_on_the_unquantised_one(trained, sample, tmp_path):
    """In stock transformers and PEFT, which know nothing of the run's quantised weights."""
    refused = lookonce("adapter", "merge", trained.output, tmp_path / "merged", "--dtype", "fp32")
    assert refused.exit_code == 2 and not (tmp_path / "merged").exists() and "Traceback" not in refused.output
    [line] = [line for line in refused.stderr.splitlines() if line.endswith(FLAG)]
    command = shlex.split(line.rpartition(": ")[2])
    assert command == ["lookonce", "adapter", "merge", str(trained.output), str(tmp_path / "merged"), FLAG]

    done = lookonce(*command[1:], "--dtype", "fp32", "--json")
    assert done.exit_code == 0, done.output
    model, adapter = sample / "model", trained.output / "adapter"
    before, found = logits(stock(model)), logits(stock(tmp_path / "merged"))
    expected = logits(PeftModel.from_pretrained(stock(model), str(adapter)))
    scale = expected.abs().max()
    assert (found - expected).abs().max() <= EXACT * scale
    assert (before - expected).abs().max() > 1e-2 * scale
    assert json.loads(done.stdout)["rounding"] == 0


def test_what_the_adapter_does_not_change_keeps_the_values_of_the_unquantised_model(trained, sample, tmp_path):
    """So nothing that was rounded while it was trained gets into the files."""
    done = lookonce("adapter", "merge", trained.output, tmp_path / "merged", FLAG, "--json")
    assert done.exit_code == 0, done.output
    value, old, new = (
        json.loads(done.stdout),
        *(load_file(one / "model.safetensors") for one in (sample / "model", tmp_path / "merged")),
    )
    assert old.keys() == new.keys()
    changed = {name for name, tensor in new.items() if not torch.equal(tensor, old[name])}
    assert 0 < len(changed) == value["num_changed"] < value["num_tensors"] == len(old)
    assert all(
        ".language_model.layers." in name and tensor.is_floating_point()
        for name, tensor in new.items()
        if name in changed
    )


NUM_ASKED = 12
"""Number of questions that the stock model is asked; it runs its tower for each."""
DOCUMENTED = {
    "nf4": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", "model.visual"],
    ),
    "int8": BitsAndBytesConfig(
        load_in_8bit=True, llm_int8_threshold=0.0, llm_int8_skip_modules=["lm_head", "model.visual"]
    ),
}
"""What docs/training.md tells to load."""


def predictions(run: RunFile) -> list[dict[str, Any]]:
    lines = (run.output / "predictions" / "val.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def stock_model(model: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch) -> Any:
    # On a CPU with bfloat16 bitsandbytes would compute answers in that, whatever the configuration says.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    loaded = stock(model, quantization_config=DOCUMENTED[run.train.frozen])
    return PeftModel.from_pretrained(loaded, str(run.output / "adapter")).eval()


@pytest.mark.guarantee(
    "An adapter of quantised weights gives the same answers on the stock model that is quantised in the same way."
)
def test_stock_libraries_give_the_same_answers(trained, sample, stock_processor, monkeypatch):
    asked = predictions(trained)[:NUM_ASKED]
    assert len({line["predicted"] for line in asked}) > 2
    model, processor = stock_model(sample / "model", trained, monkeypatch), stock_processor(sample / "model")
    for line in asked:
        content = [{"type": "image"}, {"type": "text", "text": line["question"]}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        with Image.open(*line["images"]) as image:
            inputs = processor(text=[text], images=[image.convert("RGB")], return_tensors="pt").to(model.device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=trained.eval.max_new_tokens)
        answer = processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == line["predicted"], line


def test_the_script_for_a_challenge_gives_the_same_answers(trained, sample, monkeypatch, tmp_path):
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    script = task1_files(trained, BaseModel(BASE, None, None), NAME, "medvqa-gi", SubmissionInfo())[
        "submission_task1.py"
    ]
    files = (sample / "model", trained.output / "adapter")
    rows = run_script(script, read_split(trained, "val"), *files, monkeypatch, tmp_path)["predictions"]
    assert [row["answer"] for row in rows] == [line["predicted"] for line in predictions(trained)]


def test_later_answers_are_computed_with_the_quantised_weights_too(trained):
    before = predictions(trained)
    (trained.output / "predictions" / "val.jsonl").unlink()
    (trained.output / "metrics" / "val.json").unlink()
    evaluate_run(trained.output, "val")
    assert [line["predicted"] for line in predictions(trained)] == [line["predicted"] for line in before]
    answerer = Answerer.open(trained.output)
    [answer] = answerer.answer(before[0]["images"], before[0]["question"])
    assert answer.text == before[0]["predicted"]


def test_a_run_goes_on_only_with_the_weights_that_it_began_with(trained):
    other = trained.model_copy(update={"train": trained.train.model_copy(update={"frozen": "precision"})})
    with pytest.raises(
        RunFolderError, match=f"run.train.frozen: this run 'precision', that one '{trained.train.frozen}'"
    ):
        train(other, resume=True, notify=lambda note: None)
