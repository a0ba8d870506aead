"""The pieces for one's own training script: as exact as `lookonce train`, from images and rows of any form."""

from __future__ import annotations

import inspect
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file
from support.scripts import LORA, TOLERANCE, assert_same, gradients_of, tuned_model
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText, AutoTokenizer, TrainingArguments

import lookonce
from lookonce import (
    CachedVisionTower,
    DataCollatorForPacks,
    DataCollatorForRows,
    PackBatchSampler,
    PackLoader,
    PackTrainer,
    VisionCache,
    VQADataset,
    build_cache,
    load_without_tower,
    pack_loss,
    packed_attention,
    read_records,
    replace_tower,
)
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.images import index_images
from lookonce.errors import FeaturesMissing, ImageError, LookonceError, RecordsError, UsageError
from lookonce.library import key_of
from lookonce.train.data.batches import Pixels
from lookonce.workflow import train

NUM_STEPS = 4


@pytest.fixture(scope="module")
def records(sample: Path):
    return read_records(sample / "train.jsonl", sample)[:24]


@pytest.fixture(scope="module")
def cache(sample: Path, records, tmp_path_factory) -> VisionCache:
    images = [image for record in records for image in record.images]
    return build_cache(images, sample / "model", tmp_path_factory.mktemp("caches"), dtype="float32")


@pytest.fixture(scope="module")
def dataset(sample: Path, records, cache) -> VQADataset:
    return VQADataset(records, cache, sample / "model")


@pytest.fixture
def sampler(dataset) -> PackBatchSampler:
    return PackBatchSampler(dataset, samples_per_step=7, tokens_per_pack=192)


@pytest.mark.guarantee(
    "In a script of one's own, batches and packs have the same loss and gradients as the stock model with its tower."
)
def test_a_batch_of_rows_has_the_loss_and_gradients_of_the_stock_model_with_its_tower(sample, records, dataset):
    examples = [dataset[number] for number in range(8)]
    stock, model = (
        AutoModelForImageTextToText.from_pretrained(sample / "model", dtype=torch.float32) for _ in range(2)
    )
    pixels = Pixels(ImageProcessor(sample / "model"), index_images(records).path_of)
    chat = dataset.chat_tokenizer
    with_pixels = DataCollatorForRows(VQADataset.of(dataset.examples(), chat, pixels))
    (loss, found), (expected, wanted) = (
        loss_and_gradients(*one)
        for one in ((replace_tower(model), DataCollatorForRows(dataset)(examples)), (stock, with_pixels(examples)))
    )
    assert abs(loss - expected) / expected < TOLERANCE
    assert_same(found, wanted)


def loss_and_gradients(model, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tuned = tuned_model(model)
    loss = tuned(**batch).loss
    loss.backward()
    return loss.detach(), gradients_of(tuned)


def decoded(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


IMAGES = {
    "path": str,
    "bytes": Path.read_bytes,
    "Pillow": decoded,
    "row of datasets": lambda path: {"bytes": path.read_bytes(), "path": None},
}


def rows(sample: Path, records, kind: str) -> list[dict]:
    found = []
    for record in records[:4]:
        [path], turn = record.images, record.turns[0]
        image = IMAGES[kind](path)
        found.append({"image": image, "question": turn.question, "answer": turn.answer})
    return found


@pytest.mark.parametrize("kind", ["path", "bytes", "Pillow", "row of datasets"])
def test_images_and_rows_may_have_every_form(sample, records, tmp_path, kind):
    given = rows(sample, records, kind)
    built = build_cache([row["image"] for row in given], sample / "model", tmp_path, dtype="float32")
    dataset = VQADataset(given, built, AutoTokenizer.from_pretrained(sample / "model"))
    assert [dataset.records[number][1] for number in range(4)] == [(key_of(row["image"]),) for row in given]
    assert DataCollatorForRows(dataset)([dataset[0], dataset[1]])["labels"].shape[0] == 2
    again = build_cache([row["image"] for row in given], sample / "model", tmp_path, dtype="float32")
    assert again.num_shards == built.num_shards and len(again) == len(built)


def test_messages_are_rows_too(sample, records, cache):
    [path] = records[0].images
    content = [{"type": "image", "image": str(path)}, {"type": "text", "text": "Is there text?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "no"}]
    dataset = VQADataset([{"messages": messages}], cache, sample / "model")
    assert dataset.records[0][0].turns[0].answer == "no" and dataset[0].num_targets > 0


def test_what_cannot_work_is_named(sample, records, cache, tmp_path):
    few = build_cache([records[0].images[0]], sample / "model", tmp_path / "few", dtype="float32")
    with pytest.raises(FeaturesMissing, match=r"lacks the features of an image of .*add it with: lookonce.build_cache"):
        VQADataset(records, few, sample / "model")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"1 of 2 images cannot be encoded; the first is .*broken.jpg"):
        build_cache([records[0].images[0], tmp_path / "broken.jpg"], sample / "model", tmp_path / "b", dtype="float32")
    with pytest.raises(UsageError, match="is not an image; expected a path"):
        build_cache([3], sample / "model", tmp_path / "c")
    with pytest.raises(UsageError, match="is not a model of transformers"):
        replace_tower(json)
    with pytest.raises(UsageError, match=r"takes the configuration of the whole model, .* not Qwen3VLVisionConfig"):
        CachedVisionTower(ModelFolder.open(str(sample / "model")).vision_config, torch.float32)
    with pytest.raises(UsageError, match="it is unknown which model"):
        VQADataset(records, cache, object())
    with pytest.raises(LookonceError, match="row 0: expected the key `answer`"):
        VQADataset([{"prompt": "a"}], cache, sample / "model")


def test_a_tower_that_is_trained_is_not_replaced(sample):
    model = AutoModelForImageTextToText.from_pretrained(sample / "model", dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["qkv", "q_proj"]))
    with pytest.raises(UsageError, match="the vision tower has trained weights"):
        replace_tower(tuned)


SIGNATURES = """
DataCollatorForPacks(dataset, *, device, pads_to_blocks)
DataCollatorForRows(dataset)
PackBatchSampler(dataset, *, samples_per_step, tokens_per_pack, seed, loss, shuffle, rank, num_ranks)
PackLoader(sampler, *, num_epochs, device, num_ahead)
PackTrainer(model, args, train_sampler, *, eval_dataset, callbacks, compiled, captured, flex, checkpointing, \
num_ahead, optimizers)
VQADataset(records, cache, tokenizer, *, revision, augment, seed)
average_gradients(model)
build_cache(images, model, folder, *, revision, dtype, backend, min_pixels, max_pixels, shard_mb, augment)
load_without_tower(model, *, revision, dtype, device, attention)
pack_loss(model, pack)
packed_attention(model, *, compiled, captured, flex, of_rewards)
replace_tower(model)
save_run(adapter, run)
"""


def test_the_signatures_are_those_that_were_promised():
    found = []
    for name in [line.partition("(")[0] for line in SIGNATURES.split("\n")[1:-1]]:
        parameters = inspect.signature(getattr(lookonce, name)).parameters.values()
        names = [one.name for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        options = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
        found.append(f"{name}({', '.join([*names, *(['*', *options] if options else [])])})")
    assert found == SIGNATURES.split("\n")[1:-1]


def test_paths_may_be_texts(sample, tmp_path):
    records = lookonce.read_records(f"{sample}/test.jsonl", str(sample))
    assert records == read_records(sample / "test.jsonl")
    lookonce.write_records(f"{tmp_path}/again.jsonl", records, str(sample))
    assert len(lookonce.read_records(f"{tmp_path}/again.jsonl", str(sample))) == len(records)
    assert lookonce.image_key(str(records[0].images[0])) == lookonce.image_key(records[0].images[0])
    assert lookonce.read_run_file(f"{sample}/run.yaml") == lookonce.read_run_file(sample / "run.yaml")


@pytest.mark.guarantee(
    "In a script of one's own, batches and packs have the same loss and gradients as the stock model with its tower."
)
def test_the_packs_of_a_step_have_the_loss_and_gradients_of_the_stock_model_on_the_whole_step(sample, dataset):
    """Whichever order the packs have, and however many they are."""
    sampler = PackBatchSampler(dataset, samples_per_step=12, tokens_per_pack=192, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorForPacks(dataset))
    steps: list[list[dict]] = [[]]
    for pack in loader:
        steps[-1].append(pack)
        if pack["ends_step"]:
            steps.append([])
    assert len(steps) - 1 == sampler.num_steps == 2 and len(steps[0]) > 1
    order = [[*indices] for indices in sampler.plan.epoch(0)]
    first = [index for one in order[0] for group in one.pack.groups for index in group.examples]
    model = load_without_tower(sample / "model", dtype=torch.float32, device="cpu")
    expected, wanted = loss_and_gradients(model, DataCollatorForRows(dataset)([dataset[index] for index in first]))
    tuned = tuned_model(load_without_tower(sample / "model", dtype=torch.float32, device="cpu"))
    with packed_attention(tuned):
        losses = [pack_loss(tuned, pack) for pack in steps[0]]
        for loss in losses:
            loss.backward()
    assert abs(sum(losses).detach() - expected) / expected < TOLERANCE
    assert_same(gradients_of(tuned), wanted)


def test_each_epoch_has_every_example_once_in_an_order_of_its_own(sampler, records):
    num_packs = len(sampler)
    epochs = [[index for pack in sampler for index in pack] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(len(records))]] * 2 and epochs[0] != epochs[1]
    sampler.set_epoch(0)
    assert [index for pack in sampler for index in pack] == epochs[0] and sampler.epoch == 1
    sampler.set_epoch(0)
    assert len(sampler) == num_packs


def test_packs_read_ahead_are_those_of_a_dataloader(sampler):
    """Across epochs, and also after a loop that was left."""
    collate = DataCollatorForPacks(sampler.dataset)
    by_dataloader = [
        pack
        for _ in range(2)
        for pack in DataLoader(sampler.dataset, batch_sampler=sampler, collate_fn=collate, num_workers=1)
    ]
    next(iter(PackLoader(sampler)))
    sampler.set_epoch(0)
    loader = PackLoader(sampler, num_epochs=2)
    ahead = list(loader)
    assert loader.num_steps == 2 * sampler.num_steps == sum(pack["ends_step"] for pack in ahead) and sampler.epoch == 2
    for one, other in zip(ahead, by_dataloader, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


def test_what_a_dataloader_takes_can_be_sent_to_its_processes(dataset, sampler):
    """From Python 3.14 on, a DataLoader on Linux starts its processes anew and sends them what they need."""
    rows, packs = DataCollatorForRows(dataset), DataCollatorForPacks(dataset)
    sent_dataset, sent_rows, sent_packs = pickle.loads(pickle.dumps((dataset, rows, packs)))
    indices = pickle.loads(pickle.dumps(next(iter(sampler))))
    for collate, sent, numbers in ((rows, sent_rows, [0, 1]), (packs, sent_packs, indices)):
        expected = collate(dataset.__getitems__(numbers))
        found = sent(sent_dataset.__getitems__(numbers))
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_image_that_cannot_be_read_stops_the_loop_that_asks_for_its_pack(sampler, cache, monkeypatch):
    packs = iter(PackLoader(sampler, num_ahead=1))
    next(packs)
    monkeypatch.setattr(cache, "get_many", lambda keys, pin: [cache.grid_thw("missing")])
    with pytest.raises(LookonceError, match="missing"):
        list(packs)


def test_packs_that_cannot_be_made_are_named(dataset):
    with pytest.raises(RecordsError, match=r"train.jsonl:\d+ has \d+ tokens, more than tokens_per_pack: 20; raise it"):
        PackBatchSampler(dataset, tokens_per_pack=20)
    with pytest.raises(UsageError, match="give the DataLoader a batch_sampler"):
        next(iter(DataLoader(dataset, batch_size=2, collate_fn=DataCollatorForPacks(dataset))))


@pytest.fixture(scope="module")
def trained(make_run_in, built, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The adapter of `lookonce train`."""
    run = make_run_in(
        tmp_path_factory.mktemp("trained"),
        cache={"dir": str(built.folder.parent)},
        data={"val": [], "test": []},
        batch={"tokens_per_pack": 256},
        train={"scheduler": "constant", "warmup": 0, "optimizer": "adamw_torch", "learning_rate": 0.01},
        lora={"targets": ["q_proj", "v_proj"]},
    )
    assert run.train.steps == NUM_STEPS
    train(run, notify=lambda note: None)
    return load_file(run.output / "adapter" / "adapter_model.safetensors")


def to_train(sample, cache) -> tuple[Any, PackBatchSampler]:
    """A model with a new adapter, and the packs that it is trained on."""
    dataset = VQADataset(read_records(sample / "train.jsonl"), cache, sample / "model")
    sampler = PackBatchSampler(dataset, samples_per_step=8, tokens_per_pack=256, seed=0)
    model = load_without_tower(sample / "model", dtype=torch.float32, device="cpu")
    torch.manual_seed(0)
    return get_peft_model(model, LORA).train(), sampler


def assert_is_adapter_of(tuned, trained) -> None:
    mine = get_peft_model_state_dict(tuned)
    assert mine.keys() == trained.keys() and all(torch.equal(mine[name], trained[name]) for name in trained)


@pytest.mark.guarantee(
    "A training loop of one's own, on the public pieces, ends with the adapter of `lookonce train`, bit for bit."
)
@pytest.mark.parametrize("captured", [False, True])
def test_a_loop_of_ones_own_ends_with_the_adapter_of_lookonce_train_bit_for_bit(sample, built, trained, captured):
    """Both are made of the same pieces; without a GPU, captured passes run again on the inputs of the capture."""
    tuned, sampler = to_train(sample, built)
    weights = [weight for weight in tuned.parameters() if weight.requires_grad]
    optimizer, num_steps = torch.optim.AdamW(weights, lr=0.01, weight_decay=0), 0
    with packed_attention(tuned, captured=captured):
        for pack in PackLoader(sampler):
            pack_loss(tuned, pack).backward()
            if pack["ends_step"]:
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
            if num_steps == NUM_STEPS:
                break
    if captured:  # padded to the shapes that are captured, so sums have another order
        for name, weight in get_peft_model_state_dict(tuned).items():
            torch.testing.assert_close(weight, trained[name], rtol=1e-4, atol=1e-5)
    else:
        assert_is_adapter_of(tuned, trained)


def arguments(folder, **options: Any) -> TrainingArguments:
    fixed: Any = {"lr_scheduler_type": "constant", "learning_rate": 0.01, "optim": "adamw_torch", "report_to": []}
    return TrainingArguments(str(folder), **fixed | {"max_steps": NUM_STEPS, "seed": 0, "use_cpu": True} | options)


@pytest.mark.guarantee(
    "A training loop of one's own, on the public pieces, ends with the adapter of `lookonce train`, bit for bit."
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_pack_trainer_ends_with_the_adapter_of_lookonce_train_bit_for_bit(sample, built, trained, tmp_path):
    """Also where it continues from a checkpoint, and validates."""
    tuned, sampler = to_train(sample, built)
    held_out = VQADataset(read_records(sample / "train.jsonl")[:9], built, sample / "model")
    saved = {"save_steps": 2, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 2}
    trainer = PackTrainer(tuned, arguments(tmp_path, **saved), sampler, eval_dataset=held_out)
    trainer.train()
    assert_is_adapter_of(tuned, trained)
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert losses[-1] < losses[0] and trainer.evaluate()["eval_loss"] == losses[-1]
    [checkpoint] = tmp_path.glob("checkpoint-*")
    resumed, sampler = to_train(sample, built)
    saved["eval_strategy"] = "no"
    PackTrainer(resumed, arguments(tmp_path, **saved), sampler).train(resume_from_checkpoint=True)
    assert_is_adapter_of(resumed, trained)


def test_all_layers_are_in_training_mode_from_the_first_step_on(sample, built, tmp_path):
    """With `from_pretrained` and PEFT they are in evaluation mode below a model in training mode."""
    tuned, sampler = to_train(sample, built)
    layer, modes = tuned.get_base_model().eval().model.language_model.layers[0], list[bool]()
    assert tuned.training
    layer.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    PackTrainer(tuned, arguments(tmp_path, max_steps=1), sampler).train()
    assert modes and all(modes)


def test_pack_trainer_refuses_what_would_weigh_targets_wrong(sample, built, tmp_path):
    tuned, sampler = to_train(sample, built)
    with pytest.raises(UsageError, match=r"gradient_accumulation_steps is 4, .* set PackBatchSampler\("):
        PackTrainer(tuned, arguments(tmp_path, gradient_accumulation_steps=4), sampler)
    others = PackBatchSampler(sampler.dataset, rank=1, num_ranks=2)
    with pytest.raises(UsageError, match="for 2 of 1 processes that train together; start them with torchrun"):
        PackTrainer(tuned, arguments(tmp_path), others)


def test_a_pack_needs_its_attention(sample, built):
    tuned, sampler = to_train(sample, built)
    pack = next(
        iter(DataLoader(sampler.dataset, batch_sampler=sampler, collate_fn=DataCollatorForPacks(sampler.dataset)))
    )
    with pytest.raises(UsageError, match=r"write around the loop: with packed_attention\(model\)"):
        pack_loss(tuned, pack)


def test_a_cache_of_another_tower_is_refused_although_it_has_the_same_shape(sample, records, cache, tmp_path):
    """Features of other weights would be trained on without a word."""
    model = Path(shutil.copytree(sample / "model", tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if ".visual." in name)
    save_file(tensors | {name: tensors[name] + 1}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"has features of another vision tower than that of .*; make a cache with"):
        VQADataset(records, cache, model)


WRONG: dict[str, Any] = {
    "dtype": (lambda new, model, cache: new(["a.jpg"], model, dtype=torch.float32), "dtype: .* 'float32' or"),
    "recipe": (lambda new, model, cache: new(["a.jpg"], model, augment="x"), "augment: Input should be a valid dict"),
    "images": (lambda new, model, cache: new("a.jpg", model), "images is 'a.jpg'; expected a list"),
    "image": (lambda new, model, cache: new(Path("a.jpg"), model), "images is PosixPath.*; expected a list"),
    "file": (lambda new, model, cache: new([{"bytes": None, "path": "no.jpg"}], model), "cannot read image no.jpg"),
    "empty": (lambda new, model, cache: new([Image.new("RGB", (0, 9))], model), "of 0 x 9 pixels cannot be read"),
    "no folder": (lambda new, model, cache: VisionCache.open(model / "config.json"), "config.json is not a cache"),
    "no cache": (lambda new, model, cache: VQADataset([], str(cache.folder), model), "is not a cache; open its folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_errors_that_say_what_is_allowed(sample, cache, tmp_path, name):
    call, said = WRONG[name]
    with pytest.raises(LookonceError, match=said):
        call(lambda images, model, **options: build_cache(images, model, tmp_path, **options), sample / "model", cache)


def test_a_number_of_samples_that_no_step_has_is_refused(dataset):
    with pytest.raises(UsageError, match="samples_per_step: Input should be greater than or equal to 1"):
        PackBatchSampler(dataset, samples_per_step=0)
