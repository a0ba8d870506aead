"""Real frames, real questions and the published tokenizer, with a small random Qwen3-VL of that vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookonce.bench.step import bench_step, find_variants
from lookonce.datasets.sample.model import write_model
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, open_run
from lookonce.workflow import train

NUM_STEPS, NUM_MEASURED = 10, 1


@pytest.fixture(scope="module")
def run(real_records: Path, real_processor: Path, make_run_in, tmp_path_factory) -> RunFile:
    folder = tmp_path_factory.mktemp("real")
    write_model(folder / "model", "tiny", tokenizer=real_processor)
    data = {"train": str(real_records), "val": str(real_records), "test": []}
    data["image_root"] = str(real_records.parent / "images")
    options = {"steps": NUM_STEPS, "logging_steps": 1, "learning_rate": 1e-3}
    return make_run_in(
        folder, model={"path": str(folder / "model")}, data=data, train=options, cache={"max_pixels": 100_000}
    )


def test_eight_real_frames_with_56_questions_are_cached_and_trained_on(run):
    inputs = open_run(run, TO_BUILD)
    report = inputs.build()
    assert (report.num_encoded, report.num_wanted) == (8, 8) and not report.quarantined
    assert inputs.chat_tokenizer.tokenizer.vocab_size > 150_000
    summary = train(run, notify=lambda note: None)
    assert summary.num_samples == NUM_STEPS * run.batch.samples_per_step
    losses = [json.loads(line).get("loss") for line in (run.output / "log.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert len(losses) == NUM_STEPS
    assert sum(losses[-5:]) < sum(losses[:5])


def test_steps_have_equal_losses_with_the_tower_and_from_the_cache_in_every_mode(run):
    session = open_run(run, TO_BUILD)
    session.build()
    variants = find_variants(["tower", "cached", "shared"])
    *_, report = bench_step(session, session.examples("train")[0], variants, NUM_MEASURED)
    expected, *others = (measured.losses for measured in report.measured)
    assert len(expected) >= NUM_MEASURED
    for losses in others:
        assert losses == pytest.approx(expected, rel=1e-4)
