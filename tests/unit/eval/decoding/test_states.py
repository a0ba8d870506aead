"""States that passes keep and continue give each conversation what the stock layer gives it by itself."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.flash_linear_attention import take_stand_in
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from lookonce.eval.decoding.batches import PADDING, Branches, state_rows
from lookonce.eval.decoding.buffers import Continued, KeyValues, OfPrompts, bytes_per_state
from lookonce.eval.decoding.sampling import Chooser
from lookonce.families.kernels import restrict_kernels
from lookonce.train.model.linear_attention import InPack, states_of_branches

TOLERANCE = 1e-4
"""In float32; the norm in these layers enlarges rounding."""
HIDDEN = 16
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
SIZES = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
CONFIG = Qwen3_5TextConfig(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["linear_attention"], **SIZES)


@cache
def hybrid() -> Any:
    """A model of one such layer, without weights of anything else."""
    restrict_kernels(modeling_qwen3_5)
    torch.manual_seed(0)
    layer = modeling_qwen3_5.Qwen3_5GatedDeltaNet(CONFIG, 0).requires_grad_(False)
    layer.A_log.copy_(torch.linspace(0.01, 1, 4).log())
    text = SimpleNamespace(layers=[SimpleNamespace(linear_attn=layer), SimpleNamespace()], config=CONFIG)
    config, device = SimpleNamespace(model_type="qwen3_5"), torch.device("cpu")
    return SimpleNamespace(model=SimpleNamespace(language_model=text), config=config, device=device)


def layer_of(model: Any) -> Any:
    return model.model.language_model.layers[0].linear_attn


class Batch:
    """Conversations about one image, their inputs so far, and their states."""

    def __init__(self, prefix: int, lengths: list[int], num_states: int | None = None) -> None:
        self.generator = torch.Generator().manual_seed(prefix + len(lengths))
        self.states = KeyValues(hybrid(), 0, num_states or 1 + len(lengths), torch.float32)
        self.rows = state_rows(torch.arange(len(lengths)))
        shared = self.inputs(prefix)
        own = [self.inputs(length) for length in lengths]
        ends = np.cumsum([prefix, *lengths])
        seen_until = np.repeat([ends[-1], *ends[1:]], [prefix, *lengths])
        pack = InPack.of(hybrid(), torch.from_numpy(seen_until.astype(np.int32)))
        self.so_far = [torch.cat([shared, one]) for one in own]
        self.check(torch.cat([shared, *own]), OfPrompts(pack, torch.from_numpy(ends[1:] - 1), self.rows), ends[1:] - 1)

    def inputs(self, length: int) -> torch.Tensor:
        return torch.randn(length, HIDDEN, generator=self.generator)

    def check(self, inputs: torch.Tensor, sequences: Any, last: Any) -> None:
        """Run a pass, and compare its results at the last token of each conversation."""
        with states_of_branches(hybrid()), self.states.attached():
            found = layer_of(hybrid())(inputs[None], attention_mask=sequences)[0, last]
        expected = torch.stack([layer_of(hybrid())(one[None])[0, -1] for one in self.so_far])
        assert (found - expected).norm() < TOLERANCE * expected.norm()

    def continues(self, padding: int = 0) -> None:
        """Add a token to each conversation; branches that have ended are padding."""
        count = len(self.so_far)
        own = [self.inputs(1) for _ in range(count)]
        self.so_far = [torch.cat(pair) for pair in zip(self.so_far, own, strict=True)]
        branches = branches_of([*range(count), *[0] * padding], [*[False] * count, *[True] * padding])
        self.check(torch.cat([*own, self.inputs(padding)]), Continued.of(branches), slice(count))


@pytest.mark.guarantee(
    "States of linear attention that passes keep and continue give each conversation what the stock layer "
    "gives it by itself."
)
@settings(max_examples=20)
@given(prefix=st.integers(1, 150), lengths=LENGTHS, padding=st.integers(0, 3))
def test_conversations_continue_as_if_each_were_computed_from_its_beginning(prefix, lengths, padding):
    batch = Batch(prefix, lengths)
    for _ in range(3):
        batch.continues(padding)


def test_calls_keep_to_what_flash_linear_attention_takes(monkeypatch):
    calls = take_stand_in(monkeypatch)
    batch = Batch(9, [2, 3])
    with torch.inference_mode():
        batch.continues()
    assert "recurrent" in calls


def branches_of(examples: list[int], ended: list[bool]) -> Branches:
    unused = Branches.unused(len(examples), 0, 4, Chooser(2), torch.device("cpu"))
    unused.examples.copy_(torch.tensor(examples))
    unused.ended.copy_(torch.tensor(ended))
    return unused


@pytest.mark.guarantee("An ended answer or another conversation changes no state of linear attention.")
def test_only_branches_that_go_on_change_their_states_and_unused_rows_none():
    batch, other = Batch(9, [2, 3, 4], num_states=6), Batch(9, [2, 3, 4], num_states=6)
    tokens = batch.inputs(4)
    with states_of_branches(hybrid()), batch.states.attached():
        layer_of(hybrid())(tokens[None], attention_mask=Continued.of(branches_of([2, 0, 1, -1], [0, 1, 0, 1])))
    for (_, _, mine), (_, _, before) in zip(batch.states.buffers, other.states.buffers, strict=True):
        changed = [row for row in range(6) if not torch.equal(mine[row], before[row])]
        assert changed == [PADDING, *state_rows(torch.tensor([1, 2])).tolist()]


def test_the_memory_of_a_state_is_counted():
    buffers = [buffer for _, _, buffer in KeyValues(hybrid(), 0, 7, torch.bfloat16).buffers]
    assert sum(buffer.numel() * buffer.itemsize for buffer in buffers) == 7 * bytes_per_state(CONFIG, torch.bfloat16)
    assert bytes_per_state(CONFIG, torch.bfloat16, num_more=2) == 3 * bytes_per_state(CONFIG, torch.bfloat16)


def test_a_model_without_such_layers_has_no_states_and_always_room():
    text = SimpleNamespace(layers=[SimpleNamespace()], config=CONFIG)
    model = SimpleNamespace(model=SimpleNamespace(language_model=text), device=torch.device("cpu"))
    keys = KeyValues(model, 0, 3, torch.float32)
    assert keys.has_room(0, 9) and keys.buffers == [] and not KeyValues(hybrid(), 0, 3, torch.float32).has_room(0, 4)
    assert bytes_per_state(SimpleNamespace(num_hidden_layers=4), torch.float32) == 0
