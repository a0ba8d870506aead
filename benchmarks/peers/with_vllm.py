"""Measure vLLM's answers, with prefix caching, to the questions of make_data.py.

    python benchmarks/peers/with_vllm.py --model 2b --steps 10 --out vllm-2b.json
    python benchmarks/peers/with_vllm.py --model 2b --steps 10 --no-caching --out vllm-uncached-2b.json

Written from vLLM's documentation and read beside the code of 0.33.0; it has not been run where this was written. The
image comes first in each prompt, so all questions about it share its prefix. vLLM hashes blocks of 16 tokens, with the
hash of the image where a block has tokens of it, and enters a block when it is planned. So questions share an image's
keys also within one batch, and the tower sees the image once. Each image is opened once and named by its path
(`multi_modal_uuids`), so that vLLM neither hashes nor processes it again. `max_num_batched_tokens` is above 8,192, as
recommended for throughput.

The time is that of all questions, from pixels: decoding, processing, the tower, prompts and answers. `shared` of
`benchmarks/answers.py` reads features that `cache build` computed before. Before the clock starts, the same questions
are answered about mirrored images. Random weights seldom give an end token, so it is ignored.
"""

from __future__ import annotations

import json
import time
from typing import Any

from measure import arguments, read, versions, write
from PIL import Image, ImageOps
from transformers import AutoProcessor
from vllm import LLM, SamplingParams

LONGEST = 4096
"""Tokens of a prompt and its answer; the largest image has fewer than 1,400."""


def main() -> None:
    given = arguments(__doc__, numbers={"new-tokens": 32, "batch-tokens": 16384, "running": 1024}, caching=True)
    records = read(given)
    processor = AutoProcessor.from_pretrained(given.folder)
    texts = [prompt(processor, record["question"]) for record in records]
    start = time.perf_counter()
    llm = LLM(
        model=str(given.folder),
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_num_batched_tokens=given.batch_tokens,
        max_num_seqs=given.running,
        enable_prefix_caching=given.caching,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )
    seconds_to_load = time.perf_counter() - start
    sampling = SamplingParams(temperature=0.0, max_tokens=given.new_tokens, ignore_eos=True)
    llm.generate(requests(records, texts, mirrored=True), sampling, use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(requests(records, texts), sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    found = {
        "tool": "vLLM",
        "versions": versions("vllm"),
        "model": given.model,
        "questions": len(records),
        "images": len({record["image"] for record in records}),
        "settings": {name: getattr(given, name) for name in ("batch_tokens", "running", "caching")},
        "ms_per_question": 1e3 * seconds / len(records),
        "new_tokens": sum(len(output.outputs[0].token_ids) for output in outputs) / len(outputs),
        "tokens_of_a_prompt": num_prompt_tokens / len(outputs),
        "share_of_prompts_from_cache": sum(output.num_cached_tokens or 0 for output in outputs) / num_prompt_tokens,
        "seconds_to_load": seconds_to_load,
    }
    write(given, found)
    print(json.dumps(found))


def prompt(processor: Any, question: str) -> str:
    """The text of a question, with one token in place of those of its image, which vLLM repeats."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))


def requests(records: list[dict[str, str]], texts: list[str], mirrored: bool = False) -> list[dict[str, Any]]:
    """What `LLM.generate` takes. Records about an image share what is decoded of it."""
    images = {}
    for path in dict.fromkeys(record["image"] for record in records):
        image = Image.open(path).convert("RGB")
        images[path] = ImageOps.mirror(image) if mirrored else image
    return [
        {
            "prompt": text,
            "multi_modal_data": {"image": images[record["image"]]},
            "multi_modal_uuids": {"image": f"{mirrored} {record['image']}"},
        }
        for record, text in zip(records, texts, strict=True)
    ]


if __name__ == "__main__":
    main()
