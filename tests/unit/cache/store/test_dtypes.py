"""Storage: what is packed comes back, in 8 bits within a bound that no neighbour and no outlier can break."""

from __future__ import annotations

import math

import pytest
import torch

from lookonce.cache.constants import DtypeName
from lookonce.cache.store.dtypes import STORAGE, scales

FP8 = STORAGE["fp8_e4m3"]
LARGEST = 448.0
TOKENS, LEVELS, HIDDEN = 40, 4, 256


def normal(tokens: int = TOKENS, *, hidden: int = HIDDEN, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, LEVELS, hidden, generator=generator).bfloat16()


def through(features: torch.Tensor) -> torch.Tensor:
    return FP8.unpack(*FP8.pack(features))


def errors(features: torch.Tensor) -> torch.Tensor:
    """Of each token and level, the length of the error relative to that of the vector."""
    exact = features.double()
    return (through(features).double() - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unscaled_features_are_stored_bit_for_bit(dtype: DtypeName) -> None:
    storage = STORAGE[dtype]
    features = torch.randn(5, LEVELS, HIDDEN).to(storage.compute)
    features[0, 0, :3] = torch.tensor([math.nan, math.inf, -0.0])
    [stored] = storage.pack(features)
    assert stored.dtype == storage.stored == storage.compute
    assert torch.equal(storage.unpack(stored, None).view(torch.uint8), features.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "levels", "hidden", "expected"),
    [
        ("bfloat16", 4, 2048, 4 * 2048 * 2),
        ("float32", 4, 2048, 4 * 2048 * 4),
        ("fp8_e4m3", 4, 2048, 4 * (2048 + 4)),
        ("fp8_e4m3", 1, 4096, 4096 + 4),
    ],
)
def test_bytes_of_a_token_are_those_of_what_is_packed(dtype, levels, hidden, expected):
    storage = STORAGE[dtype]
    assert storage.bytes_per_token(levels, hidden) == expected
    parts = storage.pack(torch.ones(3, levels, hidden, dtype=storage.compute))
    assert sum(part.nbytes for part in parts) == 3 * expected


def test_eight_bits_have_a_scale_for_each_token_and_level():
    stored, scale = FP8.pack(normal())
    assert (stored.dtype, stored.shape) == (torch.float8_e4m3fn, (TOKENS, LEVELS, HIDDEN))
    assert (scale.dtype, scale.shape) == (torch.float32, (TOKENS, LEVELS))
    assert torch.equal(scale, normal().float().abs().amax(-1) / LARGEST)
    back = FP8.unpack(stored, scale)
    assert (back.dtype, back.shape) == (torch.bfloat16, (TOKENS, LEVELS, HIDDEN))


def test_the_largest_value_of_each_vector_takes_the_end_of_the_range_and_keeps_its_value():
    features = normal()
    stored, scale = FP8.pack(features)
    assert torch.equal(stored.float().abs().amax(-1), torch.full((TOKENS, LEVELS), LARGEST))
    largest = features.abs().argmax(-1, keepdim=True)
    assert torch.equal(FP8.unpack(stored, scale).gather(-1, largest), features.gather(-1, largest))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e6, 1e30])
def test_the_error_is_a_few_percent_of_a_vector_whatever_its_length(magnitude, seed):
    relative = errors(normal(hidden=2048, seed=seed) * magnitude)
    assert 0.01 < relative.min() and relative.max() < 0.04
    assert relative.mean() == pytest.approx(0.026, abs=0.002)


def test_a_token_does_not_change_with_its_neighbours():
    features = normal()
    alone = torch.cat([through(token.unsqueeze(0)) for token in features])
    assert torch.equal(through(features), alone)


def test_an_outlier_costs_no_other_token_and_no_other_level_its_precision():
    features = normal()
    before = through(features)
    features[7, 2] *= 1e4
    after = through(features)
    mask = torch.ones(TOKENS, LEVELS, dtype=torch.bool)
    mask[7, 2] = False
    assert torch.equal(after[mask], before[mask])
    assert errors(features).max() < 0.04


def test_zero_tokens_stay_zero():
    features = normal()
    features[3] = 0
    features[5, 1] = -0.0
    stored, scale = FP8.pack(features)
    assert (scale[3] == 1).all() and scale[5, 1] == 1
    back = FP8.unpack(stored, scale)
    assert (back[3] == 0).all() and (back[5, 1] == 0).all()
    assert (back[4] != 0).any()


def test_no_tokens_are_stored_as_nothing():
    stored, scale = FP8.pack(normal(0))
    assert (stored.nbytes, scale.nbytes) == (0, 0)
    assert FP8.unpack(stored, scale).shape == (0, LEVELS, HIDDEN)


def test_every_finite_bfloat16_stays_finite_and_near():
    """All of them as the largest value of a token, beside a thousandth of it."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    largest = every[every.isfinite()]
    features = torch.stack([largest, (largest.double() / 1000).bfloat16()], dim=-1).unsqueeze(1)
    back = through(features)
    assert back.isfinite().all()
    assert FP8.pack(features)[0].float().isfinite().all()
    difference = (back.double() - features.double()).abs().amax(-1)
    assert (difference <= largest.double().abs().unsqueeze(-1) * 2**-8).all()


def test_scales_divide_nothing_by_zero():
    assert torch.equal(scales(torch.tensor([[[0.0, -0.0], [2.0, -4.48]]])), torch.tensor([[1.0, 4.48 / LARGEST]]))
