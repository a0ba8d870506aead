"""What measuring ways of training tells while it runs, and at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lookonce.bench.step_report import KVASIR_EPOCH, Measured, StepReport


def measured(way, seconds, products_share=None, peak_gb=None):
    return Measured(way, f"says {way}", 8, 800, seconds, 12.0, 0.013, 9e4, products_share, peak_gb, [2.5])


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (measured("shared", 4.0, 0.61, 61.53), "shared: 5.00 ms a sample, products 61.0%, wait 1.3%, peak 61.5 GB"),
        (measured("plain", 120.0), "plain: 150.00 ms a sample, wait 1.3%"),
    ],
)
def test_a_way_tells_its_figures_as_it_ends(one, expected):
    assert one.text() == expected


def test_ways_stand_side_by_side_and_the_first_is_what_others_are_compared_with():
    report = StepReport([measured("plain", 120.0), measured("shared", 4.0, 0.61, 61.53)], 96, 775.0, num_ranks=2)
    assert report.speedup("shared") == pytest.approx(30)
    plain, shared = (line.split() for line in report.text().splitlines()[1:3])
    assert plain[:4] == ["plain", "6.7", "150.00", "1.0x"] and "-" in plain
    assert shared[:4] == ["shared", "200.0", "5.00", "30.0x"] and {"90,000", "61.0%", "1.3%", "61.5"} < {*shared}
    assert f"epoch: {KVASIR_EPOCH:,} samples" in report.text() and "shared by 2 processes" in report.text()
    assert report.to_json()["ways"][1]["ms_per_sample"] == pytest.approx(5)
    assert "not measured" not in report.text()
    assert "not measured: packed, liger" in replace(report, missing=("packed", "liger")).text()
