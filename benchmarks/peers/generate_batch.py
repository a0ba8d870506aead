"""Try transformers' continuous batching (`generate_batch`) on the questions of make_data.py, and measure it.

    python benchmarks/peers/generate_batch.py --model 2b --out generate-batch-2b.json

`generate_batch` takes token ids alone, no pixels. So two things are tried. Prompts with an image: what the model says
to image tokens without pixels is written down. And prompts of the same lengths in which other tokens stand for those of
the image, the same for all questions about an image: what it would take without the tower, with the cache of prefixes
that it has (blocks of 256 tokens). Random weights seldom give an end token, so answers have all `--new-tokens`.
"""

from __future__ import annotations

import json
import random
import time
import traceback
from typing import Any

import torch
from measure import arguments, read
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, ContinuousBatchingConfig, GenerationConfig


def main() -> None:
    given = arguments(__doc__, numbers={"new-tokens": 32, "compile": 0})
    processor = AutoProcessor.from_pretrained(given.folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(
        given.folder, dtype=torch.bfloat16, attn_implementation=given.attention
    )
    model = model.to(device).eval()
    records = read(given)
    prompts = [prompt(processor, record) for record in records]
    image_token = model.config.image_token_id
    found: dict[str, Any] = {"model": given.model, "questions": len(records), "attention": given.attention}
    try:
        answers, _ = answer(model, prompts[:4], given)
        found["with image tokens"] = f"{sum(map(bool, answers))} of {len(answers)} answered, without pixels"
    except Exception:
        found["with image tokens"] = traceback.format_exc(limit=-3)
    texts = [
        as_text(ids, image_token, record["image"], processor.tokenizer.vocab_size)
        for ids, record in zip(prompts, records, strict=True)
    ]
    for name, sharing in (("sharing prefixes", True), ("not sharing", False)):
        try:
            answer(model, texts[:64], given, sharing)  # warms up
            answers, seconds = answer(model, texts, given, sharing)
            tokens = [len(one) for one in answers]
            found[name] = {"ms_per_question": 1e3 * seconds / len(texts), "new_tokens": sum(tokens) / len(tokens)}
        except Exception:
            found[name] = traceback.format_exc(limit=-3)
    found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def prompt(processor: Any, record: dict[str, str]) -> list[int]:
    """The token ids of a question, with those of its image."""
    content = [{"type": "image"}, {"type": "text", "text": record["question"]}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.open(record["image"]).convert("RGB")])
    return [int(token) for token in inputs["input_ids"][0]]


def as_text(ids: list[int], image_token: int, image: str, num_words: int) -> list[int]:
    """The prompt with other tokens in place of those of the image; each image has tokens of its own."""
    rng = random.Random(image)
    return [rng.randrange(num_words) if token == image_token else token for token in ids]


def answer(model: Any, prompts: list[list[int]], given: Any, sharing: bool = True) -> tuple[list[list[int]], float]:
    """The tokens of the answers, and the seconds that they took."""
    config = GenerationConfig(max_new_tokens=given.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = {} if torch.cuda.is_available() else {"num_blocks": 64, "max_batch_tokens": 256}  # else all memory is taken
    settings = ContinuousBatchingConfig(allow_block_sharing=sharing, default_compile_level=given.compile, **small)
    start = time.perf_counter()
    outputs = model.generate_batch(prompts, config, settings)
    seconds = time.perf_counter() - start
    if len(outputs) < len(prompts):
        raise RuntimeError(f"{len(outputs)} of {len(prompts)} prompts were answered")
    if failed := [output.error for output in outputs.values() if output.error]:
        raise RuntimeError(f"{len(failed)} of {len(prompts)} failed: {failed[0]}")
    return [output.generated_tokens for output in outputs.values()], seconds


if __name__ == "__main__":
    main()
