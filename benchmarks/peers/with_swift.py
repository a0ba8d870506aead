"""Measure a LoRA training by ms-swift on the records of make_data.py.

    python benchmarks/peers/with_swift.py --model 2b --attention flash_attention_2 --out swift-2b.json
    python benchmarks/peers/with_swift.py --model 2b --no-packing --out swift-padded-2b.json
    python benchmarks/peers/with_swift.py --model 2b --attention flash_attention_2 --turns --out swift-turns-2b.json

ms-swift packs images too, but only with flash-attn 2, 3 or 4. Packs have at most 8,192 tokens. With `--turns` all
questions about an image are one conversation, which trains something else: each question sees those before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measure import (
    ALPHA,
    DROPOUT,
    LEARNING_RATE,
    RANK,
    SEED,
    TARGETS,
    WHOLE_EPOCH,
    Clock,
    arguments,
    conversations,
    report,
)
from swift import SftArguments, sft_main
from torch.cuda import is_available


def give_numbers_to_flash_attention_4() -> None:
    """Longest lengths as numbers: ms-swift gives tensors of one number, which flash-attn 4.0.0b36 refuses."""
    from flash_attn import cute

    kernel = cute.flash_attn_varlen_func

    def with_numbers(*tensors: Any, **given: Any) -> Any:
        lengths = {name: int(given[name]) for name in ("max_seqlen_q", "max_seqlen_k") if given.get(name) is not None}
        return kernel(*tensors, **given | lengths)

    cute.flash_attn_varlen_func = with_numbers


def main() -> None:
    given = arguments(__doc__, packing=True, liger=True)
    if given.attention == "flash_attention_4":
        give_numbers_to_flash_attention_4()
    clock = Clock.of_all_trainers()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "train.jsonl"
        path.write_text("".join(f"{json.dumps(one)}\n" for one in conversations(given)))
        rows = 1 if given.packing else given.rows
        passes = given.packs if given.packing else given.samples // rows
        sft_main(
            SftArguments(
                model=str(given.folder),
                model_type="qwen3_vl",
                template="qwen3_vl",
                torch_dtype="bfloat16",
                attn_impl=given.attention,
                dataset=[str(path)],
                dataset_shuffle=False,
                train_dataloader_shuffle=False,
                split_dataset_ratio=0,
                packing=given.packing,
                max_length=given.tokens,
                max_pixels=given.max_pixels,
                tuner_type="lora",
                lora_rank=RANK,
                lora_alpha=ALPHA,
                lora_dropout=DROPOUT,
                target_modules=TARGETS,
                freeze_vit=True,
                freeze_aligner=True,
                use_liger_kernel=given.liger,
                gradient_checkpointing=given.checkpointing,
                vit_gradient_checkpointing=False,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=WHOLE_EPOCH if given.first else passes,
                max_steps=given.steps,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                optim="adamw_torch_fused",
                dataloader_num_workers=given.workers,
                dataset_num_proc=given.workers or 1,
                logging_steps=1,
                save_strategy="no",
                output_dir=folder,
                report_to=[],
                use_cpu=not is_available(),
                seed=SEED,
            )
        )
    report("ms-swift", "ms-swift", given, clock, packing=given.packing, rows=rows, liger=given.liger)


if __name__ == "__main__":
    main()
