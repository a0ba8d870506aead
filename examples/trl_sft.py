"""Train on cached features with TRL's SFTTrainer: python trl_sft.py MODEL train.jsonl ADAPTER"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from lookonce import DataCollatorForRows, VQADataset, build_cache, load_without_tower, read_records

model_path, records_path, adapter = sys.argv[1:]
records = read_records(Path(records_path))
cache = build_cache([image for record in records for image in record.images], model_path, "caches")
dataset = VQADataset(records, cache, model_path)
options = SFTConfig(
    "checkpoints",
    dataset_kwargs={"skip_prepare_dataset": True},
    per_device_train_batch_size=16,
    learning_rate=2e-4,
    num_train_epochs=1,
    bf16=torch.cuda.is_available(),
    report_to=[],
)
trainer = SFTTrainer(
    load_without_tower(model_path),
    options,
    data_collator=DataCollatorForRows(dataset),
    train_dataset=dataset.to_hf(),
    processing_class=AutoTokenizer.from_pretrained(model_path),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
trainer.save_model(adapter)
