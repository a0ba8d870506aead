"""On a GPU, FlexAttention over packs equals PyTorch's own attention with a dense mask, forward and backward."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lookonce.train.data.packing import BLOCK
from lookonce.train.model.attention import PackMask, dense_mask, shared_prefix_attention
from lookonce.train.model.compile import COMPILER, num_compiled_graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # the compiler warns
]

DEVICE = torch.device("cuda")
NUM_PACKS = 56
TOLERANCE = 1e-4


def random_pack(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and prefix of each token of a pack of one to sixteen blocks, full or not."""
    length, segments = BLOCK * rng.randint(1, 16), []
    while sum(size for size, _ in segments) < length and rng.random() > 0.05:
        first = len(segments)
        segments += [(rng.randint(0, 300), first), *((rng.randint(1, 60), first) for _ in range(rng.randint(1, 17)))]
    segments.append((length, len(segments)))
    columns = [(segment, prefix) for segment, (size, prefix) in enumerate(segments) for _ in range(size)][:length]
    segment, prefix = torch.tensor(columns, dtype=torch.int32, device=DEVICE).T.contiguous()
    return segment, prefix


def attended(mask: Any, tensors: list[torch.Tensor], direction: torch.Tensor) -> list[torch.Tensor]:
    """The output of the attention, and the gradients of its inputs."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    output, _ = shared_prefix_attention(layer, *leaves, mask, scaling=0.25)
    return [output.detach(), *torch.autograd.grad(output, leaves, direction)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_flex_attention_equals_pytorchs_own_over_many_packs():
    rng, generator, mask = random.Random(1), torch.Generator().manual_seed(0), PackMask(16 * BLOCK, DEVICE)
    before = num_compiled_graphs()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    with torch._dynamo.config.patch(COMPILER):
        for _ in range(NUM_PACKS):
            segment, prefix = random_pack(rng)
            tensors = [draw(1, heads, len(segment), 16) for heads in (4, 2, 2)]
            direction = draw(1, len(segment), 4, 16)
            found = attended(mask(segment, prefix), tensors, direction)
            expected = attended(dense_mask(segment, prefix), tensors, direction)
            for one, other in zip(found, expected, strict=True):
                assert relative(one, other) < TOLERANCE
    assert num_compiled_graphs() - before < 10  # for one block, for more, and where sizes happen to be equal
