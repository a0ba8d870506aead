"""The sample's model and tokenizer are shaped like Qwen3-VL's."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from lookonce.datasets.sample.model import SPECIAL_TOKENS, random_model, write_model
from lookonce.datasets.sample.scene import DEFAULT_SEED, SIZES, draw, make_scenes
from lookonce.families.lookup import FAMILIES

OTHER_SEED = DEFAULT_SEED + 1


@pytest.fixture(scope="module")
def tokenizer(sample):
    return AutoTokenizer.from_pretrained(sample / "model")


@pytest.mark.parametrize("seed", [DEFAULT_SEED, OTHER_SEED])
def test_the_seed_decides_the_weights(sample, seed):
    written = load_file(sample / "model" / "model.safetensors")
    drawn = random_model(AutoConfig.from_pretrained(sample / "model"), seed, torch.float32).state_dict()
    assert written.keys() == drawn.keys()
    matrices = [name for name, weight in written.items() if weight.ndim > 1]
    assert {torch.equal(written[name], drawn[name]) for name in matrices} == {seed == DEFAULT_SEED}


TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "eos_token_id": "<|im_end|>",
    "pad_token_id": "<|endoftext|>",
}


def test_special_tokens_end_the_vocabulary_and_the_configuration_names_them(sample, tokenizer):
    config = AutoConfig.from_pretrained(sample / "model")
    assert {name: tokenizer.convert_ids_to_tokens(getattr(config, name)) for name in TOKENS} == TOKENS
    assert all(len(tokenizer.encode(token)) == 1 for token in TOKENS.values())
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(len(tokenizer) - len(SPECIAL_TOKENS), len(tokenizer)))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_special_tokens_are_those_of_qwen_in_its_order(real_processor):
    published = json.loads((real_processor / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    in_order = [published[number]["content"] for number in sorted(published, key=int)]
    assert tuple(in_order[: len(SPECIAL_TOKENS)]) == SPECIAL_TOKENS


def test_a_tokenizer_of_the_older_files_is_the_same_in_a_family_that_does_not_read_them(real_processor, tmp_path):
    write_model(tmp_path / "model", tokenizer=real_processor, family=FAMILIES["qwen3_5"])
    published, copied = (AutoTokenizer.from_pretrained(folder) for folder in (real_processor, tmp_path / "model"))
    text = "Is there a polyp?<|vision_start|><|image_pad|>"
    assert not (real_processor / "tokenizer.json").exists()
    assert copied.encode(text) == published.encode(text) and copied.get_vocab() == published.get_vocab()


@pytest.mark.parametrize(
    "text", ["Is there text?", "Où ? 漢字 🙂", " two  blanks\n\n\tand line ends\r\n", "it's 12,345"]
)
def test_any_text_survives_the_tokenizer(sample, text):
    tokenizer = Tokenizer.from_file(str(sample / "model" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_renders_turns_like_that_of_qwen(tokenizer):
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is there text?"}]}
    messages = [{"role": "system", "content": "Be brief."}, user]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Is there text?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_stock_transformers_loads_the_model_with_three_deepstack_levels(sample):
    model, loaded = Qwen3VLForConditionalGeneration.from_pretrained(sample / "model", output_loading_info=True)
    assert not any(loaded.values())
    processor = Qwen2VLImageProcessorPil.from_pretrained(sample / "model")
    inputs = processor(images=[draw(next(iter(make_scenes(DEFAULT_SEED))))], return_tensors="pt")
    with torch.no_grad():
        seen = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    num_tokens = int(inputs["image_grid_thw"].prod()) // 4
    levels = [seen.pooler_output, *seen.deepstack_features]
    assert [level.shape for level in levels] == [(num_tokens, model.config.text_config.hidden_size)] * 4
    assert all(not torch.allclose(one, other) for one, other in zip(levels, levels[1:], strict=False))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_frame_of_any_size_has_about_twenty_image_tokens(sample, size):
    processor = Qwen2VLImageProcessorPil.from_pretrained(sample / "model")
    grid = processor(images=[Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"]
    assert 18 <= int(grid.prod()) // 4 <= 25
