"""The measurements of caches: they measure what they say, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from lookonce.bench.cache_build import CacheBench, bench_cache, matmul_rate
from lookonce.bench.cache_read import ReadBench, bench_read
from lookonce.cli import main
from lookonce.run.inputs import Inputs


def test_making_a_cache_is_measured_four_ways_and_leaves_nothing(make_run, tmp_path):
    inputs = Inputs.open(make_run())
    report = bench_cache(
        tmp_path / "caches",
        inputs.fingerprint,
        inputs.processor,
        inputs.images.first(10),
        inputs.load_tower(),
        lambda: inputs.load_tower(fast=False).module,
        100_000,
        3,
    )
    assert not list(tmp_path.rglob("lookonce-bench*")) and not list(tmp_path.rglob("*.safetensors"))
    assert (report.num_images, report.num_plain) == (10, 3)
    assert report.num_bytes == report.num_tokens * inputs.fingerprint.bytes_per_token
    assert min(report.tower_seconds, report.disk_seconds, report.engine_seconds, report.plain_seconds) > 0
    assert {"read", "decode", "resize", "tower", "write", "flush"} <= report.phases.keys()
    assert report.phases["tower"] < report.engine_seconds
    assert report.to_json()["share_of_limit"] == report.share_of_limit


def test_shares_follow_from_what_was_measured():
    report = CacheBench("CPU", 100, 1000, 10**9, 10, 4.0, 5.0, 8.0, 2.0, 1e12, 1e12, {"tower": 4.0})
    assert report.limit_seconds == 5.0  # the disk
    assert report.share_of_limit == pytest.approx(5 / 8)
    assert report.speedup == pytest.approx((2.0 / 10) / (8.0 / 100))
    assert "62% of what limits it, 2.5 times the plain loop" in report.text()
    assert "0 TFLOP/s, 25% of the measured matrix rate" in report.text()


def test_reading_is_measured_both_ways(built):
    report = bench_read(built.folder, 10)
    assert report.num_images == 10 and report.check
    assert report.sequential_bytes == built.size_bytes
    assert min(report.sequential_seconds, report.random_seconds, report.open_seconds) > 0


def test_the_share_of_reading_is_of_rates():
    report = ReadBench(10, 900, 1000, 1.0, 1.0, 0.001, True)
    assert report.share == pytest.approx(0.9)
    assert "90% of the sequential rate" in report.text() and "checked" in report.text()


def test_the_commands_print_what_was_measured(built):
    done = CliRunner().invoke(main, ["bench", "read", str(built.folder), "--images", "5", "--json", "--no-check"])
    assert done.exit_code == 0 and '"num_images": 5' in done.stdout and '"check": false' in done.stdout


def test_the_matrix_rate_is_that_of_a_product(monkeypatch):
    monkeypatch.setattr("lookonce.bench.cache_build.MATMUL_SIZE", 1024)
    assert 1e8 < matmul_rate(torch.device("cpu"), torch.float32) < 1e14
