"""A run on quantised weights: stock libraries load its adapter on weights quantised in the same way, and agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import BitsAndBytesConfig, Qwen3VLForConditionalGeneration

from lookonce.errors import RunFolderError
from lookonce.eval.answerer import Answerer
from lookonce.eval.run import evaluate_run
from lookonce.run.config import RunFile
from lookonce.workflow import train

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'lookonce[qlora]'")

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
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(
        model, dtype=torch.float32, quantization_config=DOCUMENTED[run.train.frozen]
    )
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
