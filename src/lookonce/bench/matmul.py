"""The FLOP/s that a device reaches in large matrix products: what FLOPs of a step or of the tower are compared with."""

from __future__ import annotations

import statistics
import time

import torch

SIZE = 8192
"""Rows and columns of the matrices on a GPU; an eighth of it on a CPU."""
NUM_PRODUCTS = 30


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """The median over some products of random matrices, each timed alone, so that the first ones do not count."""
    size = SIZE if device.type == "cuda" else SIZE // 8
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(NUM_PRODUCTS):
        synchronize(device)
        start = time.perf_counter()
        left @ right
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, so that a clock shows when its work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
