"""Measure transformers' continuous batching (`generate_batch`) on the questions of make_data.py.

    python benchmarks/peers/generate_batch.py --model 2b --steps 10 --attention flash_attention_2 --out batch-2b.json

`generate_batch` takes token ids alone, no pixels. So two things are tried. Prompts with an image: what the model says
to image tokens without pixels is written down. And prompts of the same lengths in which other tokens stand for those of
the image, the same for all questions about an image: what it would take without the tower.

It is used as its documentation says: with flash-attn 2 or 3, whose kernel reads the cache's blocks, and a manager that
is kept, so that its CUDA graphs are captured before the clock starts. It shares prefixes in whole blocks of 256 tokens,
and only with requests of earlier batches. So the questions are also asked in two calls, the first one about each image
before all others. `paged|sdpa` has no such kernel: it copies the keys of all running requests together in every layer
and multiplies each query with all of them under a dense mask, which for 400 running questions of the 8B is 400 times
the products. Random weights seldom give an end token, so answers have all `--new-tokens`.
"""

from __future__ import annotations

import json
import random
import time
import traceback
from typing import Any

import torch
from measure import arguments, read, versions, write
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, ContinuousBatchingConfig, GenerationConfig

ON_CPU = {"num_blocks": 64, "max_batch_tokens": 256}
"""Else all memory is taken."""


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
    found: dict[str, Any] = {
        "tool": "generate_batch",
        "versions": versions(),
        "model": given.model,
        "questions": len(records),
        "tokens_of_a_prompt": sum(map(len, prompts)) / len(prompts),
        "attention": given.attention,
    }

    def stand_ins(number: int) -> list[list[int]]:
        """All prompts with other tokens for those of images; each number has its own, so nothing is shared between."""
        num_words, image_token = processor.tokenizer.vocab_size, model.config.image_token_id
        return [
            as_text(ids, image_token, f"{number} {record['image']}", num_words)
            for ids, record in zip(prompts, records, strict=True)
        ]

    def measure(name: str, sharing: bool, calls: list[list[int]]) -> None:
        """Ask everything, in calls of some of the questions each, after the same with other stand-ins."""
        try:
            for number in range(2):
                texts = stand_ins(number)
                start = time.perf_counter()
                answers = [
                    answer for call in calls for answer in ask(model, [texts[one] for one in call], given, sharing)
                ]
                seconds = time.perf_counter() - start
            tokens = sum(map(len, answers)) / len(answers)
            found[name] = {"ms_per_question": 1e3 * seconds / len(answers), "new_tokens": tokens}
        except Exception:
            found[name] = traceback.format_exc(limit=-3)
        model.destroy_cached_continuous_batching_manager()
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
        write(given, found)

    everything = [*range(len(records))]
    first = [*{record["image"]: number for number, record in reversed([*enumerate(records)])}.values()]
    measure("sharing prefixes", True, [everything])
    measure("sharing prefixes, the first question about each image before the others", True, split(everything, first))
    measure("not sharing", False, [everything])
    try:
        answers = ask(model, prompts[:4], given)
        found["with image tokens"] = f"{sum(map(bool, answers))} of {len(answers)} answered, without pixels"
    except Exception:
        found["with image tokens"] = traceback.format_exc(limit=-3)
    write(given, found)
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


def split(numbers: list[int], first: list[int]) -> list[list[int]]:
    """Some numbers, and then the others, if there are any."""
    return [part for part in (sorted(first), sorted({*numbers} - {*first})) if part]


def ask(model: Any, prompts: list[list[int]], given: Any, sharing: bool = True) -> list[list[int]]:
    """The tokens of the answers; the model keeps its manager, with captured graphs and the keys of prefixes."""
    config = GenerationConfig(max_new_tokens=given.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = {} if torch.cuda.is_available() else ON_CPU
    settings = ContinuousBatchingConfig(allow_block_sharing=sharing, default_compile_level=given.compile, **small)
    outputs = model.generate_batch(prompts, config, settings, persistent_manager=True)
    if len(outputs) < len(prompts):
        raise RuntimeError(f"{len(outputs)} of {len(prompts)} prompts were answered")
    if failed := [output.error for output in outputs.values() if output.error]:
        raise RuntimeError(f"{len(failed)} of {len(prompts)} failed: {failed[0]}")
    return [output.generated_tokens for output in outputs.values()]


if __name__ == "__main__":
    main()
