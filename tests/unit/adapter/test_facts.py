"""What a run folder has in the place of a fact is a fact only if it has its form."""

from __future__ import annotations

import pytest

from lookonce.adapter.card import BaseModel, facts_of
from lookonce.files import write_json
from lookonce.run.folder import RunFolder


@pytest.mark.parametrize(
    ("recorded", "named"),
    [
        ("a1" * 20, True),
        ("a1" * 20 + "-dirty", True),
        ("a1", False),
        ("[x](y)" + "a" * 40, False),
        (None, False),
    ],
)
def test_a_commit_is_taken_from_the_record_if_it_is_one(make_run, recorded, named):
    run = make_run()
    RunFolder(run.output).claim(run, {})
    write_json(run.output / "environment.json", {"libraries": {}, "commit": recorded})
    assert facts_of(RunFolder(run.output), BaseModel("owner/base", None, None)).commit == (recorded if named else None)


def test_keys_of_an_evaluation_that_may_have_texts_of_records_are_left_out(make_run):
    folder = RunFolder(make_run().output)
    folder.claim(make_run(), {})
    score = {"num_questions": 1, "exact_match": 1.0, "majority": 0.0}
    texts = {"by_question": {"Is it me?": score}, "by_source": {"me": score}, "of_another_version": {"Is it me?": 1}}
    write_json(folder.metrics("val"), {"overall": score, "by_stage": {}, **texts})
    assert facts_of(folder, BaseModel("owner/base", None, None)).scores == {"val": {"overall": score, "by_stage": {}}}
