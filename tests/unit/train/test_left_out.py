"""Records that are left out are said at the start of a training, with the key to change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lookonce.run.sections.batch import BatchSection
from lookonce.run.startup import Startup
from lookonce.train.train import _make_examples


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"max_tokens": 50}, "with more than 50 tokens; raise `batch.max_tokens`"),
        ({"tokens_per_pack": 60}, "with more than 60 tokens; raise `batch.tokens_per_pack`"),
    ],
)
def test_records_that_are_too_long_are_said_with_the_key_to_change(batch, expected):
    inputs = SimpleNamespace(run=SimpleNamespace(batch=BatchSection(**batch)), records={"train": [1] * 10, "val": []})
    session = SimpleNamespace(inputs=inputs, examples=lambda split: ([], 3))
    notes: list[str] = []
    _make_examples(session, Startup(lambda note: None), notes.append)
    assert len(notes) == 1 and notes[0].startswith("left out 3 of 10 train records, ") and expected in notes[0]
