"""The loss: cross-entropies summed with their target weights, so that micro-batches sum to the step's mean."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from lookonce.train.data.batches import IGNORED
from lookonce.train.model.attention import PackMask, dense_mask
from lookonce.train.model.loss import forward_loss, weighted_loss


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


class FakeModel:
    """A model that remembers its inputs, and gives all tokens the same probability."""

    model = SimpleNamespace(language_model=SimpleNamespace(layers=[SimpleNamespace()]))

    def __call__(self, **given: object) -> SimpleNamespace:
        self.given = given
        return SimpleNamespace(logits=torch.zeros(1, 2, 4))


def test_the_model_gets_the_mask_and_no_targets():
    seen_until = torch.tensor([3, 2, 3])
    batch = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "seen_until": seen_until,
        "logits_to_keep": torch.tensor([0, 1]),
        "targets": torch.tensor([[1, 2]]),
        "weights": torch.tensor([[0.5, 0.25]]),
    }
    model = FakeModel()
    loss = forward_loss(model, batch, PackMask(3, torch.device("cpu")))
    torch.testing.assert_close(loss, 0.75 * torch.log(torch.tensor(4.0)))
    assert model.given.keys() == {"input_ids", "attention_mask", "logits_to_keep", "use_cache"}
    assert torch.equal(model.given["attention_mask"], dense_mask(seen_until)) and model.given["use_cache"] is False
