"""Train on a dataset of the Hub, or a folder of images or Parquet: python hub_dataset.py MODEL DATASET ADAPTER

Its rows have an image, a question and an answer. A folder of images has them in metadata.jsonl, with `file_name`.
"""

import sys

import torch
from datasets import Image, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from lookonce import DataCollatorForRows, VQADataset, build_cache, load_without_tower

model_path, dataset_path, adapter = sys.argv[1:]
rows = load_dataset(dataset_path, split="train").cast_column("image", Image(decode=False))
cache = build_cache(rows["image"], model_path, "caches")
dataset = VQADataset(rows, cache, model_path)

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
