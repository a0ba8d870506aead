"""`lookonce adapter check` on adapters that PEFT has written: output, exit codes, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.answers import look_trained

from lookonce.cli import main
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.inputs import RunInputs


@pytest.fixture
def trained(make_run: Callable[..., RunFile], random_lora: Any) -> Callable[..., Path]:
    def make(**lora: Any) -> Path:
        run = make_run(lora=lora)
        folder = RunFolder(run.output)
        folder.claim(run, {})
        random_lora(RunInputs.of_model(run)).save_pretrained(str(folder.adapter))
        look_trained(folder)
        return folder.folder

    return make


def check(run: Path, *options: str) -> Any:
    return CliRunner().invoke(main, ["adapter", "check", str(run), "--for", "vllm", *options])


@pytest.mark.parametrize("lora", [{}, {"rslora": True}, {"targets": "all-linear"}], ids=str)
def test_an_adapter_of_linear_layers_passes_and_gets_its_command(trained, lora):
    result = check(trained(**lora))
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.stdout and "vllm serve" in result.stdout and "--max-lora-rank 8" in result.stdout


@pytest.mark.parametrize("lora", [{"modules_to_save": ["embed_tokens"]}, {"targets": ["q_proj", "lm_head"]}], ids=str)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_one_of_embeddings_fails_with_the_way(trained, lora):
    result = check(trained(**lora), "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and not found["passed"]
    assert any(not rule["passed"] and rule["source"].startswith("https://") for rule in found["rules"])


def test_a_broken_adapter_is_named(trained):
    run = trained()
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"\x00" * 4)
    result = check(run)
    assert result.exit_code == 1 and "replaced: adapter_model.safetensors" in result.stderr
