"""The loss sums cross-entropies by their weights; the last layer, computed for some tokens, gives the stock one's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.trainings import with_random_lora
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import cross_entropy

from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.train.data.batches import IGNORED
from lookonce.train.data.packing import BLOCK
from lookonce.train.model import attention, loss
from lookonce.train.model.attention import PackMask, dense_mask, shared_prefix_attention
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.load import text_model
from lookonce.train.model.loss import REWARD_KEYS, RewardLoss, forward_loss, short_last_layer, weighted_loss

CPU = torch.device("cpu")
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def model(sample_model) -> Any:
    return with_random_lora(sample_model)


def pack() -> dict[str, torch.Tensor]:
    """A prefix of 10 tokens, two branches of 8 and padding; the first tokens of both are predicted from the prefix."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.tensor([9, 13, 9, 20, 24, 20])
    return {
        "input_ids": torch.randint(5, 90, (1, NUM_TOKENS), generator=generator),
        "position_ids": torch.tensor([*range(18), *range(10, 18), *range(4)]).expand(3, 1, -1),
        "seen_until": torch.tensor([26] * 10 + [18] * 8 + [26] * 8 + [30] * 4),
        "logits_to_keep": keep,
        "targets": torch.randint(5, 90, (1, len(keep)), generator=generator),
        "weights": torch.rand(1, len(keep), generator=generator),
    }


def loss_and_gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = forward_loss(model, pack(), PackMask(NUM_TOKENS, CPU))
    loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.requires_grad)]


@pytest.mark.guarantee(
    "The last layer, computed for some tokens only, has the loss and gradients of the stock layer, in each family."
)
def test_loss_and_gradients_are_those_of_the_stock_layer(model, monkeypatch):
    seen = []
    text_model(model).norm.register_forward_hook(lambda *call: seen.append(call[-1].shape[1]))
    with training_on_packs(model, compiled=False):
        found = loss_and_gradients(model)
    monkeypatch.setitem(FAMILIES, DEFAULT.model_type, replace(DEFAULT, has_short_last_layer=False))
    with training_on_packs(model, compiled=False):
        expected = loss_and_gradients(model)
    assert seen == [len(pack()["logits_to_keep"]), NUM_TOKENS], "once for the tokens to predict from, and once for all"
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    assert any(gradient.abs().max() > 1e-3 for gradient in found[1:])


def test_it_is_for_layers_that_it_knows_and_to_which_no_features_are_added(model, monkeypatch):
    layers, config = text_model(model).layers, model.config.vision_config
    with short_last_layer(model):
        assert "forward" in vars(layers[-1])
    assert "forward" not in vars(layers[-1])
    monkeypatch.setattr(config, "deepstack_visual_indexes", list(range(len(layers))))
    with short_last_layer(model):
        assert "forward" not in vars(layers[-1])


def test_without_tokens_to_predict_from_it_computes_all(model):
    batch = {name: tensor for name, tensor in pack().items() if name in ("input_ids", "position_ids")}
    with torch.no_grad():
        expected = model(**batch).logits
        with short_last_layer(model):
            assert torch.equal(model(**batch).logits, expected)


def test_gradients_of_repeated_tokens_are_added():
    x = torch.randn(1, 4, 3, requires_grad=True)
    indices, gradient = torch.tensor([2, 0, 2, 2]), torch.randn(1, 4, 3)
    rows = loss._Rows.apply(x, indices)
    assert torch.equal(rows, x[:, indices])
    rows.backward(gradient)
    expected = torch.zeros(1, 4, 3).index_add(1, indices, gradient)
    torch.testing.assert_close(x.grad, expected)


def test_blocks_of_some_queries_follow_the_dense_mask(monkeypatch):
    """FlexAttention in its eager mode for debugging, as there is no GPU to compile for."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention, "_compiled", lambda: flex_attention)
    generator, length = torch.Generator().manual_seed(0), 4 * BLOCK
    column = torch.tensor([300] * 150 + [230] * 80 + [300] * 70 + [length] * (length - 300))
    rows = torch.randint(length, (2 * BLOCK,), generator=generator).sort().values
    rows[-40:] = 0  # what a captured pass is padded with
    mask, layer = PackMask(length, CPU), SimpleNamespace(num_key_value_groups=2, is_causal=False)
    expected = dense_mask(column)[:, :, rows]
    assert torch.equal(mask.of_rows(rows, column), expected), "on a CPU it is dense"
    mask.is_dense = False
    mask.blocks(column)
    blocks = mask.of_rows(rows, column)
    assert torch.equal(create_mask(blocks.mask_mod, None, None, len(rows), length, "cpu")[0, 0], expected[0, 0])
    assert not blocks.to_dense().all(), "blocks without pairs are not computed"
    tensors = [
        torch.randn(1, n, size, 16, generator=generator) for n, size in ((4, len(rows)), (2, length), (2, length))
    ]
    found, _ = shared_prefix_attention(layer, *tensors, blocks, scaling=0.3)
    right, _ = shared_prefix_attention(layer, *tensors, expected, scaling=0.3)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_the_loss_equals_that_of_shifted_labels_over_all_positions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator)
    input_ids = torch.randint(0, 11, (3, 8), generator=generator)
    supervised = torch.rand(3, 8, generator=generator) < 0.4
    targets = torch.where(supervised, input_ids, IGNORED)[:, 1:]
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    columns = (targets != IGNORED).any(dim=0).nonzero().flatten()
    weights = torch.full((3, len(columns)), 1 / int((targets != IGNORED).sum()))
    torch.testing.assert_close(weighted_loss(logits[:, columns], targets[:, columns], weights), expected)


def test_without_targets_the_loss_is_0_and_has_a_gradient():
    logits = torch.zeros(1, 2, 5, requires_grad=True)
    loss = weighted_loss(logits, torch.full((1, 2), IGNORED), torch.zeros(1, 2))
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()


def test_half_precision_logits_are_summed_in_float32():
    logits, targets = torch.randn(1, 3000, 7).bfloat16(), torch.ones(1, 3000, dtype=torch.long)
    weights = torch.full((1, 3000), 1 / 3000)
    found = weighted_loss(logits, targets, weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, cross_entropy(logits[0].double(), targets[0]).float())


def test_the_model_gets_the_mask_and_no_targets():
    seen_until = torch.tensor([3, 2, 3])
    batch = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "seen_until": seen_until,
        "logits_to_keep": torch.tensor([0, 1]),
        "targets": torch.tensor([[1, 2]]),
        "weights": torch.tensor([[0.5, 0.25]]),
    }
    model = Mock(["model"], return_value=SimpleNamespace(logits=torch.zeros(1, 2, 4)))  # all tokens are as probable
    model.model = SimpleNamespace(language_model=SimpleNamespace(layers=[SimpleNamespace()]))
    loss = forward_loss(model, batch, PackMask(3, torch.device("cpu")))
    torch.testing.assert_close(loss, 0.75 * torch.log(torch.tensor(4.0)))
    given = model.call_args.kwargs
    assert given.keys() == {"input_ids", "attention_mask", "logits_to_keep", "use_cache"}
    assert torch.equal(given["attention_mask"], dense_mask(seen_until)) and given["use_cache"] is False


GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e38, -1e38]


@pytest.mark.parametrize("of_rewards", [RewardLoss(), RewardLoss(kl=0.3, temperature=0.5)])
def test_targets_without_weight_have_no_effect_on_the_loss_of_rewards_whatever_they_have(of_rewards):
    generator, num_targets = torch.Generator().manual_seed(0), 6
    logits = torch.randn(1, num_targets, 7, generator=generator)
    batch = {name: torch.randn(1, num_targets, generator=generator) for name in ("weights", *REWARD_KEYS)}
    batch["targets"] = torch.randint(7, (1, num_targets), generator=generator)
    stale = torch.tensor(GARBAGE)[None]

    def computed(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        logits = logits.clone().requires_grad_()
        loss = of_rewards(logits, batch)
        loss.backward()
        return [loss, logits.grad[:, :num_targets], batch["log_probs"][:, :num_targets]]

    expected = computed(logits, batch)
    padded = {name: torch.cat([tensor, stale], dim=1) for name, tensor in batch.items() if name in REWARD_KEYS}
    padded["weights"] = torch.cat([batch["weights"], torch.zeros_like(stale)], dim=1)
    padded["targets"] = torch.cat([batch["targets"], torch.tensor([[IGNORED, 0, 1, 2, IGNORED]])], dim=1)
    found = computed(torch.cat([logits, torch.randn(1, len(GARBAGE), 7, generator=generator)], dim=1), padded)
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)
