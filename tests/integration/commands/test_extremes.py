"""The ends of the range of every number in a run file: what a check takes, a training takes too."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from support.keys import bounds_of, keys_of
from support.rows import run

from lookonce.run.config import RunFile

pytestmark = pytest.mark.usefixtures("no_fsync")

ENDS = {
    name: bounds_of(metadata)
    for name, kind, metadata in keys_of(RunFile)
    if kind in (int, float) and not name.startswith(("data.", "train.scheduler_args", "grpo.reward", "grpo.clip"))
}
"""The lowest and the highest value of each number."""
OTHER_CACHE = ("cache.min_pixels", "cache.max_pixels", "cache.augment.")
ENDLESS = {"train.steps": 2, "train.epochs": 1, "eval.max_new_tokens": 4, "eval.tokens_per_batch": 600}
"""What would take days at one of its ends, or an hour, and the value that it has here."""
OF_REWARDS = {"train.objective": "grpo", "train.steps": 2, "grpo.filter": "false", "grpo.cut": "kept"}
"""Trains on whatever is drawn."""
DRAWN: tuple[dict[str, object], ...] = (
    {"grpo.top_p": 1e-9, "grpo.clip": "[0, 0]", "grpo.reward": "{format: -1000}"},
    {"grpo.max_new_tokens": 4, "grpo.clip": "[100, 100]", "grpo.reward": "{format: 1000}", "batch.samples_per_step": 2},
)
"""For each end, what is in no range, or takes hours."""
LEAVES_NO_RECORD = {"batch.tokens_per_pack": 400, "batch.max_tokens": 400}
"""What leaves out all records at its lower end, which a check reports."""
NEEDED = {"train.best": "loss"}
"""What `train.patience` needs."""
FITS = {"lora.dropout": 0.9, "lora.rank": 64, "train.steps": 1}
"""What is not in the range, fills the disk, or takes minutes at its upper end."""


@pytest.fixture
def run_file(make_cached_run, tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(make_cached_run().to_yaml())
    return tmp_path / "run.yaml"


def invoke(*words: object) -> Result:
    result = run(*words)
    assert "Traceback" not in result.output and "unexpected" not in result.stderr, result.output
    return result


@pytest.mark.guarantee("A training accepts the lowest and highest values that `lookonce check` accepts.")
@pytest.mark.parametrize("end", [0, 1], ids=["lowest", "highest"])
def test_a_run_with_all_numbers_at_one_end_is_checked_and_trained(run_file, end):
    values = {name: ends[end] for name, ends in ENDS.items() if not name.startswith((*OTHER_CACHE, "grpo."))}
    assert_trains(run_file, values | NEEDED | ENDLESS | (LEAVES_NO_RECORD if end == 0 else FITS))


@pytest.mark.parametrize("end", [0, 1], ids=["lowest", "highest"])
def test_a_training_by_rewards_with_all_its_numbers_at_one_end_is_checked_and_trained(run_file, end):
    values = {name: ends[end] for name, ends in ENDS.items() if name.startswith("grpo.")}
    assert_trains(run_file, values | OF_REWARDS | DRAWN[end])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grpo.max_new_tokens": 100_000}, "raise `batch.max_tokens`"),
        ({"grpo.reward": "nowhere:score"}, "nowhere:score cannot be imported"),
        ({"batch.mode": "separate"}, "needs batch.mode: shared"),
    ],
)
def test_what_a_training_by_rewards_refuses_a_check_refuses_too(run_file, changes, said):
    words = words_of(run_file, OF_REWARDS | changes)
    checked, trained = invoke("check", *words), invoke("train", *words)
    assert checked.exit_code == 1 and said in checked.stdout
    assert trained.exit_code in (1, 2) and said in trained.stderr


def words_of(run_file: Path, values: dict[str, object]) -> list[object]:
    return [run_file, *(word for name, value in values.items() for word in ("--set", f"{name}={value}"))]


def assert_trains(run_file: Path, values: dict[str, object]) -> None:
    words = words_of(run_file, values)
    checked = invoke("check", *words)
    assert checked.exit_code == 0, checked.output
    trained = invoke("train", *words)
    assert trained.exit_code == 0, trained.output


@pytest.mark.usefixtures("one_model_check")
def test_a_check_of_any_number_at_one_of_its_ends_ends_with_a_result(run_file, monkeypatch):
    monkeypatch.setattr("lookonce.checks.check.FIRST_RECORDS", 5)
    for name, ends in ENDS.items():
        for value in ends:
            result = invoke("check", run_file, "--set", f"{name}={value}")
            assert result.exit_code in (0, 1) and " errors, " in result.stdout or "1 error, " in result.stdout, name
