"""Measure the start of a training on many records: from the command to the batch of the first step.

    python benchmarks/start.py FOLDER --images 100000 --questions 10

Makes image files, records, and a cache of random features of one block of tokens each, once; then opens the training in
a fresh process and prints the seconds of each part, of the CPU in all, and the most memory. `--distinct` gives every
record a question of its own, so that no conversation occurs twice. `--tokenizer` names a folder with another tokenizer
than the sample's. `--steps` makes the batches of more steps, and prints the process's own memory, open files and
threads at the first and at the last. Needs 1 kB of disk space an image.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from lookonce.cache.store.metadata import has_receipt, read_plan
from lookonce.cache.store.reader import read_index, write_index
from lookonce.cache.store.shards import ShardWriter, StoredImage
from lookonce.datasets.images import TICK_S
from lookonce.datasets.sample.write import write_sample
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, open_run
from lookonce.train.data.batches import Prefetcher
from lookonce.train.data.dataset import DataCollatorForPacks, PackBatchSampler, VQADataset
from lookonce.train.train import open_training

ANSWERS = ("yes", "no", "none", "polyp", "2", "upper left", "pink; red", "more than 20")
GRID = (1, 2, 2)


def make_run(folder: Path, num_images: int, num_questions: int, distinct: bool, tokenizer: Path | None) -> RunFile:
    """The run file; its data are made if they are missing."""
    data = folder / f"{num_images}x{num_questions}{'-distinct' if distinct else ''}"
    if not (folder / "sample").exists():
        write_sample(folder / "sample", tokenizer=tokenizer)
    if not data.exists():
        (data / "images").mkdir(parents=True)
        for number in range(num_images):
            (data / "images" / f"{number:07d}.png").write_text(f"image {number}")
        with (data / "train.jsonl").open("w") as file:
            for row in range(num_images * num_questions):
                image, question = divmod(row, num_questions)
                asked = f"Question {row if distinct else question}: is there a finding of this kind in the image?"
                record = {"image": f"images/{image:07d}.png", "question": asked, "answer": ANSWERS[row * 7 % 8]}
                file.write(json.dumps(record) + "\n")
        time.sleep(TICK_S + 1)  # files that were just written have no stamp and would be hashed at each start
    return RunFile.model_validate(
        {
            "model": {"path": str(folder / "sample" / "model")},
            "data": {"train": str(data / "train.jsonl")},
            "cache": {"dir": str(folder / "caches"), "dtype": "bfloat16"},
            "batch": {"samples_per_step": 64, "tokens_per_pack": 2048},
            "output": str(folder / "run"),
        }
    )


def fill_cache(run: RunFile) -> None:
    """Plan the images, write random features for each, and the index."""
    inputs = open_run(run, TO_BUILD)
    inputs.write_plan()
    fingerprint = inputs.fingerprint
    features = torch.zeros(1, fingerprint.num_levels, fingerprint.hidden_size, dtype=torch.bfloat16)
    levels = (0.0,) * fingerprint.num_levels
    for shard in read_plan(inputs.cache_folder).shards:
        if not has_receipt(inputs.cache_folder, shard.name):
            with ShardWriter(inputs.cache_folder, shard.name, fingerprint, len(shard.images)) as writer:
                writer.add([StoredImage(key, GRID, (features,), levels, levels) for key in shard.keys])
                writer.commit()
    if read_index(inputs.cache_folder, fingerprint.sha256) is None:
        write_index(inputs.cache_folder, fingerprint.sha256)


def start(run: RunFile, num_steps: int) -> dict[str, float]:
    """Seconds of each part of a start, and memory, files and threads of the process before and after `num_steps`."""
    began = time.perf_counter()
    training = open_training(run, restart=True, notify=lambda note: None)
    with training.opened as session:
        clock, (examples, _) = training.startup, training.examples["train"]
        with clock.timed("group records"):
            device = torch.device("cpu")
            dataset = VQADataset.of(examples, session.chat_tokenizer, session.features)
            sampler, collator = PackBatchSampler.of(dataset, run.batch, seed=0), DataCollatorForPacks(dataset)
        with clock.timed("first step's batch"):
            for indices in next(sampler.steps(0, 1)):
                collator(dataset.__getitems__(indices))
        grows = {f"{name}, step 1": number for name, number in holds().items()}
        steps = sampler.steps(1, num_steps)
        make = lambda indices: collator(dataset.__getitems__(indices))  # noqa: E731
        with contextlib.closing(Prefetcher(steps, make, device, num_ahead=2)) as ahead:
            for _ in range(1, num_steps):
                for _batch in ahead.step():
                    pass
            grows |= {f"{name}, step {num_steps}": number for name, number in holds().items()}
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (
        clock.seconds
        | grows
        | {
            "all": round(time.perf_counter() - began, 3),
            "CPU seconds with imports": round(used.ru_utime + used.ru_stime, 3),
            "GB of memory at most": round(used.ru_maxrss / 1e6, 2),
        }
    )


def holds() -> dict[str, float]:
    """What the process holds now: memory of its own, open files and threads."""
    process = psutil.Process()
    memory = process.memory_full_info()
    return {"GB": round(memory.uss / 1e9, 3), "files": process.num_fds(), "threads": process.num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--distinct", action="store_true")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--steps", type=int, default=1, help="of which batches are made; the first is timed")
    parser.add_argument("--made", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    run = make_run(options.folder, options.images, options.questions, options.distinct, options.tokenizer)
    if options.made:
        print(json.dumps(start(run, options.steps), indent=2))
        return
    fill_cache(run)
    began = time.perf_counter()
    subprocess.run([sys.executable, *sys.argv, "--made"], check=True)
    print(f"process: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
