"""What a report concludes: whether all is exact, which variants are, and the settings to train with."""

from __future__ import annotations

import json
import math

import pytest

from lookonce.selftest.report import FACTOR, ON_GPU, ROUNDING, ROWS, Check, Report, Variant, attempted, within_spread

COMBINATION = {"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0"}


def report(*wrong: Variant | None, variants: tuple[Variant, ...] = ON_GPU) -> Report:
    """A report in which some variants are wrong, or all with FlexAttention (None)."""
    checks = [Check("attention", 1.0 if None in wrong else 0.0, 0.1)]
    checks += [Check(variant.name, 1.0 if variant in wrong else 0.0, 0.1, variant) for variant in variants]
    return Report(COMBINATION, tuple(checks), 50)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ((), ""),
        ((Variant(),), "--set train.cuda_graphs=false"),
        ((Variant(), Variant(captured=False)), "--set train.compile=false"),
        ((Variant(), Variant(compiled=False)), "--set train.cuda_graphs=false"),
        (ON_GPU[:3], "--set train.compile=false --set train.cuda_graphs=false"),
        (ON_GPU[:4], "--set train.flex_attention=false"),
        ((None,), "--set train.flex_attention=false"),
        (ON_GPU[:5], "--set train.flex_attention=false --set train.cuda_graphs=false"),
        (ON_GPU, f"--set {ROWS}"),
    ],
)
def test_the_fastest_settings_are_those_of_the_first_way_that_is_exact(wrong, expected):
    assert report(*wrong).fastest == expected
    assert report(*wrong).ok == (not wrong)


def test_a_fault_of_a_part_is_one_of_all_ways_that_include_it():
    launched, replayed = (
        Check("", 1, 0, Variant(compiled=False, captured=captured), "", True) for captured in (False, True)
    )
    right = report().checks
    assert Report(COMBINATION, (*right, launched), 50).exact == list(ON_GPU[4:])
    assert Report(COMBINATION, (*right, replayed), 50).exact == [Variant(captured=False), ON_GPU[3], *ON_GPU[4:]]
    assert Report(COMBINATION, (launched, replayed), 50).compared == [], "a variant is not compared by its parts"


def test_a_difference_may_be_a_few_times_the_largest_spread():
    assert within_spread("a", [0.1, FACTOR * 0.2], [0.1, 0.2]).ok
    assert not within_spread("a", [0.1, FACTOR * 0.21], [0.1, 0.2]).ok
    assert within_spread("a", [ROUNDING], [0, 0]).ok and not within_spread("a", [1e-4], [0, 0]).ok, "none is rounding"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_a_number_is_a_mismatch(broken):
    check = within_spread("a", [0.0, broken], [0.1])
    assert not check.ok and check.to_json()["difference"] is None
    assert not within_spread("a", [], [0.1]).ok, "nothing was compared"


def test_the_table_has_a_line_for_each_check_and_says_what_to_do():
    def fail() -> list[Check]:
        raise ValueError("no\nmore")

    checks = (Check("masks", 3, 0), Check("model", 0.00123, 0.5, Variant()), *attempted("kernel", fail, Variant()))
    text = Report(COMBINATION, checks, 50).text()
    assert [line.split() for line in text.splitlines()[1:4]] == [
        ["masks", "3", "0", "MISMATCH"],
        ["model", "1.2e-03", "5.0e-01", "ok"],
        ["kernel", "failed", "0.0e+00", "MISMATCH"],
    ]
    assert "kernel: ValueError: no" in text and "device NVIDIA H200, driver 580.1, torch 2.11.0; 50.0 s" in text
    assert text.endswith("NOT EXACT HERE: 2 of 3 checks; the fastest exact settings: --set batch.mode=separate")
    assert report().text().endswith("packs are exact here: all differences are within their spread")


def test_json_has_each_check_and_the_exact_ways_without_numbers_that_json_lacks():
    found = json.loads(json.dumps(report(Variant()).to_json(), allow_nan=False))
    assert found["exact"][0] == ["train.cuda_graphs=false"] and found["ok"] is False
    assert found["checks"][1] == {"what": Variant().name, "difference": 1.0, "allowed": 0.1, "ok": False}
