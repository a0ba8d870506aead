"""The self-test finds wrong masks, wrong block lists and wrong gradients of the attention."""

from __future__ import annotations

import pytest
import torch

from lookonce.selftest import model as checked
from lookonce.selftest.model import Heads, PackToMask, allowed, attention_checks, mask_checks
from lookonce.train.data.packing import BLOCK, Group, Pack, padded_length
from lookonce.train.model import attention

pytestmark = pytest.mark.guarantee(
    "The self-test finds transposed block lists, wrong masks, scaled gradients and stale buffers of a captured"
    " graph, and passes where there are none."
)

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 16)
LISTS = ("block lists by row: wrong entries", "block lists by column: wrong entries")
ORIGINAL = {name: getattr(attention, name) for name in ("_block_indices", "dense_mask", "attends")}


def group(prefix: int, branches: tuple[int, ...], shared: tuple[int, ...] = ()) -> Group:
    return Group(tuple(range(len(branches))), prefix, prefix, branches, shared_tokens=shared)


def to_mask(*groups: Group) -> PackToMask:
    """A pack with the column that follows from the definition."""
    length = padded_length(sum(one.num_tokens for one in groups))
    by_definition = allowed(Pack(groups), length, CPU)
    return PackToMask((by_definition * torch.arange(1, length + 1)[:, None]).amax(0).int(), by_definition)


PACKS = [to_mask(group(200, (33, 20, 60), (0, 9, 19)), group(129, (5,))), to_mask(group(0, (70, 20)), group(31, (99,)))]


def masks() -> dict[str, bool]:
    """Whether each check of masks is passed."""
    return {check.what: check.ok for check in mask_checks(PACKS)}


def results(dtype: torch.dtype = torch.float32) -> dict[str, bool]:
    """Whether each result of the attention is within its spread."""
    return {check.what.partition(": ")[2]: check.ok for check in attention_checks(PACKS, HEADS, dtype, "any")}


def test_a_row_sees_its_prefix_itself_and_what_it_shares_with_the_row_before():
    """The second branch begins with the first token of the first one, the third with two of the second."""
    _, by_definition = to_mask(group(1, (2, 3, 3), (0, 1, 2)), group(0, (1,)))
    assert len(by_definition) == 2 * BLOCK
    assert by_definition[:7, :7].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [1, 1, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def test_what_is_right_passes():
    assert set(masks().values()) == {True}
    for dtype in (torch.float32, torch.bfloat16):
        assert set(results(dtype).values()) == {True}


def transposed(blocks: torch.Tensor) -> torch.Tensor:
    return ORIGINAL["_block_indices"](blocks.T)


def by_column_as_by_row(blocks: torch.Tensor) -> torch.Tensor:
    return ORIGINAL["_block_indices"](blocks if blocks.is_contiguous() else blocks.T)


def not_contiguous(blocks: torch.Tensor) -> torch.Tensor:
    """FlexAttention reads them wrongly, without an error."""
    numbers, indices = ORIGINAL["_block_indices"](blocks)
    return numbers, indices.mT.contiguous().mT


@pytest.mark.parametrize(
    ("wrong", "passed"),
    [(transposed, [False, False]), (by_column_as_by_row, [True, False]), (not_contiguous, [False, False])],
)
def test_wrong_block_lists_are_found(monkeypatch, wrong, passed):
    monkeypatch.setattr(attention, "_block_indices", wrong)
    found = masks()
    assert [found[name] for name in LISTS] == passed and found["mask function: wrong entries"]


def one_late(seen_until: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """A mask in which what is seen ends one token too late: the next branch begins with a token of the one before."""
    return ORIGINAL["dense_mask"](torch.where(seen_until < len(seen_until), seen_until + 1, seen_until), *rows)


def branches_see_each_other(seen_until: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """A mask in which all that is seen at all is seen to the end of its image."""
    return ORIGINAL["dense_mask"](seen_until.flip(0).cummax(0).values.flip(0).clamp(min=int(seen_until[0])), *rows)


@pytest.mark.parametrize("wrong", [one_late, branches_see_each_other], ids=lambda wrong: wrong.__name__)
def test_wrong_masks_are_found_in_all_results(monkeypatch, wrong):
    monkeypatch.setattr(attention, "dense_mask", wrong)
    assert set(results().values()) == {False}


def test_a_wrong_mask_function_is_found(monkeypatch):
    monkeypatch.setattr(attention, "attends", lambda q, k, seen_until_k: (k <= q) & (q <= seen_until_k))
    assert not masks()["mask function: wrong entries"]


class Scaled(torch.autograd.Function):
    """The same tensor with a gradient that is a thousandth too large."""

    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * 1.001


def test_a_scaled_gradient_of_the_keys_is_found_by_a_thousandth(monkeypatch):
    def scaled(layer, query, key, value, mask, **options):
        return attention.shared_prefix_attention(layer, query, Scaled.apply(key), value, mask, **options)

    monkeypatch.setattr(checked, "shared_prefix_attention", scaled)
    assert [name for name, ok in results().items() if not ok] == ["gradient of keys"]
