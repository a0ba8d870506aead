"""Measure a LoRA training by LLaMA-Factory on the records of make_data.py.

    python benchmarks/peers/with_llamafactory.py --model 2b --attention flash_attention_2 --out llamafactory-2b.json
    python benchmarks/peers/with_llamafactory.py --model 2b --no-packing --out llamafactory-padded-2b.json

`neat_packing` packs images too. A pack is padded to 8,192 tokens and one. Where flash-attn 2 is not installed, a dense
mask keeps the samples of a pack apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from llamafactory.train.tuner import run_exp
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
from torch.cuda import is_available


def main() -> None:
    given = arguments(__doc__, packing=True, liger=True)
    clock = Clock.of_all_trainers()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.json").write_text(json.dumps(conversations(given)))
        columns = {"messages": "messages", "images": "images"}
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        entry = {"file_name": "train.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
        (folder / "dataset_info.json").write_text(json.dumps({"train": entry}))
        rows = 1 if given.packing else given.rows
        passes = given.packs if given.packing else given.samples // rows
        run_exp(
            {
                "stage": "sft",
                "do_train": True,
                "model_name_or_path": str(given.folder),
                "template": "qwen3_vl_nothink",
                "flash_attn": "fa2" if given.attention == "flash_attention_2" else given.attention,
                "dataset_dir": str(folder),
                "dataset": "train",
                "image_max_pixels": given.max_pixels,
                "cutoff_len": given.tokens,
                "neat_packing": given.packing,
                "preprocessing_num_workers": given.workers or 1,
                "dataloader_num_workers": given.workers,
                "disable_shuffling": True,
                "finetuning_type": "lora",
                "lora_rank": RANK,
                "lora_alpha": ALPHA,
                "lora_dropout": DROPOUT,
                "lora_target": ",".join(TARGETS),
                "freeze_vision_tower": True,
                "freeze_multi_modal_projector": True,
                "enable_liger_kernel": given.liger,
                "disable_gradient_checkpointing": not given.checkpointing,
                "per_device_train_batch_size": rows,
                "gradient_accumulation_steps": WHOLE_EPOCH if given.first else passes,
                "max_steps": given.steps,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "constant",
                "optim": "adamw_torch_fused",
                "bf16": True,
                "logging_steps": 1,
                "save_strategy": "no",
                "output_dir": str(folder / "out"),
                "report_to": "none",
                "use_cpu": not is_available(),
                "seed": SEED,
            }
        )
    report("LLaMA-Factory", "llamafactory", given, clock, packing=given.packing, rows=rows, liger=given.liger)


if __name__ == "__main__":
    main()
