"""Runs of the sample with other settings, for benchmarks that compare what is learned: train them, score their answers.

Design: answers are given to validation and test questions together, since each split alone is small, and in memory, so
that one adapter can be scored with several settings and no run folder changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookonce import read_run_file
from lookonce.datasets.majority import Majority
from lookonce.datasets.records import Record, read_records
from lookonce.eval.asking.answerer import Answerer
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import Needs, open_run
from lookonce.workflow.train import train

RUN_FILE = Path(__file__).parents[1] / "experiments" / "sample.yaml"


def sample_run(folder: Path, name: str, seed: int, values: dict[str, Any]) -> RunFile:
    """The sample's run with a seed and these values of its keys; the sample lies in `folder`, which gets its run."""
    paths = {f"data.{split}": folder / "sample" / f"{split}.jsonl" for split in ("train", "val", "test")}
    paths |= {"model.path": folder / "sample" / "model", "cache.dir": folder / "caches"}
    all_values = paths | {"output": folder / "runs" / f"{name}-{seed}", "train.seed": seed} | values
    return read_run_file(RUN_FILE, [f"{key}={value}" for key, value in all_values.items()])


def train_all(runs: Sequence[RunFile]) -> None:
    """Train those of the runs that are not finished; their cache must be built."""
    for run in runs:
        if not (run.output / "summary.json").exists():
            train(run, restart=run.output.exists(), notify=lambda note: None)


def exact_match(run: RunFile, section: str, **values: Any) -> float:
    """The exact match of a run's adapter, with other values of a section of the run file."""
    changed = getattr(run, section).model_copy(update=values)
    shown = run.model_copy(update={section: changed})
    records, answerer = (
        questions(run),
        Answerer(open_run(shown, Needs("tests", model="open")), RunFolder(run.output).adapter),
    )
    return share_right(records, [answer.text for answer in answerer.answer_records(records)])


def majority(run: RunFile) -> float:
    """The exact match of always giving the most frequent training answer."""
    known = Majority.of_records(record for path in run.data.train for record in read_records(path))
    records = questions(run)
    return share_right(records, [known.answer(record.turns[0].question) for record in records])


def questions(run: RunFile) -> list[Record]:
    return [record for path in (*run.data.val, *run.data.test) for record in read_records(path)]


def share_right(records: Sequence[Record], answers: Sequence[str]) -> float:
    right = [text.strip() == one.turns[0].answer.strip() for text, one in zip(answers, records, strict=True)]
    return sum(right) / len(right)
