"""Measure a LoRA training by Unsloth on the records of make_data.py.

    python benchmarks/peers/with_unsloth.py --model 2b --out unsloth-2b.json

Unsloth packs records with images for Gemma 4 only, so each is a padded row here. By default it
recomputes activations in its own way; `--no-offload` stores them.
"""

from __future__ import annotations

import unsloth  # first of all: it patches the others as they are imported

# isort: split
from tempfile import TemporaryDirectory
from typing import Any

from measure import ALPHA, DROPOUT, LEARNING_RATE, RANK, SEED, Clock, arguments, read, report
from trl import SFTConfig, SFTTrainer
from unsloth.trainer import UnslothVisionDataCollator


def main() -> None:
    given = arguments(__doc__, offload=True)
    clock = Clock.of_all_trainers()
    checkpointing = "unsloth" if given.offload else given.checkpointing
    model, processor = unsloth.FastVisionModel.from_pretrained(
        str(given.folder),
        max_seq_length=given.tokens,
        load_in_4bit=False,
        load_in_16bit=True,
        use_gradient_checkpointing=checkpointing,
    )
    model = unsloth.FastVisionModel.get_peft_model(
        model,
        finetune_vision_layers=False,
        finetune_language_layers=True,
        finetune_attention_modules=True,
        finetune_mlp_modules=True,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=DROPOUT,
        use_gradient_checkpointing=checkpointing,
        random_state=SEED,
    )
    unsloth.FastVisionModel.for_training(model, use_gradient_checkpointing=bool(checkpointing))
    collator = UnslothVisionDataCollator(
        model,
        processor,
        resize="max",  # images as they are
        train_on_responses_only=True,
        instruction_part="<|im_start|>user\n",
        response_part="<|im_start|>assistant\n",
    )
    with TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_steps=given.steps,
            per_device_train_batch_size=given.rows,
            gradient_accumulation_steps=given.samples // given.rows,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            bf16=True,
            remove_unused_columns=False,
            dataset_text_field="",
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=given.tokens,
            dataloader_num_workers=given.workers,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=SEED,
        )
        trainer = SFTTrainer(
            model=model,
            args=config,
            processing_class=processor,
            data_collator=collator,
            train_dataset=[conversation(record) for record in read(given)],
        )
        trainer.train()
    report("Unsloth", "unsloth", given, clock, packing=False, rows=given.rows, recomputed=str(checkpointing))


def conversation(record: dict[str, str]) -> dict[str, Any]:
    """A record as Unsloth's collator reads it."""
    content = [{"type": "image", "image": record["image"]}, {"type": "text", "text": record["question"]}]
    answer = [{"type": "text", "text": record["answer"]}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    main()
