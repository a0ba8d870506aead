"""What the ranks of benchmarks/scaling.py measure together, and the report of all measurements."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
RANK = """
import json, sys
order = json.loads(sys.argv[1])
sys.path.insert(0, order[0])
import lookonce.bench.step as step
step.MIN_SECONDS = 0
import cache, scaling
cache.disk_alone = lambda *_: 1000.0  # it writes twice, and returns the seconds of the faster way
scaling.of_rank(*order[1:])
"""


@pytest.fixture
def measured(preloaded, tmp_path):
    """Measures on two ranks; the rows that the first one prints."""

    def measured(run, *order):
        (tmp_path / "run.yaml").write_text(run.to_yaml())
        words = json.dumps([str(FOLDER), order[0], str(tmp_path / "run.yaml"), *order[1:]])
        ranks = preloaded.start_ranks(2, RANK, words, folder=tmp_path)
        assert [rank.wait() for rank in ranks] == [0, 0], [rank.error for rank in ranks]
        assert ranks[1].out == ""
        return [json.loads(line) for line in ranks[0].out.splitlines()]

    return measured


def test_steps_have_the_time_of_the_exchange_of_gradients(measured, make_cached_run, sample):
    run = make_cached_run(data={"train": str(sample / "test.jsonl"), "val": [], "image_root": str(sample)})
    rows = measured(run, "step", "44", "22")
    assert [(row["ranks"], row["samples a step"]) for row in rows] == [(2, 44), (2, 22)]
    for row in rows:
        assert 0 < row["exchange, ms"] < row["ms a step"]


def test_a_cache_is_built_by_all_ranks_beside_its_limits(measured, make_run, tmp_path):
    [row] = measured(make_run(), "cache", str(tmp_path / "scratch"))
    limits = {name: row[name] for name in row if name.endswith(" alone")}
    assert row["ranks"] == 2 and row[row["limit"]] == min(limits.values()) and len(limits) == 3
    assert row["limit"] == "disk alone" and row["disk alone"] < 1  # image a second
    assert row["share of the limit"] == pytest.approx(row["images a second"] / row[row["limit"]])


@pytest.fixture
def report_of(monkeypatch, tmp_path):
    """Measures some parts on one and two ranks, where those in `failing` fail; the report of all so far."""
    monkeypatch.syspath_prepend(FOLDER)
    scaling = importlib.import_module("scaling")
    monkeypatch.setattr(scaling.Host, "call", lambda *_, **__: (1.0, ""))

    def report_of(parts, failing=()):
        for part in ("step", "cache", "study"):

            def measure(host, number, part=part):
                if (part, number) in failing:
                    raise scaling.Failed(f"{part}-{number} failed with 1; the end of its log")
                return [{"ranks": number, scaling.COMPARED[part]: 8.0 / number}]

            monkeypatch.setattr(scaling.Host, part, measure)
        given = Namespace(folder=tmp_path, model="tiny", parts=parts, ranks=[1, 2])
        with pytest.raises(SystemExit) as ended:
            scaling.Host(given).run()
        assert ended.value.code == bool(failing)
        return (tmp_path / "tiny.md").read_text()

    return report_of


def test_a_measurement_that_fails_is_named_and_the_others_are_made(report_of):
    report = report_of("step,cache", failing=[("step", 2)])
    assert "| 1 | 8 | 1.00 |\n\n`python" in report and "| 2 | 4 | 0.50 |" in report
    assert "## Not measured\n\n- step on 2: step-2 failed with 1\n" in report


def test_a_report_keeps_the_parts_that_were_measured_before(report_of):
    report_of("step,cache", failing=[("cache", 1), ("cache", 2)])
    report = report_of("cache,study")
    assert [line for line in report.splitlines() if line.startswith("## ")] == [
        *("## step", "## cache", "## study", "## Setting")
    ]
    assert report.count("| 2 | 4 |") == 3
