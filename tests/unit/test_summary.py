"""The summary of a run."""

from __future__ import annotations

import json
from dataclasses import replace

from lookonce.run.folder import RunFolder
from lookonce.summary import Summary

SUMMARY = Summary(
    run="runs/a",
    num_files=66,
    num_distinct=64,
    cache="caches/0123",
    cache_bytes=1_300_000,
    num_shards=1,
    encode_seconds=0.9,
    num_steps=10,
    first_step=0,
    num_samples=80,
    num_too_long=0,
    train_seconds=61.0,
    wait_share=0.028,
    split="val",
    num_questions=69,
    exact_match=0.884,
    majority=0.42,
    adapter="runs/a/adapter",
    next_command="lookonce eval runs/a",
    best_validation_loss=0.43210,
    best_validation_step=8,
    startup_seconds={"read records": 0.5, "load weights": 2.0},
)


def test_the_summary_has_one_line_per_figure():
    assert SUMMARY.text().strip().splitlines()[2:] == [
        "  images      66 files, 64 distinct",
        "  cache       1.3 MB in 1 shard, encoded once in 0.9 s",
        "              caches/0123",
        "  training    80 samples in 10 steps; 1 min 1 s, 2.8% of each step waiting for data",
        "              2.5 s before the first step, 2.0 s of them to load weights",
        "  val loss    lowest 0.4321, at step 8 of 10",
        "  validation  88.4% exact match on 69 questions; always the majority answer: 42.0%",
        "  adapter     runs/a/adapter",
        "  try next    lookonce eval runs/a",
    ]


def test_what_was_not_measured_is_left_out():
    unmeasured = {"best_validation_loss": None, "best_validation_step": None, "startup_seconds": {}}
    text = replace(SUMMARY, exact_match=None, majority=None, **unmeasured).text()
    assert not any(words in text for words in ("exact match", "val loss", "first step"))
    assert "3 records left out as too long" in replace(SUMMARY, num_too_long=3).text()
    assert "10 steps; 1 min 1 s since it was resumed at step 4" in replace(SUMMARY, first_step=4).text()


def test_a_summary_without_newer_keys_or_with_former_ones_is_read(tmp_path):
    newer = {"best_validation_loss", "best_validation_step", "startup_seconds"}
    older = {name: value for name, value in SUMMARY.to_json().items() if name not in newer}
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY.to_json() | {"ms_per_sample_plain": 3.0}))
    assert Summary.read(RunFolder(tmp_path)) == SUMMARY
    (tmp_path / "summary.json").write_text(json.dumps(older))
    assert Summary.read(RunFolder(tmp_path)).best_validation_loss is None
