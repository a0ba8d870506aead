"""Token merging keeps as many tokens as asked for, in order, and every token counts once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.cache.model.kept import num_kept
from lookonce.cache.model.merging import Merged, merge_image, merge_tokens

LEVELS, HIDDEN = 3, 4
QUICK = settings(max_examples=50, deadline=None)
shares = st.one_of(st.sampled_from([0.25, 0.5, 0.75, 1.0]), st.floats(0.01, 1))


@st.composite
def images(draw: st.DrawFn) -> torch.Tensor:
    """Features of an image; with a coarse grid of values there are equal tokens and equal similarities."""
    shape = draw(st.integers(1, 60)), LEVELS, HIDDEN
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    features = torch.randn(shape, generator=generator)
    return features.round() if draw(st.booleans()) else features


def merged(features: torch.Tensor, keep: float) -> Merged:
    return merge_image(features, num_kept(len(features), keep))


@QUICK
@given(images(), shares)
def test_the_share_is_kept_in_order(features, keep):
    found = merged(features, keep)
    expected = max(1, round(keep * len(features)))
    assert found.features.shape == (expected, LEVELS, HIDDEN) and found.features.dtype == features.dtype
    assert found.kept.dtype == torch.int32 and len(found.kept) == expected
    assert (found.kept.diff() > 0).all() and 0 <= found.kept[0] and found.kept[-1] < len(features)


@QUICK
@given(images(), shares)
def test_sizes_times_means_are_the_sum_of_all_tokens_in_every_level(features, keep):
    found = merged(features.double(), keep)
    assert found.sizes.sum() == len(features) and (found.sizes >= 1).all()
    total = (found.features * found.sizes.view(-1, 1, 1)).sum(0)
    torch.testing.assert_close(total, features.double().sum(0), rtol=1e-4, atol=1e-4)


@QUICK
@given(st.lists(images(), min_size=1, max_size=4), shares)
def test_an_image_does_not_depend_on_its_batch(batch, keep):
    features, kept = merge_tokens(torch.cat(batch), list(map(len, batch)), keep)
    alone = [merged(image, keep) for image in batch]
    assert torch.equal(features, torch.cat([image.features for image in alone]))
    assert torch.equal(kept, torch.cat([image.kept for image in alone]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeping_all_changes_no_bit(dtype):
    features = torch.randn(30, LEVELS, HIDDEN, dtype=dtype)
    found = merged(features, 1.0)
    assert torch.equal(found.features, features) and found.kept.tolist() == list(range(30))


def test_the_most_similar_pair_is_merged_and_its_second_set_keeps_the_place():
    """Tokens 2 and 5 are alike in level 0: 2 is in set A, 5 in B; level 1 is merged with them."""
    features = torch.eye(6).unsqueeze(1).repeat(1, 2, 1)
    features[2, 0] = features[5, 0] * 3
    found = merged(features, 5 / 6)
    assert found.kept.tolist() == [0, 1, 3, 4, 5] and found.sizes.tolist() == [1, 1, 1, 1, 2]
    assert torch.equal(found.features[4], (features[2] + features[5]) / 2)
    assert torch.equal(found.features[:4], features[[0, 1, 3, 4]])


def test_ties_go_to_the_first_tokens():
    found = merged(torch.ones(8, 1, 2), 0.75)
    assert found.kept.tolist() == [1, 3, 4, 5, 6, 7]
    assert found.sizes.tolist() == [3, 1, 1, 1, 1, 1]


def test_more_than_half_takes_several_rounds_with_sizes():
    """Four equal tokens become one; what weighs more in the second round is what was merged in the first."""
    features = torch.tensor([[0.0, 1], [0, 1], [0, 1], [1, 1]]).unsqueeze(1)
    found = merged(features, 0.25)
    assert found.kept.tolist() == [3] and found.sizes.tolist() == [4]
    torch.testing.assert_close(found.features[0], features.mean(0))


def test_what_is_not_finite_stays_so():
    """So the image is quarantined."""
    features = torch.randn(12, LEVELS, HIDDEN)
    features[3, 1, 2] = torch.inf
    assert not merged(features, 0.5).features.isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_has_the_same_bits_each_time_without_a_host_device_sync():
    counts = [600, 37, 1]
    features = torch.randn(sum(counts), 4, 256, device="cuda", dtype=torch.bfloat16)
    expected = merge_tokens(features, counts, 0.25)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = merge_tokens(features, counts, 0.25)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    alone = [merge_tokens(image, [len(image)], 0.25) for image in features.split(counts)]
    for one, same, parts in zip(expected, found, zip(*alone, strict=True), strict=True):
        assert torch.equal(one, same) and torch.equal(one, torch.cat(parts))
