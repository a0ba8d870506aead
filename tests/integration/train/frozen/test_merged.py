"""The adapter of a run on quantised weights, merged into the unquantised ones: the sum is exact, the answers differ."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Qwen3VLForConditionalGeneration

from lookonce.cli import main

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'lookonce[qlora]'")

FLAG = "--onto-unquantised"
IDS = torch.arange(5, 40)[None]
EXACT = 1e-5
"""The largest difference of two logits, as a share of the largest logit."""


def lookonce(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def stock(folder: Path) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


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
