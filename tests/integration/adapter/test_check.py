"""`lookonce adapter check` on adapters that PEFT has written: output, exit codes, errors."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image
from support.answers import look_trained
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cli import main
from lookonce.datasets.sample.model import write_model
from lookonce.families.lookup import FAMILIES
from lookonce.run.config import RunFile, read_run_file
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_BUILD, Needs, open_run


@pytest.fixture
def trained(make_run: Callable[..., RunFile], random_lora: Any) -> Callable[..., Path]:
    def make(sections: dict[str, Any] | None = None, **lora: Any) -> Path:
        run = make_run(lora=lora, **sections or {})
        folder = RunFolder(run.output)
        folder.claim(run, {})
        random_lora(open_run(run, Needs("tests", model="open"))).save_pretrained(str(folder.adapter))
        look_trained(folder)
        return folder.folder

    return make


def check(run: Path, *options: str) -> Any:
    return CliRunner().invoke(main, ["adapter", "check", str(run), *options])


@pytest.mark.parametrize("lora", [{"rslora": True}, {"targets": "all-linear"}], ids=str)
def test_an_adapter_of_linear_layers_passes_and_gets_its_command(trained, lora):
    result = check(trained(**lora))
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.stdout and "vllm serve" in result.stdout and "--max-lora-rank 8" in result.stdout


@pytest.mark.parametrize(
    ("published", "limits"),
    [
        (False, {"max_pixels": 12_000}),
        (False, {"min_pixels": 9_000, "max_pixels": 9_500}),
        (True, {"min_pixels": 400_000}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("one_tower", "no_fsync")
def test_the_command_gives_images_as_many_tokens_as_the_cache(trained, sample, tmp_path, request, published, limits):
    """The options go to the stock processor as vLLM passes them to it."""
    model = shutil.copytree(sample / "model", tmp_path / "model")
    if published:
        real = request.getfixturevalue("real_processor") / "preprocessor_config.json"
        shutil.copy(real, model / "preprocessor_config.json")
    sizes = [(64, 48), (330, 200), (90, 700), (31, 33)]
    for number, size in enumerate(sizes):
        Image.effect_noise(size, 90).convert("RGB").save(tmp_path / f"{number}.png")
    rows = [{"image": f"{number}.png", "question": "Is it?", "answer": "yes"} for number in range(len(sizes))]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"train": str(tmp_path / "records.jsonl"), "val": [], "test": []}
    run = trained({"model": {"path": str(model)}, "cache": limits, "data": data})
    assert CliRunner().invoke(main, ["cache", "build", str(run / "run.yaml")]).exit_code == 0
    words = shlex.split(json.loads(check(run, "--for", "vllm", "--json").stdout)["command"])
    options = json.loads(words[words.index("--mm-processor-kwargs") + 1])
    assert options.keys() == {"size"}
    stock = Qwen2VLImageProcessorPil.from_pretrained(model)
    inputs = open_run(read_run_file(run / "run.yaml"), TO_BUILD)
    cache = inputs.open_cache()
    for path, key in inputs.images.key_of.items():
        with Image.open(path) as image:
            grid = stock(images=[image], **options, return_tensors="pt")["image_grid_thw"][0].tolist()
        assert tuple(grid) == cache.grid_thw(key), path


@pytest.mark.parametrize(
    ("family", "lora", "ignored"),
    [
        ("qwen3_5", {}, ["all LoRA weights of Qwen3.5, which has linear attention"]),
        ("qwen3_vl_moe", {"experts": True}, ["the LoRA weights of experts"]),
        ("qwen3_vl_moe", {}, []),
    ],
)
def test_adapters_that_vllm_was_reported_to_ignore_have_a_warning(trained, tmp_path, family, lora, ignored):
    write_model(tmp_path / "model", family=FAMILIES[family])
    result = check(trained({"model": {"path": str(tmp_path / "model")}}, **lora))
    warnings = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(ignored)
    for line, what in zip(warnings, ignored, strict=True):
        assert f"ignore {what}, without a message (https://github.com/vllm-project/vllm/" in line


@pytest.mark.parametrize("lora", [{"modules_to_save": ["embed_tokens"]}, {"targets": ["q_proj", "lm_head"]}], ids=str)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_one_of_embeddings_fails_with_the_way(trained, lora):
    result = check(trained(**lora), "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and not found["passed"]
    assert any(not rule["passed"] and rule["source"].startswith("https://") for rule in found["rules"])
