"""A layer of linear attention over a pack of any depth gives what the stock layer gives each branch by itself."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.flash_linear_attention import take_stand_in
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from lookonce.families.kernels import restrict_kernels
from lookonce.train.model import linear_attention
from lookonce.train.model.attention import dense_mask
from lookonce.train.model.compile import for_all_lengths
from lookonce.train.model.linear_attention import LINEAR, masks_of, segments_of, states_of_branches

TOLERANCE = 1e-4
"""In float32; the norm in these layers enlarges rounding."""


@cache
def hybrid() -> Any:
    """A model of one such layer, without weights of anything else."""
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    config = Qwen3_5TextConfig(hidden_size=16, num_hidden_layers=1, linear_num_value_heads=4, **sizes)
    restrict_kernels(modeling_qwen3_5)
    torch.manual_seed(0)
    layer = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0).requires_grad_(False)
    layer.A_log.copy_(torch.linspace(0.01, 1, 4).log())
    text = SimpleNamespace(layers=[SimpleNamespace(linear_attn=layer), SimpleNamespace()])
    return SimpleNamespace(model=SimpleNamespace(language_model=text), config=SimpleNamespace(model_type="qwen3_5"))


def layer_of(model: Any) -> Any:
    return model.model.language_model.layers[0].linear_attn


@st.composite
def packs(draw: st.DrawFn) -> torch.Tensor:
    """`seen_until` of a pack of up to two images: chains of prefixes, each with a short branch; then padding."""
    ends: list[int] = []
    for lengths in draw(st.lists(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 5)), min_size=1), max_size=2)):
        begin, total = len(ends), sum(map(sum, lengths))
        for length, aside in lengths:
            ends += [begin + total] * length
            ends += [len(ends) + aside] * aside
    return torch.tensor([*ends, len(ends) + 1], dtype=torch.int32)


@pytest.mark.guarantee(
    "Packs through layers of linear attention have the same loss and LoRA gradients as stock rows, to 1e-10 in float64."
)
@pytest.mark.guarantee(
    "Rows that are passed to a kernel as one row, and sequences that are passed to PyTorch as rows, have the "
    "results, states and gradients that each has by itself."
)
@settings(max_examples=15)
@given(seen_until=packs())
def test_each_token_has_the_result_and_gradient_of_its_own_sequence(seen_until):
    assert_exact(seen_until, TOLERANCE)


def assert_exact(seen_until: torch.Tensor, tolerance: float, *, compiled: bool = False) -> None:
    """Compare a pack with the sequences of its last tokens by the stock layer."""
    model, length = hybrid(), len(seen_until)
    generator = torch.Generator().manual_seed(length)
    pack = torch.randn(1, length, 16, generator=generator, requires_grad=True)
    wanted = torch.randn(length, 16, generator=generator)
    allowed = dense_mask(seen_until)[0, 0]
    expected = torch.zeros(length, 16)
    for token in range(length):  # the last tokens of branches, whose sequences have all others
        path = allowed[token].nonzero()[:, 0]
        if token + 1 == length or not allowed[token + 1, token]:
            expected = expected.index_copy(0, path, layer_of(model)(pack[:, path])[0])
    (expected * wanted).sum().backward()
    right, pack.grad = pack.grad, None
    with states_of_branches(model, compiled=compiled):
        found = layer_of(model)(pack, attention_mask=masks_of(model, "mask", seen_until)[LINEAR])[0]
    (found * wanted).sum().backward()
    assert (found - expected).norm() < tolerance * expected.norm()
    assert (pack.grad - right).norm() < tolerance * right.norm()


NESTED = torch.tensor([165] * 75 + [150] * 70 + [148] * 3 + [150] * 2 + [165] * 15 + [166], dtype=torch.int32)
"""A pack of three depths, then padding."""
LONGER = torch.tensor([175] * 80 + [155] * 70 + [153] * 3 + [155] * 2 + [175] * 20 + [176], dtype=torch.int32)


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, TOLERANCE), (True, 0.05)])
def test_calls_keep_to_what_flash_linear_attention_takes(monkeypatch, bf16, tolerance):
    """In bfloat16 as in training."""
    calls = take_stand_in(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert_exact(NESTED, tolerance)
    packs, rows = calls[-3:], calls[:-3]
    assert packs == ["chunk, state", "chunk, state", "chunk"] and {*rows} == {"chunk"}  # states that are continued


def test_what_pytorch_computes_is_computed_again_instead_of_stored(monkeypatch):
    """Less than half of a layer's activations stay."""
    kept = {}
    for again in (True, False):
        if not again:
            monkeypatch.setattr(linear_attention, "checkpoint", lambda run, *args, **options: run(*args))
        model, pack = hybrid(), torch.randn(1, len(NESTED), 16, requires_grad=True)
        with states_of_branches(model), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = layer_of(model)(pack, attention_mask=masks_of(model, "mask", NESTED)[LINEAR])
        kept[again] = sum(event.self_cpu_memory_usage for event in profiled.key_averages())
        del result
    assert 0 < kept[True] < kept[False] / 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_parts_are_compiled_once_for_packs_of_all_lengths(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # without a C++ compiler
    before = counters["stats"]["unique_graphs"]
    with for_all_lengths():
        for pack in (NESTED, LONGER):
            assert_exact(pack, TOLERANCE, compiled=True)
    assert counters["stats"]["unique_graphs"] == before + 2


def test_only_packs_are_computed_in_segments_and_all_is_undone():
    model, rows = hybrid(), torch.randn(3, 9, 16)
    expected = layer_of(model)(rows)
    with states_of_branches(model):
        assert torch.equal(layer_of(model)(rows), expected)
        with states_of_branches(model):
            assert "forward" in vars(layer_of(model))
        assert "forward" in vars(layer_of(model))
    assert "forward" not in vars(layer_of(model))


def test_a_model_without_such_layers_gets_the_mask_alone():
    text = SimpleNamespace(layers=[SimpleNamespace()])
    model = SimpleNamespace(model=SimpleNamespace(language_model=text))
    mask = torch.ones(1, 1, 2, 2)
    assert masks_of(model, mask, torch.tensor([2, 2])) is mask


TREES = st.recursive(st.just([]), lambda children: st.lists(st.tuples(st.integers(1, 4), children), max_size=3))
"""Branches with their lengths and their own branches."""


def seen_until(trees: list, start: int = 0) -> list[int]:
    """The index before which later tokens attend to each token, in a pack of these trees."""
    found: list[int] = []
    for length, branches in trees:
        inner = seen_until(branches, start + len(found) + length)
        end = start + len(found) + length + len(inner)
        found += [end] * length + inner
    return found


@pytest.mark.guarantee("A pack is cut into segments that continue one another as its mask says, at any depth.")
@given(
    trees=TREES.filter(len), padding=st.integers(0, 3), num_before=st.integers(0, 4), short=st.sampled_from([0, 2, 9])
)
def test_the_tokens_of_a_sequence_are_those_that_its_last_one_attends_to(trees, padding, num_before, short):
    ends = seen_until(trees)
    ends = torch.tensor(ends + [len(ends) + padding] * padding, dtype=torch.int32)
    segments, allowed, length = segments_of(ends, num_before, short), dense_mask(ends)[0, 0], len(ends)
    paths, results, number = [], [], 0
    for at, depth in enumerate(segments.depths):
        whole, tokens, changing = [], depth.tokens.tolist(), depth.changing.tolist()
        ends = depth.ends.tolist()
        assert ends == depth.ends_on_cpu.tolist() and len(tokens) == num_before + len(changing) == num_before + ends[-1]
        last_end = ends.pop() + num_before
        for begin, end, parent in zip(ends, [*ends[1:], last_end], depth.parents.tolist(), strict=True):
            before, sequence = tokens[begin : begin + num_before], tokens[begin + num_before : end]
            assert changing[begin:end] == sequence + [length] * (num_before if end < last_end else 0)
            earlier = paths[-1][parent] if at else []
            whole.append(earlier + sequence)
            assert whole[-1] == allowed[sequence[-1]].nonzero()[:, 0].tolist()
            filled = [length] * num_before + earlier
            assert before == filled[len(filled) - num_before :]
            own = [token for token in sequence if segments.numbers[token] == number]
            assert own and own == sequence[-len(own) :]
            assert segments.last[number].tolist() == (filled + sequence)[len(filled + sequence) - num_before :]
            number += 1
        results += changing
        paths.append(whole)
    assert [results[place] for place in segments.places] == [*range(length)]


def test_what_continues_a_short_segment_has_its_tokens_again_and_begins_where_it_did():
    ends = torch.tensor([7, 7, 7, 5, 5, 7, 7])
    first, second = segments_of(ends, 1, short=2).depths
    assert first.tokens.tolist() == [7, 0, 1, 2]
    assert second.tokens.tolist() == [2, 3, 4, 2, 5, 6] and second.parents.tolist() == [0, 0]
    [only] = segments_of(ends, 1, short=3).depths
    assert only.tokens.tolist() == [7, 0, 1, 2, 7, 0, 1, 2, 3, 4, 7, 0, 1, 2, 5, 6]
    assert segments_of(ends, 1, short=3).places.tolist() == [0, 1, 2, 7, 8, 13, 14]
