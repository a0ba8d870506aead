"""Train on packs in a loop of one's own: accelerate launch packs.py MODEL train.jsonl ADAPTER, on one GPU or several"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from lookonce import (
    PackBatchSampler,
    PackLoader,
    VQADataset,
    build_cache,
    load_without_tower,
    pack_loss,
    packed_attention,
    read_records,
)

model_path, records_path, adapter = sys.argv[1:]
on_gpu = torch.cuda.is_available()
accelerator = Accelerator(cpu=not on_gpu, mixed_precision="bf16" if on_gpu else "no")
records = read_records(Path(records_path))
cache = build_cache([image for record in records for image in record.images], model_path, "caches")
dataset = VQADataset(records, cache, model_path)
sampler = PackBatchSampler(dataset, samples_per_step=16)
tuned = get_peft_model(load_without_tower(model_path), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
optimizer = torch.optim.AdamW((weight for weight in tuned.parameters() if weight.requires_grad), lr=2e-4)
model, optimizer = accelerator.prepare(tuned, optimizer)  # the sampler has divided the packs among processes already
with packed_attention(model, compiled=on_gpu, captured=on_gpu and accelerator.num_processes == 1):
    for pack in PackLoader(sampler, num_epochs=1):
        accelerator.backward(pack_loss(model, pack))
        if pack["ends_step"]:
            optimizer.step()
            optimizer.zero_grad()
if accelerator.is_main_process:
    tuned.save_pretrained(adapter)
