"""The check in front of a training finds each known fault of packs, and changes neither weights nor random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.planted import IN_ALL, IN_REPLAYS
from support.trainings import COMPILED_ON_GPU
from transformers import TrainingArguments

from lookonce import PackBatchSampler, PackTrainer, VQADataset, load_without_tower, packed_attention, read_records
from lookonce.errors import TrainingError
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.first_pack import VARIABLE, FirstPack, first_pack_of, of_similar_length
from lookonce.train.model import attention, loss, packs
from lookonce.workflow import train

pytestmark = [
    pytest.mark.guarantee(
        "The check in front of a training finds wrong masks, positions, scaled gradients and stale buffers of a"
        " captured graph, and passes where there are none."
    ),
    pytest.mark.filterwarnings("ignore:'pin_memory'"),
]
weighted_loss = loss.weighted_loss


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="module")
def make_trainer(sample, built, tmp_path_factory):
    """Makes a trainer whose packs are those of a GPU; captured passes run again on the inputs of the capture."""

    def make(bf16: bool = False, captured: bool = True, **lora: Any) -> PackTrainer:
        dataset = VQADataset(read_records(sample / "train.jsonl"), built, sample / "model")
        sampler = PackBatchSampler(dataset, samples_per_step=40, tokens_per_pack=1024, seed=1)
        model = load_without_tower(sample / "model", dtype=torch.bfloat16 if bf16 else torch.float32, device="cpu")
        options = TrainingArguments(str(tmp_path_factory.mktemp("out")), use_cpu=True, bf16=bf16, report_to="none")
        trainer = PackTrainer(
            get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **lora)), options, sampler
        )
        trainer.collator.pads_to_blocks, trainer.captured = True, captured
        return trainer

    return make


@pytest.fixture(scope="module")
def trainer(make_trainer) -> PackTrainer:
    """In float32, with its rows computed."""
    trainer = make_trainer()
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(VARIABLE, raising=False)
        pack = first_pack_of(trainer, 0)
    assert pack and len(pack) > 16
    trainer.first_pack = FirstPack(trainer, pack)
    return trainer


def check(trainer: PackTrainer, captured: bool = False, times: int = 1) -> str:
    """Check the first pack; captured passes are replayed from the second time on."""
    trainer.captured = captured
    assert trainer.first_pack
    with trainer._on_packs():
        return [trainer.first_pack.check(trainer.model) for _ in range(times)][-1]


def is_found(trainer: PackTrainer, captured: bool = False) -> bool:
    try:
        check(trainer, captured, times=2)
    except TrainingError as error:
        assert "; train without CUDA graphs: --set train.cuda_graphs=false; " in str(error)
        return True
    return False


@pytest.mark.parametrize("captured", [False, True])
def test_what_is_right_passes_and_nothing_changes(trainer, captured):
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    state = torch.get_rng_state()
    assert check(trainer, captured, times=2).startswith(
        "the first pack agrees with its questions as separate rows: loss differs by "
    )
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in trainer.model.named_parameters():
        assert not weight.requires_grad or (torch.equal(weight, before[name]) and weight.grad is None)


def test_other_weights_do_not_matter(trainer):
    """A training that resumes loads its weights after the rows were computed."""
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data += 1
    check(trainer)
    for weight, value in zip(weights, before, strict=True):
        assert torch.equal(weight, value + 1)
        weight.data = value


@pytest.mark.parametrize("name", IN_ALL)
def test_a_fault_is_found(trainer, monkeypatch, name):
    IN_ALL[name](monkeypatch)
    assert is_found(trainer)


@pytest.mark.parametrize("name", IN_REPLAYS)
def test_a_fault_of_replays_is_found(trainer, monkeypatch, name):
    IN_REPLAYS[name](monkeypatch)
    assert is_found(trainer, captured=True)


def test_a_gradient_that_is_no_number_is_found(trainer, monkeypatch):
    monkeypatch.setattr(loss, "weighted_loss", lambda *tensors: weighted_loss(*tensors) * torch.nan)
    with pytest.raises(TrainingError, match="the loss of the first pack differs by inf"):
        check(trainer)


def test_rows_that_are_no_numbers_prove_nothing(make_trainer, monkeypatch):
    monkeypatch.setattr(loss, "weighted_loss", lambda *tensors: weighted_loss(*tensors) * torch.nan)
    trainer = make_trainer()
    trainer.first_pack = FirstPack(trainer, first_pack_of(trainer, 0))
    assert check(trainer).startswith("the first pack is not checked: rounding alone changes loss or gradients by inf")


def test_a_fault_in_one_kind_of_weight_is_found(make_trainer):
    """In bfloat16, where the gradients of queries are a twentieth of all."""
    trainer = make_trainer(bf16=True)
    state = torch.get_rng_state()
    trainer.first_pack = FirstPack(trainer, first_pack_of(trainer, 0))
    assert torch.equal(torch.get_rng_state(), state), "nothing was drawn from the random state"
    assert "the first pack agrees with" in check(trainer)
    hooks = [
        weight.register_hook(lambda gradient: 0.8 * gradient)
        for name, weight in trainer.model.named_parameters()
        if "q_proj.lora_A" in name
    ]
    with pytest.raises(TrainingError, match="the gradient of .*q_proj.lora_A"):
        check(trainer)
    for hook in hooks:
        hook.remove()


def test_the_weights_precision_counts_too_and_gradients_of_before_do_not(make_trainer):
    trainer = make_trainer(bf16=True)
    trainer.args.bf16 = False
    for weight in trainer.model.parameters():
        weight.grad = torch.ones_like(weight) if weight.requires_grad else None
    trainer.model.eval()
    trainer.first_pack = FirstPack(trainer, first_pack_of(trainer, 0))
    assert "the first pack agrees with" in check(trainer) and not trainer.model.training


def test_a_model_that_is_on_packs_already_is_not_compared(make_trainer):
    trainer = make_trainer()
    with packed_attention(trainer.model):
        assert first_pack_of(trainer, 0) is None
        with packed_attention(trainer.model):
            pass
        assert packs.is_on_packs(trainer.model)
    assert not packs.is_on_packs(trainer.model)


def test_what_cannot_be_compared_with_rows_is_left_out(make_trainer, monkeypatch):
    assert first_pack_of(make_trainer(lora_dropout=0.1), 0) is None
    trainer = make_trainer()
    last = 3 * trainer.train_sampler.num_steps - 1
    assert first_pack_of(trainer, 0) and first_pack_of(trainer, last) and first_pack_of(trainer, last + 1) is None
    trainer.args.neftune_noise_alpha = 5
    assert first_pack_of(trainer, 0) is None
    trainer.args.neftune_noise_alpha = None
    trainer.collator.pads_to_blocks = False
    assert first_pack_of(trainer, 0) is None, "there is no GPU"
    trainer.collator.pads_to_blocks = True
    monkeypatch.setenv(VARIABLE, "off")
    assert first_pack_of(trainer, 0) is None


def on_gpu(test):
    for mark in COMPILED_ON_GPU:
        test = mark(test)
    return test


def trained(make_run, **options: Any) -> list[str]:
    """The notes of a training on the GPU."""
    notes: list[str] = []
    train(make_run(train=options | {"steps": 2}), notify=notes.append)
    return [note for note in notes if "the first pack agrees with" in note]


@on_gpu
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp32"},
        {"precision": "fp16"},
        {"precision": "bf16", "gradient_checkpointing": True},
        {"precision": "bf16", "compile": False, "flex_attention": False},
    ],
)
def test_a_training_on_a_gpu_checks_its_first_pack(make_cached_run, options):
    assert trained(make_cached_run, **options)


@on_gpu
def test_a_training_on_a_gpu_stops_before_its_first_step_if_branches_see_each_other(make_cached_run, monkeypatch):
    monkeypatch.setattr(attention, "attends", lambda q, k, seen_until_k: k <= q)
    monkeypatch.setattr(packs, "_MASKS", {})
    torch._dynamo.reset()  # the right mask function is compiled in
    try:
        with pytest.raises(TrainingError, match="packs are not exact on this machine"):
            trained(make_cached_run, precision="bf16")
    finally:
        torch._dynamo.reset()


def test_long_rows_do_not_make_passes_of_short_ones_small():
    lengths = (340, 2060, 410, 2059, 339)
    rows = [Example(np.ones(length, np.int32), np.ones(length, bool), (), (), "") for length in lengths]
    passes = of_similar_length(rows, max_tokens=4403)
    assert [[row.num_tokens for row in each] for each in passes] == [[339, 340, 410], [2059, 2060]]
    assert [len(each) for each in of_similar_length(rows, max_tokens=100)] == [1] * 5
