"""Compute what the first step's loss is by the stock model alone: what every tool's first step should have.

    python benchmarks/peers/reference.py --model 2b --out reference-2b.json

Tools differ in the newline after an answer's end token, which some train on, and in the mean: over all targets of a
step, or over the means of its forward passes. All four are written, with the numbers of targets.
"""

from __future__ import annotations

import json
import statistics

import torch
from measure import PATCHES_PER_TOKEN, arguments, read, write
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


def main() -> None:
    given = arguments(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processor = AutoProcessor.from_pretrained(given.folder)
    model = AutoModelForImageTextToText.from_pretrained(given.folder, dtype=torch.bfloat16).to(device).eval()
    of_tokens: dict[str, list[list[float]]] = {"end token": [], "newline": []}
    image_tokens = 0
    for record in read(given, num_steps=1):
        content = [{"type": "image"}, {"type": "text", "text": record["question"]}]
        prompt = [{"role": "user", "content": content}]
        answer = [{"role": "assistant", "content": [{"type": "text", "text": record["answer"]}]}]
        asked = processor.apply_chat_template(prompt, add_generation_prompt=True)
        text = processor.apply_chat_template(prompt + answer)
        image = Image.open(record["image"]).convert("RGB")
        inputs = processor(text=[text], images=[image], return_tensors="pt").to(device)
        start = processor(text=[asked], images=[image], return_tensors="pt")["input_ids"].shape[1]
        image_tokens += int(inputs["image_grid_thw"].prod()) // PATCHES_PER_TOKEN
        ids = inputs["input_ids"][0]
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            logits = model(**inputs).logits[0, start - 1 : -1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[start:], reduction="none").tolist()
        assert processor.tokenizer.decode(ids[-2:]) == "<|im_end|>\n", processor.tokenizer.decode(ids[-4:])
        of_tokens["newline"].append(losses)
        of_tokens["end token"].append(losses[:-1])
    found: dict[str, object] = {"model": given.model, "samples": given.samples, "image_tokens": image_tokens}
    for name, losses_of in of_tokens.items():
        rows = [sum(losses_of[start : start + given.rows], []) for start in range(0, len(losses_of), given.rows)]
        found[f"up to the {name}"] = {
            "targets": sum(map(len, losses_of)),
            "mean_of_targets": statistics.mean(sum(losses_of, [])),
            f"mean_of_passes_of_{given.rows}": statistics.mean(map(statistics.mean, rows)),
        }
    write(given, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
