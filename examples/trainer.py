"""Train on cached features with transformers' Trainer: python trainer.py MODEL train.jsonl ADAPTER"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from lookonce import DataCollatorForRows, VQADataset, build_cache, load_without_tower, read_records

model_path, records_path, adapter = sys.argv[1:]

records = read_records(Path(records_path))
cache = build_cache([image for record in records for image in record.images], model_path, "caches")
dataset = VQADataset(records, cache, model_path)

model = get_peft_model(load_without_tower(model_path), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
options = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=16,
    learning_rate=2e-4,
    num_train_epochs=1,
    bf16=torch.cuda.is_available(),
    report_to=[],
)
Trainer(model, options, train_dataset=dataset, data_collator=DataCollatorForRows(dataset)).train()
model.save_pretrained(adapter)
