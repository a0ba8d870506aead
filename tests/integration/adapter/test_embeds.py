"""Cached features as vLLM takes them: what it would split out of the tensors is what the tower gives."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from lookonce.datasets.images import image_key
from lookonce.datasets.records import read_records


def as_vllm_splits(tensors, hidden, num_levels, merge_size):
    """Each image's merged output and DeepStack levels, by the arithmetic of vLLM's qwen3_vl.py."""
    sizes = (tensors["image_grid_thw"].prod(-1) // merge_size // merge_size).tolist()
    main, levels = torch.split(tensors["image_embeds"], [hidden, hidden * num_levels], dim=-1)
    deepstack = levels.view(len(levels), num_levels, hidden).permute(1, 0, 2)
    return main.split(sizes), deepstack.split(sizes, dim=1)


@pytest.mark.guarantee("vLLM splits exported features into the outputs of the tower, each level in its position.")
def test_vllms_arithmetic_finds_the_output_of_the_tower(built, sample, stock_processor):
    images = sorted({path for record in read_records(sample / "val.jsonl") for path in record.images})[:2]
    keys = [image_key(path) for path in images]
    tensors = {  # as docs/serving.md has it
        "image_embeds": torch.cat([one.flatten(1) for one in built.get_many(keys)]),
        "image_grid_thw": torch.tensor([built.grid_thw(key) for key in keys]),
    }
    model = AutoModelForImageTextToText.from_pretrained(sample / "model", dtype=torch.float32)
    config = model.config.vision_config
    hidden, num_levels = model.config.text_config.hidden_size, len(config.deepstack_visual_indexes)
    found = zip(*as_vllm_splits(tensors, hidden, num_levels, config.spatial_merge_size), strict=True)
    for path, (main_output, deepstack) in zip(images, found, strict=True):
        with Image.open(path) as image:
            inputs = stock_processor(sample / "model").image_processor(image.convert("RGB"), return_tensors="pt")
        with torch.no_grad():
            expected = model.model.get_image_features(**inputs)
        torch.testing.assert_close(main_output, torch.cat(tuple(expected.pooler_output)), rtol=1e-5, atol=1e-5)
        levels = torch.stack([torch.cat(level) for level in expected.deepstack_features])
        torch.testing.assert_close(deepstack, levels, rtol=1e-5, atol=1e-5)
