"""Training on variants of images: exactly the stock training on these pictures, chosen by seed and epoch alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import chain

import pytest
import torch
from click.testing import CliRunner
from peft import get_peft_model
from PIL import Image
from support.scripts import LORA, filled
from support.trainings import SIZES, assert_same, gradients, records, stock_logits_and_labels
from transformers import Trainer, TrainingArguments

from lookonce import DataCollatorForRows, PackLoader, VQADataset, build_cache, load_without_tower
from lookonce.cli import main
from lookonce.datasets.records import read_records, write_records
from lookonce.errors import FeaturesMissing, UsageError
from lookonce.run.open import TO_BUILD, TO_EVALUATE, TO_TRAIN, open_run
from lookonce.run.sections import BatchSection
from lookonce.train.data.batches import CPU, IGNORED
from lookonce.train.data.dataset import DataCollatorForPacks, PackBatchSampler
from lookonce.train.loop.log_files import MetricsLog
from lookonce.train.model.load import load_with_tower
from lookonce.train.model.packs import pack_loss, packed_attention
from lookonce.workflow import train

pytestmark = pytest.mark.usefixtures("no_fsync")
AUGMENT = {"variants": 3, "rotate": 20, "crop": 0.8, "brightness": 0.3, "contrast": 0.3}


@pytest.fixture
def run(make_run, sample, tmp_path):
    """Records of many kinds, to train on; the sample's own to validate."""
    write_records(tmp_path / "train.jsonl", records(sample), image_root=sample)
    data = {"train": str(tmp_path / "train.jsonl"), "image_root": str(sample)}
    return make_run(data=data, cache=SIZES | {"augment": AUGMENT})


@pytest.fixture
def opened(run):
    with open_run(run, TO_BUILD) as opened:
        opened.build()
    with open_run(run, TO_TRAIN) as opened:
        yield opened


def as_pictures(opened, epoch, folder):
    """The run with records of other images: the pictures of the variants that an epoch shows, as files."""
    images, key_of, shown = opened.images, {}, []
    for record in opened.records["train"]:
        keys = opened.variants.keys(map(opened.key_of, record.images), epoch)
        paths = []
        for path, key in zip(record.images, keys, strict=True):
            picture = Image.open(path).convert("RGB")
            if key in images.variants:
                picture = images.variants[key].picture(picture)
            paths.append(folder / f"{key}.png")
            picture.save(paths[-1])
            key_of[paths[-1]] = key
        shown.append(replace(record, images=tuple(paths)))
    return opened.changed(images=replace(images, key_of=key_of), records=opened.records | {"train": shown})


@pytest.mark.guarantee(
    "Training on variants of images has the loss and gradients of the stock model on their pictures, to 1e-5 relative "
    "in float32."
)
def test_an_epoch_of_variants_is_stock_training_on_their_pictures(
    opened, sample, stock_processor, random_lora, tmp_path
):
    shown, model = set(), random_lora(opened)
    for epoch in range(3):
        pictures = as_pictures(opened, epoch, tmp_path)
        shown.update(pictures.images.key_of.values())
        stock = random_lora(opened, load_with_tower)
        logits, labels = stock_logits_and_labels(stock, stock_processor(sample / "model"), pictures)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        expected = loss.item(), gradients(stock)
        dataset = VQADataset.of(opened.examples("train")[0], opened.chat_tokenizer, opened.features, opened.variants)
        for mode in ("shared", "packed", "separate") if epoch == 1 else ("shared",):
            batch = BatchSection(mode=mode, samples_per_step=1000, tokens_per_pack=1500, samples_per_forward=5)
            sampler, collate = PackBatchSampler.of(dataset, batch, seed=3), DataCollatorForPacks(dataset, device=CPU)
            sampler.set_epoch(epoch)
            model.zero_grad()
            with packed_attention(model):
                losses = [pack_loss(model, collate(dataset.__getitems__(indices))) for indices in sampler]
            sum(losses).backward()
            assert_same((sum(losses).item(), gradients(model)), expected)
    assert shown >= opened.images.variants.keys() and len(shown) == 12  # all of four images


class Interrupted(MetricsLog):
    """Interrupts the training in its second epoch."""

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == 4:
            raise KeyboardInterrupt


def test_a_training_that_is_resumed_shows_the_variants_of_one_that_was_not_interrupted(
    make_run, run, opened, trainings, monkeypatch, tmp_path
):
    values = run.model_dump(mode="json")
    options = values["train"] | {"steps": 7, "save_steps": 3}
    runs = {
        name: run.model_validate(values | {"output": str(tmp_path / name), "train": options, "cache": cache})
        for name, cache in {
            "whole": values["cache"],
            "resumed": values["cache"],
            "plain": values["cache"] | {"augment": None},
        }.items()
    }
    opened.owner.__exit__()
    for name in ("whole", "plain"):
        train(runs[name], notify=lambda note: None)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lookonce.train.train.MetricsLog", Interrupted)
        train(runs["resumed"], notify=lambda note: None)
    train(runs["resumed"], resume=True, notify=lambda note: None)
    trainings.assert_same_adapter(runs["resumed"], runs["whole"])
    assert trainings.log(runs["resumed"]) == trainings.log(runs["whole"]) != trainings.log(runs["plain"])


def test_two_ranks_show_the_variants_of_one(opened):
    """The questions of a step about an image show one variant, on all ranks that of one rank."""
    dataset = VQADataset.of(opened.examples("train")[0], opened.chat_tokenizer, opened.features, opened.variants)
    batch, seen = BatchSection(samples_per_step=6, tokens_per_pack=400), {}
    for num_ranks in (1, 2):
        ranks = (PackBatchSampler.of(dataset, batch, 5, rank, num_ranks) for rank in range(num_ranks))
        steps = zip(*(sampler.steps(0, 9) for sampler in ranks), strict=True)
        seen[num_ranks] = [
            {
                number: example.image_keys
                for pack in chain.from_iterable(packs)
                if not pack.micro_batch.pack.is_filler
                for number, example in dataset.__getitems__(pack).examples.items()
            }
            for packs in steps
        ]
    assert seen[1] == seen[2] and len(seen[1]) == 9
    for step in seen[1]:
        shown = {}
        for number, keys in step.items():
            images = dataset.examples()[number].image_keys
            assert all(shown.setdefault(image, key) == key for image, key in zip(images, keys, strict=True))
    assert len({step[0] for step in seen[1] if 0 in step}) > 1


def test_validation_and_answers_show_the_images_themselves(run, tmp_path):
    """With a learning rate of nothing: the same validation loss and answers as without variants, about images that
    have some, and another training loss."""
    values = run.model_dump(mode="json")
    values["data"] |= {"val": values["data"]["train"], "test": []}
    values["train"] |= {"learning_rate": 1e-12}
    values["eval"] |= {"split": "val"}
    logs, answers = {}, {}
    for augment in (None, AUGMENT):
        values["cache"] |= {"augment": augment}
        values["output"] = str(tmp_path / str(len(logs)))
        one = run.model_validate(values)
        if augment:
            lacks = r"lacks 8 of 8 variants of images .*variant 1 of .*run: lookonce cache build"
            with open_run(one, TO_TRAIN) as opened, pytest.raises(FeaturesMissing, match=lacks):
                opened.cache  # noqa: B018
        with open_run(one, TO_BUILD) as opened:
            opened.build()
        train(one, notify=lambda note: None)
        log = [json.loads(line) for line in (one.output / "log.jsonl").read_text().splitlines()]
        logs[augment is None] = [[line[name] for line in log if name in line] for name in ("eval_loss", "loss")]
        answers[augment is None] = (one.output / "predictions" / "val.jsonl").read_text()
        with open_run(one, TO_EVALUATE) as opened:
            assert opened.variants is None and opened.images.variants == {}
    assert (
        logs[True][0] and logs[True][0] == pytest.approx(logs[False][0], rel=1e-6) and answers[True] == answers[False]
    )
    assert logs[True][1] != pytest.approx(logs[False][1], rel=1e-3)


def test_commands_say_what_a_recipe_does_before_anything_is_built(run, sample, tmp_path):
    path, image = tmp_path / "run.yaml", tmp_path / "frame.jpg"
    shutil.copy(next(sample.glob("images/*.jpg")), image)
    path.write_text(run.to_yaml())

    def output(*words, fails=False):
        result = CliRunner().invoke(main, [*map(str, words)])
        assert (result.exit_code in (1, 2)) is fails, result.output
        return " ".join(result.output.split())

    mirror = ("--set", "cache.augment={variants: 2, hflip: true}", "--set", f"data.train={sample / 'train.jsonl'}")
    for command in (("check",), ("cache", "plan", "--pilot", "0"), ("cache", "build")):
        refused = output(*command, path, *mirror, fails=True)
        assert "exchange left and right" in refused and "cache.augment.force=true" in refused
    assert "8 variants of 4 training images (cache.augment), 8 of which the cache lacks" in output("check", path)
    many = output("check", path, "--set", "cache.augment.variants=9", "--set", "train.steps=null")
    assert "train.epochs: 3 shows fewer than the 9 variants" in many
    assert "with 8 variants (cache.augment), which take" in output("cache", "plan", path, "--pilot", "0")
    assert "3 variants of" in output("cache", "show", path, image, "--sheet", tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as drawn:
        assert drawn.width > 600
    output("cache", "show", path, image, "--sheet", tmp_path / "sheet.nothing", fails=True)
    before = image.read_bytes()
    assert f"{image} exists; name another" in output("cache", "show", path, image, "--sheet", image, fails=True)
    assert image.read_bytes() == before
    output("cache", "show", path, image, "--sheet", tmp_path / "sheet.png", "--set", "cache.augment=null", fails=True)
    assert not [*run.cache.dir.glob("*/plan.json")]


def test_a_script_of_ones_own_shows_the_variants_of_lookonce_train(sample, tmp_path):
    shown = read_records(sample / "train.jsonl", sample)[:12]
    model, images = sample / "model", [image for record in shown for image in record.images]
    plain = build_cache(images, model, tmp_path, dtype="float32")
    with pytest.raises(FeaturesMissing, match=r"variant 1 of an image .*build_cache\(images, model, folder, augment="):
        VQADataset(shown, plain, model, augment=AUGMENT)
    cache = build_cache(images, model, tmp_path, dtype="float32", augment=AUGMENT)
    assert len(cache) == 3 * len(plain)
    dataset = VQADataset(shown, cache, model, augment=AUGMENT, seed=9)
    with pytest.raises(UsageError, match="augment is wrong"):
        VQADataset(shown, cache, model, augment={"zoom": 3})
    packs = PackLoader(PackBatchSampler(dataset, samples_per_step=12, seed=1), num_epochs=3, device=CPU)
    of_packs = [pack["pixel_values"] for pack in packs]
    for epoch, features in enumerate(of_packs):
        dataset.set_epoch(epoch)
        keys = {key for example in dataset for key in example.image_keys}
        expected = torch.cat([cache[key] for key in keys])[:, 0, 0]
        assert torch.equal(features[:, 0, 0].sort().values, expected.sort().values)  # each image once
    seen = []

    def collate(rows):
        seen.append({key for example in rows for key in example.image_keys})
        return DataCollatorForRows(dataset)(rows)

    tuned = filled(get_peft_model(load_without_tower(model, dtype=torch.float32, device="cpu"), LORA))
    options = TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=12, num_train_epochs=3, use_cpu=True, report_to=[]
    )
    Trainer(tuned, options, train_dataset=dataset, data_collator=collate).train()
    expected = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        expected.append({key for example in dataset for key in example.image_keys})
    assert seen == expected and len({*map(frozenset, seen)}) == 3
