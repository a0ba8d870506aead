"""Gradient checkpointing gives the same loss and gradients from fewer stored activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.trainings import with_random_lora

from lookonce.run.sections import Checkpointing
from lookonce.train.model import compile
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import checkpointed, training_on_packs
from lookonce.train.model.load import text_model
from lookonce.train.model.lora_joined import mlp_forward
from lookonce.train.model.loss import forward_loss

NUM_TOKENS = 30
HOW: tuple[Checkpointing, ...] = ("selective", True)


@pytest.fixture(scope="module")
def model(sample_model) -> Any:
    return with_random_lora(sample_model, dropout=0.2).train()


def pack() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(5, 90, (1, NUM_TOKENS), generator=generator),
        "position_ids": torch.arange(NUM_TOKENS).expand(3, 1, -1),
        "seen_until": torch.full((NUM_TOKENS,), NUM_TOKENS),
        "logits_to_keep": torch.arange(20, 26),
        "targets": torch.randint(5, 90, (1, 6), generator=generator),
        "weights": torch.rand(1, 6, generator=generator),
    }


def step(model: Any, how: Checkpointing) -> tuple[list[torch.Tensor], int]:
    """Loss and gradients, and the numbers that were stored for the backward pass."""
    stored: dict[int, int] = {}

    def store(tensor: torch.Tensor) -> torch.Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    torch.manual_seed(1)
    hooks = torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor)
    with training_on_packs(model, compiled=False), checkpointed(model, how):
        with hooks:
            loss = forward_loss(model, pack(), PackMask(NUM_TOKENS, torch.device("cpu")))
        loss.backward()
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.requires_grad]
    return [loss.detach(), *gradients], sum(stored.values())


def assert_the_same_from_less(model: Any) -> None:
    """Check that loss and gradients do not depend on the checkpointing, and that each way stores less than the last."""
    expected, most = step(model, False)
    for how in HOW:
        found, stored = step(model, how)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), how
        assert stored < 0.9 * most, how
        most = stored


@pytest.mark.guarantee("With gradient checkpointing, loss and gradients are bit-identical and less is stored.")
def test_loss_and_gradients_are_the_same_and_less_is_stored(model):
    assert_the_same_from_less(model)


def test_so_they_are_with_joined_matrices_whose_mlps_have_a_forward_method_of_their_own(sample_model, monkeypatch):
    monkeypatch.setattr(compile, "_joins", lambda model: True)
    model = with_random_lora(sample_model, dropout=0.0).train()
    assert_the_same_from_less(model)
    with training_on_packs(model, compiled=False):
        before = [layer.mlp.forward for layer in text_model(model).layers]
        with checkpointed(model, "selective"):
            assert all(layer.mlp.forward not in before for layer in text_model(model).layers[:-1])
        assert [layer.mlp.forward for layer in text_model(model).layers] == before
        assert all(forward.__func__ is mlp_forward for forward in before)


@pytest.mark.parametrize("how", HOW)
def test_the_last_layer_stays_as_it_is_and_the_others_are_again_after_the_block(model, how):
    def changed() -> list[bool]:
        return ["forward" in vars(layer) or "forward" in vars(layer.mlp) for layer in text_model(model).layers]

    with pytest.raises(KeyboardInterrupt), checkpointed(model, how):
        assert changed() == [True] * (len(changed()) - 1) + [False]
        raise KeyboardInterrupt
    assert not any(changed())


def test_without_gradients_nothing_is_prepared_for_a_backward_pass(model, monkeypatch):
    monkeypatch.setattr(compile, "checkpoint", lambda *args, **options: pytest.fail("it was"))
    with torch.no_grad(), training_on_packs(model, compiled=False), checkpointed(model, True):
        forward_loss(model, pack(), PackMask(NUM_TOKENS, torch.device("cpu")))
