"""`lookonce adapter embeds`: what vLLM would split out of the file is what the tower gives."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from lookonce.adapter.embeds import export_embeds
from lookonce.cli import main
from lookonce.datasets.records import read_records
from lookonce.errors import FeaturesMissing, UsageError


@pytest.fixture
def images(sample):
    return sorted({path for record in read_records(sample / "val.jsonl") for path in record.images})[:2]


def as_vllm_splits(tensors, hidden, num_levels, merge_size):
    """Each image's merged output and DeepStack levels, by the arithmetic of vLLM's qwen3_vl.py."""
    sizes = (tensors["image_grid_thw"].prod(-1) // merge_size // merge_size).tolist()
    main, levels = torch.split(tensors["image_embeds"], [hidden, hidden * num_levels], dim=-1)
    deepstack = levels.view(len(levels), num_levels, hidden).permute(1, 0, 2)
    return main.split(sizes), deepstack.split(sizes, dim=1)


@pytest.mark.guarantee(
    "What vLLM splits out of exported features is the output of the tower, each level in its position."
)
def test_vllms_arithmetic_finds_the_output_of_the_tower(built, images, sample, stock_processor, tmp_path):
    done = export_embeds(built, images, tmp_path / "out.safetensors")
    tensors = load_file(tmp_path / "out.safetensors")
    model = AutoModelForImageTextToText.from_pretrained(sample / "model", dtype=torch.float32)
    config = model.config.vision_config
    hidden, num_levels = model.config.text_config.hidden_size, len(config.deepstack_visual_indexes)
    assert tensors["image_embeds"].shape == done.image_embeds == (sum(lengths(done)), hidden * (1 + num_levels))
    assert tensors["image_grid_thw"].shape == (2, 3) and tensors["image_grid_thw"].dtype == torch.int64
    found = zip(*as_vllm_splits(tensors, hidden, num_levels, config.spatial_merge_size), strict=True)
    for path, (main_output, deepstack) in zip(images, found, strict=True):
        with Image.open(path) as image:
            inputs = stock_processor(sample / "model").image_processor(image.convert("RGB"), return_tensors="pt")
        with torch.no_grad():
            expected = model.model.get_image_features(**inputs)
        torch.testing.assert_close(main_output, torch.cat(tuple(expected.pooler_output)), rtol=1e-5, atol=1e-5)
        levels = torch.stack([torch.cat(level) for level in expected.deepstack_features])
        torch.testing.assert_close(deepstack, levels, rtol=1e-5, atol=1e-5)


def lengths(done):
    return [t * h * w // 4 for t, h, w in done.image_grid_thw]


def test_the_command_says_the_shapes(built, images, make_cached_run, tmp_path):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(make_cached_run().to_yaml())
    for number, place in enumerate((run_file, built.folder)):
        target = tmp_path / f"{number}.safetensors"
        words = ["adapter", "embeds", str(place), str(images[0]), "-o", str(target), "--json"]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.stderr
        value = json.loads(result.stdout)
        assert value["image_embeds"] == list(load_file(target)["image_embeds"].shape) and value["num_levels"] > 1
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 2 and "exists; name another file with -o" in again.stderr


def test_what_cannot_be_exported_is_named(built, images, tmp_path):
    other = tmp_path / "other.png"
    Image.new("RGB", (64, 64)).save(other)
    target = tmp_path / "out.safetensors"
    with pytest.raises(FeaturesMissing, match=rf"no features of {other} \(1 image of 2\); .*lookonce cache build"):
        export_embeds(built, [images[0], other], target)
    assert not target.exists()
    target.write_text("mine")
    with pytest.raises(UsageError, match="exists; name another file"):
        export_embeds(built, images, target)
    assert target.read_text() == "mine"
