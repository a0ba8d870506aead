"""On a GPU, FlexAttention over packs equals PyTorch's own attention with a dense mask, forward and backward."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from support.trainings import COMPILED_ON_GPU

from lookonce.selftest.model import Heads, PackToMask, allowed, attention_checks
from lookonce.train.data.packing import Group, Pack, padded_length
from lookonce.train.model.compile import num_compiled_graphs

pytestmark = COMPILED_ON_GPU

NUM_PACKS = 56
TOLERANCE = 1e-4


def random_group(rng: random.Random) -> Group:
    """One image or none, with 1 to 17 questions, which share tokens in half of the groups."""
    prefix, branches = (
        rng.choice([0, rng.randint(1, 300)]),
        tuple(rng.randint(1, 60) for _ in range(rng.randint(1, 17))),
    )
    shared = (0, *(rng.randint(0, min(before, this) - 1) for before, this in pairwise(branches)))
    return Group(tuple(range(len(branches))), prefix, prefix, branches, shared_tokens=rng.choice([(), shared]))


def random_pack(rng: random.Random) -> PackToMask:
    groups = tuple(random_group(rng) for _ in range(rng.randint(1, 4)))
    length, device = padded_length(sum(group.num_tokens for group in groups)), torch.device("cuda")
    by_definition = allowed(Pack(groups), length, device)
    queries = torch.arange(1, length + 1, device=device)[:, None]
    return PackToMask((by_definition * queries).amax(0).int(), by_definition)


def test_flex_attention_equals_pytorchs_own_over_many_packs():
    rng, before = random.Random(1), num_compiled_graphs()
    checks = attention_checks([random_pack(rng) for _ in range(NUM_PACKS)], Heads(4, 2, 16), torch.float32, "fp32")
    for check in checks:
        print(f"{check.what}: {check.difference:.1e}, allowed {check.allowed:.1e}")
    assert all(check.ok and check.difference < TOLERANCE for check in checks)
    assert num_compiled_graphs() - before < 10  # for one block, for more, and where sizes happen to be equal
