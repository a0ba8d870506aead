"""The report of `lookonce bench step`, while it runs and at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lookonce.bench.step import Measured, StepReport


def measured(variant, seconds, matmul_share=None, peak_gb=None):
    return Measured(variant, f"about {variant}", 8, 800, seconds, 12.0, 0.013, 9e4, matmul_share, peak_gb, [2.5])


def test_each_variants_figures_are_reported_when_it_ends():
    expected = "shared: 5.00 ms per sample, 61.0% of the matmul rate, wait 1.3%, peak 61.5 GB"
    assert measured("shared", 4.0, 0.61, 61.53).text() == expected
    assert measured("plain", 120.0).text() == "plain: 150.00 ms per sample, wait 1.3%"


def test_variants_stand_side_by_side_and_the_first_is_the_baseline():
    report = StepReport([measured("plain", 120.0), measured("shared", 4.0, 0.61, 61.53)], 96, 2_000, 775.0, num_ranks=2)
    assert report.speedup(report.measured[1]) == pytest.approx(30)
    plain, shared = (line.split() for line in report.text().splitlines()[1:3])
    assert plain[:4] == ["plain", "6.7", "150.00", "1.0x"] and "-" in plain
    assert shared[:4] == ["shared", "200.0", "5.00", "30.0x"] and {"90,000", "61.0%", "1.3%", "61.5"} < {*shared}
    assert "epoch: the 2,000 training samples of this run" in report.text() and "Kvasir" not in report.text()
    assert (
        " ".join(plain[8:12]) == "5 min 0 s"
        and "10.0 s" in " ".join(shared)
        and "shared by 2 processes" in report.text()
    )
    assert "not measured" not in report.text()
    assert "not measured: packed, liger" in replace(report, missing=("packed", "liger")).text()


def test_json_keeps_its_keys():
    report = StepReport([measured("shared", 4.0, 0.61, 61.53)], 96, 2_000, 775.0).to_json()
    assert report.keys() == {"ways", "samples_per_step", "samples_per_epoch", "tflops", "num_ranks", "missing"}
    [shared] = report["ways"]
    assert shared["ms_per_sample"] == pytest.approx(5)
    assert (shared["way"], shared["says"], shared["products_share"]) == ("shared", "about shared", 0.61)
