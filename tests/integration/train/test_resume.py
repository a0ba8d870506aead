"""A training that is stopped and resumed ends like one that was not stopped, also for trackers and without images."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import chain

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.trainings import QUIET, train_until

from lookonce.cache.store.reader import VisionCache
from lookonce.errors import ImageError, RunFolderError
from lookonce.eval.run import evaluate_run
from lookonce.run.open import TO_BUILD, open_run
from lookonce.train.loop.trainer import PackTrainer
from lookonce.workflow import train

pytestmark = pytest.mark.usefixtures("no_fsync")


def train_without_saving(run, monkeypatch):
    """Interrupts the training as it saves the adapter, after its last checkpoint."""
    save = PeftModel.save_pretrained

    def interrupted(self, folder, **options):
        if str(folder) == str(run.output / "adapter"):
            raise KeyboardInterrupt
        save(self, folder, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PeftModel, "save_pretrained", interrupted)
        train(run, **QUIET)


@pytest.mark.guarantee(
    "An interrupted and resumed training ends with the adapter of an uninterrupted one, bit for bit: on a CPU,"
    " and on a GPU with the sample's model."
)
def test_resumed_many_times_equals_uninterrupted(trainings, monkeypatch):
    """From a checkpoint in the first epoch, at its end, and in a later one."""
    for interrupted, resumes_from in ((6, 4), (13, 11), (18, 16)):
        notes = []
        run = trainings.unstarted("shared", save_steps=resumes_from)
        train_until(run, interrupted, monkeypatch, resume=True)
        assert not (run.output / "summary.json").exists()
        with pytest.raises(RunFolderError, match=f"unfinished, with checkpoint-{resumes_from}; add --resume"):
            train(run, notify=notes.append)
    summary = train(run, resume=True, notify=notes.append)
    assert f"resuming from checkpoint-{resumes_from}" in notes and summary.first_step == resumes_from
    trainings.assert_same_adapter(run, trainings.uninterrupted("shared"))
    assert trainings.log(run) == trainings.log(trainings.uninterrupted("shared"))


def test_stages_and_replayed_records_resume_as_if_uninterrupted(trainings, root, monkeypatch):
    """In the middle of a stage, in the second epoch; with records that are selected and replayed by their stages."""
    options = trainings.options("shared", steps=14)
    options["data"] |= {
        "stage_map": str(root / "datasets" / "kvasir-vqa.stages" / "reasoning.yaml"),
        "where": {"stage": [1, 3]},
        "replay": {"share": 0.2},
    }
    options["batch"]["order"] = {"by": "stage", "stages": [1, 2, 3]}
    uninterrupted, run = (trainings.make_run(output=str(trainings.folder / name), **options) for name in ("a", "b"))
    notes = []
    train(uninterrupted, notify=notes.append)
    assert any(note.startswith("each epoch trains on stage 1 (") for note in notes)
    train_until(run, 10, monkeypatch)
    assert train(run, resume=True, **QUIET).first_step == 8
    trainings.assert_same_adapter(run, uninterrupted)
    assert trainings.log(run) == trainings.log(uninterrupted)


@pytest.mark.guarantee(
    "An interrupted and resumed training ends with the adapter of an uninterrupted one, bit for bit: on a CPU,"
    " and on a GPU with the sample's model."
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")  # the compiler warns
def test_captured_passes_resume_as_if_uninterrupted(trainings, monkeypatch):
    """On a GPU in bfloat16, with dropout, which replayed passes draw again each time."""
    uninterrupted, notes = trainings.uninterrupted("shared", precision="bf16"), []
    run = trainings.make_run(**trainings.options("shared", precision="bf16"))
    train_until(run, 13, monkeypatch)
    assert train(run, resume=True, notify=notes.append).first_step == 12
    assert any("captured" in note for note in notes)
    trainings.assert_same_adapter(run, uninterrupted)
    assert trainings.log(run) == trainings.log(uninterrupted)


def test_resuming_neither_reads_nor_batches_the_steps_before(make_run, trainings, monkeypatch):
    options = trainings.options("shared", steps=9, save_steps=8, eval_steps=None)
    options["data"]["val"] = []
    run = make_run(**options)
    train_until(run, 9, monkeypatch)

    read, made, samplers = [], [], []
    get_many, batch_of = VisionCache.get_many, PackTrainer.batch_of

    def counted_get_many(self, keys, **options):
        read.extend(keys)
        return get_many(self, keys, **options)

    def counted_batch(self, indices):
        made.append(indices.micro_batch)
        samplers.append(self.train_sampler.plan)
        return batch_of(self, indices)

    monkeypatch.setattr(VisionCache, "get_many", counted_get_many)
    monkeypatch.setattr(PackTrainer, "batch_of", counted_batch)
    assert train(run, resume=True, **QUIET).first_step == 8
    steps = list(samplers[0].epoch(0))
    left = list(chain.from_iterable(steps[8:]))
    assert len(steps[8]) <= len(made) <= len(steps[8]) + 2 + 1 < sum(map(len, steps[:8]))
    assert made == left[: len(made)]
    shown = [
        key
        for micro_batch in made
        for group in micro_batch.pack.groups
        for key in samplers[0].examples[group.examples[0]].image_keys
    ]
    assert set(read) == set(shown)


def test_a_training_whose_adapter_could_not_be_saved_makes_no_further_step(trainings, monkeypatch):
    """Trainer alone would make one: it compares the number of steps only after a step."""
    run = trainings.unstarted("shared", steps=8)
    train_without_saving(run, monkeypatch)
    assert train(run, resume=True, **QUIET).num_steps == 8
    trainings.assert_same_adapter(run, trainings.uninterrupted("shared", steps=8))
    assert trainings.log(run) == trainings.log(trainings.uninterrupted("shared", steps=8))


BEST = {"steps": 12, "eval_steps": 4, "best": "loss", "learning_rate": 0.05, "scheduler": "constant"}
"""So fast that the validation loss rises from its first value on."""


def weights(run, step):
    return load_file(run.output / "checkpoints" / f"checkpoint-{step}" / "adapter_model.safetensors")


@pytest.mark.guarantee(
    "A run with `train.best` ends with the best checkpoint of the folder in which the run is, also after the "
    "folder was moved or copied."
)
def test_a_training_in_another_folder_ends_with_its_own_best_checkpoint(trainings, monkeypatch):
    """Trainer records an absolute path, which leads to another run that was trained there since."""
    run = trainings.unstarted("shared", **BEST)
    train_without_saving(run, monkeypatch)
    best, last = weights(run, 4), weights(run, 12)
    assert any((best[name] != weight).any() for name, weight in last.items())
    there = run.model_copy(update={"output": run.output.with_name("there")})
    run.output.rename(there.output)
    shutil.copytree(there.output / "checkpoints" / "checkpoint-12", run.output / "checkpoints" / "checkpoint-4")
    assert train(there, resume=True, **QUIET).first_step == 12
    found = trainings.adapter(there)
    assert all((found[name] == weight).all() for name, weight in best.items())


@pytest.mark.guarantee("A training that is saved and validated at other steps ends with the same adapter, bit for bit.")
def test_an_adapter_does_not_depend_on_when_it_is_saved_and_validated(trainings, monkeypatch):
    """The steps of both change at the resumption too, and are those of the run file from then on."""
    run = trainings.unstarted("shared", save_steps=7, eval_steps=10)
    train_until(run, 9, monkeypatch)
    run = run.model_copy(update={"train": run.train.model_copy(update={"save_steps": 5, "eval_steps": 8})})
    assert train(run, resume=True, **QUIET).first_step == 7
    trainings.assert_same_adapter(run, trainings.uninterrupted("shared"))
    assert trainings.checkpoints(run) == [20, 24]
    assert [line[0] for line in trainings.log(run) if line[3] is not None] == [8, 16, 24]


@pytest.mark.guarantee(
    "TensorBoard shows the losses of a training that was killed and resumed as those of an uninterrupted one, bit for "
    "bit."
)
@pytest.mark.filterwarnings("ignore")  # TensorBoard uses what others call deprecated
def test_tensorboard_shows_a_resumed_training_as_an_uninterrupted_one(make_cached_run, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    options = {"steps": 8, "save_steps": 4, "eval_steps": 4, "logging_steps": 1, "track": "tensorboard"}
    whole, run = (
        make_cached_run(train=options, output=str(tmp_path / name), eval={"max_new_tokens": 1}) for name in ("a", "b")
    )
    train(whole, **QUIET)
    train_until(run, 7, monkeypatch)
    assert scalars(run)["train/loss"][-1][0] == 6
    train(run, resume=True, **QUIET)
    found, expected = scalars(run), scalars(whole)
    assert found.keys() == expected.keys() and "train/tokens_per_second" in found
    for name in ("train/loss", "train/grad_norm", "train/train_loss", "eval/loss"):
        assert found[name] == expected[name]
    assert [step for step, _ in found["train/loss"]] == [*range(1, 9)]


def scalars(run) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each scalar that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.output / "tensorboard")).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.fixture
def without_images(trainings, make_run, sample, tmp_path):
    """A run on a copy of the sample, with a built cache, whose images are then deleted."""
    shutil.copytree(sample, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model"))
    run = make_run(**replace(trainings, sample=tmp_path, folder=tmp_path).options("shared"))
    open_run(run, TO_BUILD).build()
    shutil.rmtree(tmp_path / "images")
    return run


@pytest.mark.guarantee("With the image folder deleted, training, resuming and evaluation give bit-identical results.")
def test_without_images_a_resumed_training_and_its_evaluation_give_the_same_bits(
    trainings, without_images, monkeypatch
):
    run, other = without_images, trainings.uninterrupted("shared")
    train_until(run, 10, monkeypatch)
    assert train(run, resume=True, **QUIET).first_step == 8
    trainings.assert_same_adapter(run, other)
    assert trainings.log(run) == trainings.log(other)
    paths = [evaluate_run(folder, "val")[1] for folder in (run.output, other.output)]
    answers, expected = ([json.loads(line)["predicted"] for line in path.read_text().splitlines()] for path in paths)
    assert answers and answers == expected


def test_asked_to_verify_the_images_a_training_misses_them(without_images):
    with pytest.raises(ImageError, match="No such file or directory"):
        train(without_images, verify_images=True, **QUIET)
