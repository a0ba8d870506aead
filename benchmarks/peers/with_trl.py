"""Measure a LoRA training by TRL's `SFTTrainer` on the records of make_data.py.

    python benchmarks/peers/with_trl.py --model 2b --rows 16 --out trl-2b.json

TRL refuses to pack records with images, so each is a padded row. Its loss never computes all logits. Liger's kernels
are on; their successors in TRL 2.0, kernels of the Hub (`use_kernels`), need the Hub. `--attention` takes
`flash_attention_2` and others.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

from datasets import Dataset, Image, Sequence
from measure import ALPHA, DROPOUT, LEARNING_RATE, RANK, SEED, TARGETS, Clock, arguments, read, report
from peft import LoraConfig
from torch.cuda import is_available
from trl import SFTConfig, SFTTrainer


def main() -> None:
    given = arguments(__doc__, liger=True)
    clock = Clock.of_all_trainers()
    rows = [
        {
            "prompt": [{"role": "user", "content": record["question"]}],
            "completion": [{"role": "assistant", "content": record["answer"]}],
            "images": [record["image"]],
        }
        for record in read(given)
    ]
    dataset = Dataset.from_list(rows).cast_column("images", Sequence(Image()))
    with TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            model_init_kwargs={"dtype": "bfloat16", "attn_implementation": given.attention},
            max_steps=given.steps,
            per_device_train_batch_size=given.rows,
            gradient_accumulation_steps=given.samples // given.rows,
            train_sampling_strategy="sequential",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            bf16=True,
            gradient_checkpointing=given.checkpointing,
            use_liger_kernel=given.liger,
            max_length=None,  # as documented for images, which must not be cut
            dataloader_num_workers=given.workers,
            dataloader_pin_memory=is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=SEED,
            use_cpu=not is_available(),
        )
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=DROPOUT, target_modules=TARGETS, task_type="CAUSAL_LM")
        trainer = SFTTrainer(str(given.folder), config, train_dataset=dataset, peft_config=lora)
        trainer.train()
    report("TRL", "trl", given, clock, packing=False, rows=given.rows, liger=given.liger)


if __name__ == "__main__":
    main()
