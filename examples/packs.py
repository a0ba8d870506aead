"""Train on packs in a loop of one's own: accelerate launch packs.py MODEL train.jsonl ADAPTER, on one GPU or several"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from lookonce import (
    DataCollatorForPacks,
    PackBatchSampler,
    VQADataset,
    build_cache,
    load_without_tower,
    pack_loss,
    packed_attention,
    read_records,
)

model_path, records_path, adapter = sys.argv[1:]
torch.manual_seed(42)
on_gpu = torch.cuda.is_available()
accelerator = Accelerator(cpu=not on_gpu, mixed_precision="bf16" if on_gpu else "no")
records = read_records(Path(records_path))
cache = build_cache([image for record in records for image in record.images], model_path, "caches")
dataset = VQADataset(records, cache, model_path)
sampler = PackBatchSampler(dataset, samples_per_step=16)
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorForPacks(dataset), pin_memory=on_gpu)
tuned = get_peft_model(load_without_tower(model_path), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
model, optimizer = accelerator.prepare(tuned, torch.optim.AdamW(tuned.parameters(), lr=2e-4))  # the loader has ranks
with packed_attention(model, compiled=on_gpu, captured=on_gpu and accelerator.num_processes == 1):
    for pack in loader:
        accelerator.backward(pack_loss(model, pack))
        if pack["ends_step"]:
            optimizer.step()
            optimizer.zero_grad()
if accelerator.is_main_process:
    tuned.save_pretrained(adapter)
