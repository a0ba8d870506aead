"""On a GPU, FlexAttention over packs equals PyTorch's own attention with a dense mask, forward and backward."""

from __future__ import annotations

import random

import torch
from support.trainings import COMPILED_ON_GPU

from lookonce.selftest.attention import Heads, attention_checks, random_layout
from lookonce.train.model.compile import num_compiled_graphs

pytestmark = COMPILED_ON_GPU

NUM_PACKS = 56
TOLERANCE = 1e-4


def test_flex_attention_equals_pytorchs_own_over_many_packs():
    rng, before = random.Random(1), num_compiled_graphs()
    layouts = [random_layout(rng, 1800) for _ in range(NUM_PACKS)]
    checks = attention_checks(layouts, Heads(4, 2, 16), torch.float32, "fp32", torch.device("cuda"))
    for check in checks:
        print(f"{check.what}: {check.difference:.1e}, allowed {check.allowed:.1e}")
    assert all(check.ok and check.difference < TOLERANCE for check in checks)
    assert num_compiled_graphs() - before < 10  # for one block, for more, and where sizes happen to be equal
