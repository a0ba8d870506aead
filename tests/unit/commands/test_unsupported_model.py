"""Model types that lookonce cannot read are refused by every command that opens the model, before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cli import main
from lookonce.run.folder import RunFolder

REFUSED = "has a model of type 'qwen2_5_vl', which lookonce does not support; supported: qwen3_vl, qwen3_vl_moe"
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}


@pytest.fixture(scope="module")
def qwen2_5_vl(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL with random weights and the sample's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "qwen2_5_vl"
    shutil.copytree(sample / "model", folder)
    ours = AutoConfig.from_pretrained(folder)
    ids = {name: getattr(ours, name) for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id")}
    text = TEXT | {"vocab_size": ours.text_config.vocab_size}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=VISION | {"fullatt_block_indexes": [0]}, **ids)
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("words", ["cache plan", "cache build", "train", "status", "check", "eval", "predict"])
def test_qwen2_5_vl_is_refused_by_name_before_any_work(words, qwen2_5_vl, make_run, tmp_path):
    run = make_run(model={"path": str(qwen2_5_vl)})
    arguments = [str(tmp_path / "run.yaml")]
    Path(arguments[0]).write_text(run.to_yaml())
    if words in ("eval", "predict"):
        RunFolder(run.output).claim(run, {})
        arguments = [str(run.output), *(["--question", "Is there text?"] if words == "predict" else [])]
    result = CliRunner().invoke(main, [*words.split(), *arguments])
    said = " ".join((result.stdout + result.stderr).split())
    assert result.exit_code == 1 and REFUSED in said, said
    assert "unexpected" not in said and not list(tmp_path.glob("caches/*/"))


def test_the_mixture_of_experts_is_not_refused(sample, tmp_path):
    """It has the same tower; nothing else of it is tested."""
    shutil.copytree(sample / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["model_type"] = "qwen3_vl_moe"
    config["text_config"]["model_type"] = "qwen3_vl_moe_text"
    config["vision_config"]["model_type"] = "qwen3_vl_moe"
    path.write_text(json.dumps(config))
    assert ModelFolder.open(str(tmp_path / "model")).config.model_type == "qwen3_vl_moe"
