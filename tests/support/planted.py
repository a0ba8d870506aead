"""Faults of packs that are planted in the product, which the self-test and the check before a training must find."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lookonce.train.data import batches
from lookonce.train.model import attention, loss, packs
from lookonce.train.model.packs import FEATURES, CapturedPasses

Plant = Callable[[pytest.MonkeyPatch], None]
BUFFERS = ("input_ids", "position_ids", "seen_until", "logits_to_keep", "targets", "weights", FEATURES)


def branches_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    dense_mask = attention.dense_mask
    monkeypatch.setattr(attention, "dense_mask", lambda ends, *rows: dense_mask(ends.cummax(0).values, *rows))


def a_mask_that_is_off_by_one_where_a_prefix_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    dense_mask = attention.dense_mask

    def shorter(seen_until: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        """The last token of a prefix counts as one of the branch that follows."""
        following = torch.cat([seen_until[1:], seen_until[-1:]])
        return dense_mask(torch.where(following < seen_until, following, seen_until), *rows)

    monkeypatch.setattr(attention, "dense_mask", shorter)


def a_gradient_scaled_by_a_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted_loss = loss.weighted_loss

    def scaled(*tensors: torch.Tensor) -> torch.Tensor:
        right = weighted_loss(*tensors)
        return right + 1e-3 * (right - right.detach())

    monkeypatch.setattr(loss, "weighted_loss", scaled)


def wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix_positions = batches.prefix_positions

    def shifted(*arguments: Any) -> Any:
        positions, start = prefix_positions(*arguments)
        return positions, start + 1

    monkeypatch.setattr(batches, "prefix_positions", shifted)


def an_old_input(stale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In replays: everything is copied when a buffer is new, and this one tensor never again."""
    copy_into, seen = packs.copy_into, set()

    def forgetful(inputs: Any, batch: Any) -> None:
        kept = {stale} if id(inputs) in seen else set()
        before = inputs["weights"].clone()
        copy_into(inputs, {name: tensor for name, tensor in batch.items() if name not in kept})
        if stale == "weights" and kept:
            inputs["weights"].copy_(before)
        seen.add(id(inputs))

    monkeypatch.setattr(packs, "copy_into", forgetful)


def gradients_of_an_earlier_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    add_gradients = CapturedPasses.add_gradients

    def twice(self: Any, number: int, times: torch.Tensor) -> None:
        add_gradients(self, number, times)
        for weight, gradient in zip(self._trained, self._gradients, strict=True):
            weight.grad += gradient

    monkeypatch.setattr(CapturedPasses, "add_gradients", twice)


def a_replay_that_returns_its_first_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(function: Any) -> Any:
        first = function()
        return lambda: first

    monkeypatch.setattr(packs, "run_again", once)


IN_ALL: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        branches_that_see_each_other,
        a_mask_that_is_off_by_one_where_a_prefix_ends,
        a_gradient_scaled_by_a_thousandth,
        wrong_positions,
    )
}
IN_REPLAYS: dict[str, Plant] = {
    **{f"old {name}": partial(an_old_input, name) for name in BUFFERS},
    **{plant.__name__: plant for plant in (gradients_of_an_earlier_pass, a_replay_that_returns_its_first_result)},
}
