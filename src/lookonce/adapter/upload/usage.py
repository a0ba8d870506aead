"""How to ask a model that was uploaded: the code on its card, with the settings that its answers depend on."""

from __future__ import annotations

import json

from lookonce.adapter.upload.facts import CardFacts

WITH_ADAPTER = """\
import torch
from peft import PeftModel
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained({base}, dtype={dtype}, device_map="auto")
model = PeftModel.from_pretrained(model, {repository}{of_repository})
processor = AutoProcessor.from_pretrained({base})
processor.image_processor = AutoImageProcessor.from_pretrained({base}, backend="{backend}")  # as in training
"""
MERGED = """\
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained({repository}{of_repository}, dtype={dtype}, device_map="auto")
processor = AutoProcessor.from_pretrained({repository}{of_repository})
processor.image_processor = AutoImageProcessor.from_pretrained(
    {repository}{of_repository}, backend="{backend}"  # as in training
)
"""
ASK = """\
messages = [
{system}    {{
        "role": "user",
        "content": [{{"type": "image", "url": "image.jpg"}}, {{"type": "text", "text": "QUESTION"}}],
    }},
]
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
output = model.generate(**inputs, do_sample=False, max_new_tokens={max_new_tokens})
print(processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])"""
DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def usage(facts: CardFacts, repository: str, revision: str | None, *, is_merged: bool) -> str:
    """Python code that asks the uploaded model a question, with stock transformers and PEFT."""
    run = facts.run
    of_base = f", revision={json.dumps(facts.base.commit)}" if facts.base.commit else ""
    head = (MERGED if is_merged else WITH_ADAPTER).format(
        base=f"{json.dumps(facts.base.name)}{of_base}",
        repository=json.dumps(repository),
        of_repository=f", revision={json.dumps(revision)}" if revision else "",
        dtype=DTYPES[run.train.precision],
        backend=run.cache.backend,
    )
    return head + _pixels(facts) + "\n" + _ask(facts)


def _pixels(facts: CardFacts) -> str:
    """The image sizes that the features were made with, where they differ from the published ones."""
    limits = {"shortest_edge": facts.run.cache.min_pixels, "longest_edge": facts.run.cache.max_pixels}
    lines = [f'processor.image_processor.size["{key}"] = {value}  # pixels' for key, value in limits.items() if value]
    return "".join(f"{line}\n" for line in lines)


def _ask(facts: CardFacts) -> str:
    system = facts.systems[0] if facts.systems and len(facts.systems) == 1 else None
    content = f'    {{"role": "system", "content": [{{"type": "text", "text": {system!r}}}]}},\n' if system else ""
    return ASK.format(system=content, max_new_tokens=facts.run.eval.max_new_tokens)


def prompt(facts: CardFacts) -> str:
    """What else the prompts of the training had, in a sentence or two."""
    run, said = facts.run, ["The prompt is that of the model's own chat template: the image, then the question."]
    if facts.systems is None:
        said.append("The training records cannot be read any more, so their system text is not known.")
    elif len(facts.systems) > 1:
        said.append(f"The training records have {len(facts.systems)} different system texts, before the image.")
    elif facts.systems:
        said.append("All training records have this system text.")
    if run.data.context:
        said.append("The training prompts also had answers to earlier questions about the image (`data.context`).")
    return " ".join(said)
