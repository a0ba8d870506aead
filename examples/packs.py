"""Train on packs in a loop of one's own, on one GPU: python packs.py MODEL train.jsonl ADAPTER"""

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
accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
records = read_records(Path(records_path))
cache = build_cache([image for record in records for image in record.images], model_path, "caches")
dataset = VQADataset(records, cache, model_path)
sampler = PackBatchSampler(dataset, samples_per_step=16)
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorForPacks(dataset))
model = load_without_tower(model_path, device=accelerator.device)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=2e-4)
with packed_attention(model, compiled=accelerator.device.type == "cuda"):
    for pack in loader:
        with accelerator.autocast():
            loss = pack_loss(model, pack)
        accelerator.backward(loss)
        if pack["ends_step"]:
            optimizer.step()
            optimizer.zero_grad()
model.save_pretrained(adapter)
