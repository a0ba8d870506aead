"""The order of the questions within an image changes nothing: they are in one step, and a step has one gradient."""

from __future__ import annotations

import json

import pytest

from lookonce.workflow import train


@pytest.mark.guarantee("The order of the questions about an image changes results by rounding alone.")
def test_records_that_are_sorted_within_each_image_train_like_those_in_reverse(trainings, make_run, tmp_path):
    options = trainings.options("shared", steps=3, scheduler="constant", warmup=0)
    options |= {"batch": {"samples_per_step": 87, "order": "as_given"}, "lora": {}, "eval": {"split": "val"}}
    lines = (trainings.sample / "test.jsonl").read_text().splitlines(keepends=True)
    found = []
    for name, sign in (("ascending", 1), ("descending", -1)):
        chosen = sorted(enumerate(lines), key=lambda one: (json.loads(one[1])["images"], sign * one[0]))
        (tmp_path / f"{name}.jsonl").write_text("".join(line for _, line in chosen))
        data = options["data"] | {"train": str(tmp_path / f"{name}.jsonl"), "val": []}
        run = make_run(**options | {"data": data}, output=str(tmp_path / name))
        train(run, notify=lambda note: None)
        found.append([(line[2], line[4]) for line in trainings.log(run)[:3]])
    ascending, descending = found
    assert (tmp_path / "ascending.jsonl").read_text() != (tmp_path / "descending.jsonl").read_text()
    assert ascending == [pytest.approx(line, rel=1e-4) for line in descending]
