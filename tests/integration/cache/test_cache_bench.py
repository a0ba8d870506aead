"""Measurements of caches, with a fake clock: each counts its own work, and no warm-up."""

from __future__ import annotations

import importlib.util
import sys
from math import ceil
from pathlib import Path

import pytest
import torch

import lookonce.bench.step as step
from lookonce.bench.step import matmul_flops_per_second
from lookonce.cache.store.shards import DirectFile
from lookonce.run.open import TO_BUILD, open_run

SCRIPT = importlib.util.spec_from_file_location("bench_module", Path(__file__).parents[3] / "benchmarks" / "cache.py")
bench_module = importlib.util.module_from_spec(SCRIPT)
sys.modules["bench_module"] = bench_module  # where dataclasses look for it
SCRIPT.loader.exec_module(bench_module)
CacheBench, ReadBench = bench_module.CacheBench, bench_module.ReadBench
bench_cache, bench_read = bench_module.bench_cache, bench_module.bench_read


class Clock:
    """A stand-in for the time module; `slow` makes a function take some seconds of it."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def slow(self, function, seconds):
        def slowed(*args, **options):
            self.now += seconds
            return function(*args, **options)

        return slowed


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (bench_module, step):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_build_is_measured_beside_its_limits_and_leaves_nothing(make_run, tmp_path, monkeypatch, clock):
    class SlowFile(DirectFile):
        """A flush takes 5 s past the page cache and 3 s through it."""

        def __init__(self, path, direct=True):
            super().__init__(path, direct=direct)
            self.flush = clock.slow(self.flush, 5.0 if direct else 3.0)

    monkeypatch.setattr(bench_module, "DirectFile", SlowFile)
    monkeypatch.setattr(bench_module, "save_file", clock.slow(bench_module.save_file, 7.0))
    inputs = open_run(make_run(), TO_BUILD)
    tower = inputs.load_tower()
    monkeypatch.setattr(tower, "encode", clock.slow(tower.encode, 1.0))  # on a CPU, a batch is one image
    monkeypatch.setattr(bench_module, "matmul_flops_per_second", lambda device, dtype: 5e9)
    monkeypatch.setattr(bench_module, "flop_of", lambda tower, num_tokens: 1000.0 * num_tokens)
    report = bench_cache(
        tmp_path / "caches",
        inputs.fingerprint,
        inputs.processor,
        bench_module.first(inputs.images, 5),
        tower,
        lambda: inputs.load_tower(fast=False).module,
        100_000,
        3,
    )
    assert not list(tmp_path.rglob("lookonce-bench*")) and not list(tmp_path.rglob("*.safetensors"))
    assert (report.num_images, report.num_plain) == (5, 3)
    assert report.num_bytes == report.num_tokens * inputs.fingerprint.bytes_per_token
    assert report.tower_seconds == 5 * 1.0  # of two rounds
    assert report.engine_seconds == 5 * 1.0
    assert report.disk_seconds == ceil(report.num_bytes / 100_000) * 3.0
    assert report.plain_seconds == 3 * 7.0  # of four images
    assert (report.tower_flop, report.matmul_flops) == (1000.0 * report.num_tokens, 5e9)
    assert {"read", "decode", "resize", "tower", "write", "flush"} <= report.phases.keys()
    assert report.to_json()["share_of_limit"] == report.share_of_limit


def test_the_matrix_rate_is_that_of_the_median_product(monkeypatch, clock):
    monkeypatch.setattr(step, "SIZE", 80)  # an eighth of it on a CPU
    num_products = 0

    class Matrix:
        def __matmul__(self, other):
            nonlocal num_products
            num_products += 1
            clock.now += 100.0 if num_products < 5 else 0.5  # the first ones warm up

    sizes = []
    monkeypatch.setattr(step.torch, "randn", lambda *size, **options: sizes.append(size) or Matrix())
    assert matmul_flops_per_second(torch.device("cpu"), torch.float32) == 2 * 10**3 / 0.5
    assert sizes == [(10, 10)] * 2 and num_products == step.NUM_PRODUCTS
