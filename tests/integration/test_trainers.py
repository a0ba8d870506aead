"""Trainers of other libraries on cached features: Trainer, TRL, accelerate and several processes, and the examples.

Each has the loss and gradients of the stock model, or refuses what would make them wrong.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from peft import get_peft_model
from safetensors.torch import load_file
from support.scripts import LORA, TOLERANCE, Gradients, assert_same, filled, gradients_of, tuned_model
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

import lookonce
from lookonce import (
    DataCollatorForPacks,
    DataCollatorForRows,
    PackBatchSampler,
    VQADataset,
    load_without_tower,
    pack_loss,
    packed_attention,
    read_records,
)
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.images import index_images
from lookonce.datasets.sample.model import write_model
from lookonce.errors import ModelError, UsageError
from lookonce.families.lookup import FAMILIES
from lookonce.run.sections import BatchSection
from lookonce.train.data.batches import Pixels
from lookonce.train.model.packs import share_of_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory'"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def records(sample: Path):
    """Eight records with answers of several lengths."""
    different = {record.turns[0].answer: record for record in read_records(sample / "train.jsonl", sample)}
    return [*different.values()][:8]


@pytest.fixture(scope="module")
def dataset(sample: Path, records, built) -> VQADataset:
    return VQADataset(records, built, sample / "model")


def without_tower(sample: Path) -> Any:
    return load_without_tower(sample / "model", dtype=torch.float32, device="cpu")


def with_tower(sample: Path) -> Any:
    return tuned_model(AutoModelForImageTextToText.from_pretrained(sample / "model", dtype=torch.float32))


@pytest.fixture(scope="module")
def with_pixels(sample: Path, records, dataset) -> VQADataset:
    pixels = Pixels(ImageProcessor(sample / "model"), index_images(records).path_of)
    return VQADataset.of(dataset.examples(), dataset.chat_tokenizer, pixels)


@pytest.fixture(scope="module")
def stock(sample: Path, dataset, with_pixels) -> tuple[float, Gradients]:
    """The loss and gradients of the stock model with its tower, on all records as one batch."""
    tuned, collate = with_tower(sample), DataCollatorForRows(with_pixels)
    loss = tuned(**collate([dataset[number] for number in range(len(dataset))])).loss
    loss.backward()
    return loss.item(), gradients_of(tuned)


OPTIONS = {"max_steps": 1, "per_device_train_batch_size": 8, "max_grad_norm": 0, "report_to": [], "use_cpu": True}


def sft_trainer(sample: Path, dataset: VQADataset, folder: Path, rows: Any = None, **options: Any) -> SFTTrainer:
    collator = options.pop("data_collator", DataCollatorForRows(dataset))
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False} | OPTIONS | options
    trainer = SFTTrainer(
        without_tower(sample),
        SFTConfig(str(folder), **options),
        data_collator=collator,
        train_dataset=dataset.to_hf() if rows is None else rows,
        processing_class=AutoTokenizer.from_pretrained(sample / "model"),
        peft_config=LORA,
    )
    filled(trainer.model)
    return trainer


def stock_trainer(sample: Path, dataset: VQADataset, folder: Path, rows: Any = None, **options: Any) -> Trainer:
    return Trainer(
        tuned_model(without_tower(sample)),
        TrainingArguments(str(folder), **OPTIONS | options),
        train_dataset=dataset if rows is None else rows,
        data_collator=DataCollatorForRows(dataset),
    )


class KeepsGradients(TrainerCallback):
    """Has the gradients of the last step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self.gradients = gradients_of(options["model"])


def first_step(trainer: Trainer) -> tuple[float, Gradients]:
    keeps = KeepsGradients()
    trainer.add_callback(keeps)
    return trainer.train().training_loss, keeps.gradients


@pytest.mark.guarantee(
    "In a script of one's own, batches and packs have the same loss and gradients as the stock model with its tower."
)
@pytest.mark.parametrize("batch_size", [8, 2], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("make", [stock_trainer, sft_trainer])
def test_the_first_step_has_the_loss_and_gradients_of_the_stock_model_with_its_tower(
    sample, dataset, stock, tmp_path, make, batch_size
):
    """Also in four batches with unequal numbers of targets: transformers counts the targets of the whole step.

    A maximum length of TRL cuts nothing, nor does `completion_only_loss` change the targets, which are the answers.
    """
    accumulated = 8 // batch_size
    options = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulated}
    options |= {"max_length": 4, "completion_only_loss": False} if make is sft_trainer and batch_size == 2 else {}
    loss, gradients = first_step(make(sample, dataset, tmp_path, **options))
    assert len({example.num_targets for example in dataset.examples()}) > 1
    assert loss == pytest.approx(stock[0], rel=TOLERANCE)
    assert_same(gradients, stock[1])


@pytest.mark.guarantee(
    "With `batch.loss: micro_batch`, a step has the loss and gradients of the stock Trainer with gradient accumulation."
)
@pytest.mark.parametrize("mode", ["shared", "packed", "separate"])
def test_the_loss_of_micro_batches_is_that_of_the_stock_trainer_with_accumulation(
    sample, dataset, with_pixels, stock, tmp_path, mode
):
    """8 samples, 3 at a time: the stock Trainer takes the mean of three means, of 3, 3 and 2 samples."""
    options = OPTIONS | {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    arguments = TrainingArguments(str(tmp_path), train_sampling_strategy="sequential", **options)
    collator = DataCollatorForRows(with_pixels)
    trainer = Trainer(with_tower(sample), arguments, train_dataset=with_pixels, data_collator=collator)
    expected_loss, expected = first_step(trainer)
    assert abs(expected_loss - stock[0]) > 100 * TOLERANCE * stock[0]  # not that of the whole step as one batch

    batch = BatchSection(
        mode=mode, samples_per_step=8, samples_per_forward=3, order="as_given", loss="micro_batch", tokens_per_pack=128
    )
    ours = tuned_model(without_tower(sample))
    parts = DataLoader(
        dataset, batch_sampler=PackBatchSampler.of(dataset, batch, seed=0), collate_fn=DataCollatorForPacks(dataset)
    )
    losses = []
    with packed_attention(ours):
        for part in parts:
            loss = share_of_loss(ours, part)
            loss.backward()
            losses.append(loss.item())
    assert len(losses) > 1
    assert sum(losses) == pytest.approx(expected_loss, rel=TOLERANCE)
    assert_same(gradients_of(ours), expected)


def test_rows_for_trl_survive_trainers_splits_and_selections(sample, dataset, stock, tmp_path):
    rows = dataset.to_hf()
    assert rows.column_names == ["input_ids"] and len(rows) == len(dataset)
    chosen = rows.shuffle(seed=1).select(range(6)).train_test_split(2, seed=1)["train"]
    origins = [example.origin for example in dataset.examples()]
    found = [row["input_ids"].origin for row in chosen]
    assert len(found) == 4 and {*found} < {*origins}
    loss, gradients = first_step(stock_trainer(sample, dataset, tmp_path, rows, remove_unused_columns=True))
    assert loss == pytest.approx(stock[0], rel=TOLERANCE)
    assert_same(gradients, stock[1])


def test_rows_that_are_no_examples_are_refused(dataset):
    rows = dataset.to_hf()
    joined = datasets.concatenate_datasets([rows.with_format(None), rows])
    collate = DataCollatorForRows(dataset)
    for row in (joined[0], {"image": "a.jpg", "question": "a", "answer": "b"}, {"input_ids": [1, 2]}, 3):
        with pytest.raises(UsageError, match=r"takes examples of a VQADataset or rows of its to_hf\(\), not .*; give"):
            collate([row])


def test_without_the_library_datasets_it_is_named(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="needs the library `datasets`; run: pip install datasets"):
        dataset.to_hf()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dataset_kwargs": None}, "cannot prepare a dataset that uses `Dataset.with_transform"),
        ({"packing": True}, "custom data collator is not supported when using padding-free"),
        ({"assistant_only_loss": True}, "the dataset is not conversational"),
    ],
)
def test_options_of_trl_that_would_change_the_tokens_are_refused_by_it(sample, dataset, tmp_path, options, error):
    with pytest.raises(ValueError, match=error):
        sft_trainer(sample, dataset, tmp_path, **options)


def test_trl_refuses_the_dataset_itself_and_its_own_collator(sample, dataset, tmp_path):
    with pytest.raises(TypeError, match="must be a `Dataset` or `IterableDataset`, got `VQADataset`"):
        sft_trainer(sample, dataset, tmp_path, dataset)
    with pytest.raises(RuntimeError, match="Could not infer dtype of Example"):
        sft_trainer(sample, dataset, tmp_path, data_collator=None).train()


def test_a_tokenizer_of_another_family_is_refused(sample, records, built, tmp_path):
    other = next(family for name, family in FAMILIES.items() if name == "qwen2_5_vl")
    write_model(tmp_path / "model", family=other)
    with pytest.raises(UsageError, match="has features of another vision tower than that of"):
        VQADataset(records, built, AutoTokenizer.from_pretrained(tmp_path / "model"))
    AutoTokenizer.from_pretrained(sample / "model").save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ModelError, match=r"tokenizer"):
        VQADataset(records, built, AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))


@pytest.fixture
def accelerate_is_as_new():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def packs(dataset: VQADataset, **options: Any) -> DataLoader:
    sampler = PackBatchSampler(dataset, samples_per_step=4, tokens_per_pack=96, **options)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorForPacks(dataset))


def test_a_loss_that_accelerate_would_divide_is_refused(sample, dataset, accelerate_is_as_new):
    model = get_peft_model(without_tower(sample), LORA)
    pack = next(iter(packs(dataset)))
    with packed_attention(model):
        pack_loss(model, pack)
        Accelerator(cpu=True, gradient_accumulation_steps=4)
        with pytest.raises(UsageError, match=r"gradient_accumulation_steps=4 and would divide .* set samples_per_step"):
            pack_loss(model, pack)


def test_packs_are_not_divided_twice(dataset):
    """Whether the DataLoader was made for one of two processes or not."""
    for options in ({}, {"rank": 0, "num_ranks": 2}):
        for even_batches in (True, False):
            with pytest.raises(UsageError, match=r"divided among the processes already, .*; write accelerator.prepare"):
                prepare_data_loader(packs(dataset, **options), None, 2, 0, even_batches=even_batches)
    alone = [pack["input_ids"] for pack in packs(dataset)]
    prepared = [pack["input_ids"] for pack in prepare_data_loader(packs(dataset), torch.device("cpu"), 1, 0)]
    assert all(map(torch.equal, alone, prepared)) and len(alone) == len(prepared)


def test_packs_of_one_process_and_gradients_that_nothing_averages_are_refused(sample, dataset, monkeypatch):
    """As Accelerator() leaves a model on CPUs, although it joins a process group."""
    model = get_peft_model(without_tower(sample), LORA)
    monkeypatch.setattr("lookonce.train.model.packs._num_processes", lambda: 2)
    pack = next(iter(packs(dataset, rank=1, num_ranks=2)))
    with pytest.raises(UsageError, match=r"nothing averages the gradients of PeftModel.*; write model ="):
        pack_loss(model, pack)
    with pytest.raises(UsageError, match=r"for 1 of 2 processes .*; make PackBatchSampler\(dataset\) after"):
        pack_loss(model, next(iter(packs(dataset, rank=0, num_ranks=1))))


def test_packs_are_those_of_the_process_that_torchrun_started(dataset, monkeypatch):
    def numbers(**options: Any) -> list[int]:
        return [*chain.from_iterable(packs(dataset, shuffle=False, **options).batch_sampler)]

    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert numbers() == numbers(rank=rank, num_ranks=2) != numbers(rank=0, num_ranks=1)
    with pytest.raises(UsageError, match="rank is 2, but of 2 processes it is 0 to 1"):
        numbers(rank=2)


EXAMPLES = ["trainer.py", "packs.py", "trl_sft.py", "hub_dataset.py"]


@pytest.fixture
def words(sample: Path, tmp_path: Path, monkeypatch, root: Path):
    """Gives the command line of an example, in a folder of its own; it trains on a few questions of the sample."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    lines = (sample / "train.jsonl").read_text().splitlines(keepends=True)[:40]

    def words(example: str, adapter: str = "adapter") -> list[str]:
        if example == "hub_dataset.py":
            data = tmp_path / "frames"
            write_folder_of_images(data, [json.loads(line) for line in lines[:20]], sample)
        else:
            data = tmp_path / "few.jsonl"
            data.write_text("".join(lines))
            if not Path("images").exists():
                Path("images").symlink_to(sample / "images")
        return [str(root / "examples" / example), str(sample / "model"), str(data), adapter]

    return words


def write_folder_of_images(folder: Path, records: list[dict[str, Any]], sample: Path) -> None:
    """A folder of images as `datasets` reads it: several rows of metadata.jsonl are about one image."""
    folder.mkdir()
    with (folder / "metadata.jsonl").open("w") as metadata:
        for record in records:
            [image] = record["images"]
            shutil.copy(sample / image, folder)
            for turn in record["turns"]:
                metadata.write(json.dumps({"file_name": Path(image).name} | turn) + "\n")


def run_here(words: list[str], monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", words)
    return runpy.run_path(words[0], run_name="__main__")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_forty_lines_trains_an_adapter_of_the_sample(words, monkeypatch, example, accelerate_is_as_new):
    line = words(example)
    run_here(line, monkeypatch)
    assert len(Path(line[0]).read_text().splitlines()) <= 40
    assert Path("adapter", "adapter_model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_a_parquet_file_is_a_dataset_too(words, monkeypatch):
    """With the images in it; the same images as files are in the same cache."""
    line = words("hub_dataset.py")
    datasets.load_dataset(line[2], split="train").to_parquet("tables/train.parquet")
    names = run_here([*line[:2], "tables", "adapter"], monkeypatch)
    frames = [path.read_bytes() for path in sorted(Path("frames").glob("*.jpg"))]
    assert all(lookonce.library.key_of(frame) in names["cache"] for frame in frames)
    assert len(names["cache"]) == len({*frames})


@pytest.mark.skipif("CI" not in os.environ, reason="takes a process for each; to run it, set CI=1")
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_whole_command_trains_an_adapter_of_the_sample(words, example):
    done = subprocess.run([sys.executable, *words(example)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and Path("adapter", "adapter_model.safetensors").exists(), done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr


def load_in_float32(path: str) -> Any:
    """The model, and the seed of the adapter that is added next."""
    model = load_without_tower(path, dtype=torch.float32, device="cpu")
    torch.manual_seed(0)
    return model


IN_FLOAT32 = f"""
import os, runpy, sys, torch, lookonce
from typing import Any
from lookonce import load_without_tower
{inspect.getsource(load_in_float32)}
lookonce.load_without_tower = load_in_float32
torch.optim.AdamW = torch.optim.SGD
sys.argv = sys.argv[1:]
names = runpy.run_path(sys.argv[0], run_name="__main__")
try:
    collate = lookonce.DataCollatorForPacks(names["dataset"])
    loader = torch.utils.data.DataLoader(names["dataset"], batch_sampler=names["sampler"], collate_fn=collate)
    names["accelerator"].prepare(loader)
except lookonce.LookonceError as error:
    open("refused-" + os.environ["RANK"], "w").write(str(error))
"""


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_two_processes_end_with_the_adapter_of_one(words, monkeypatch, tmp_path, accelerate_is_as_new):
    """The example in float32, to rounding; and it refuses to let accelerate divide the packs again.

    It takes SGD, as AdamW makes steps of full size of gradients that are little more than rounding.
    """
    monkeypatch.setattr(lookonce, "load_without_tower", load_in_float32)
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)
    run_here(words("packs.py", "alone"), monkeypatch)
    Path("in_float32.py").write_text(IN_FLOAT32)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "in_float32.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *words("packs.py", "both")], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert all("divided among the processes already" in Path(f"refused-{rank}").read_text() for rank in (0, 1))
    alone, both = (load_file(Path(name, "adapter_model.safetensors")) for name in ("alone", "both"))
    assert_same(both, alone)
