"""Records that are left out are said at the start of a training, with the key to change."""

from __future__ import annotations

from types import SimpleNamespace

from lookonce.run.sections import BatchSection, CacheSection, TrainSection
from lookonce.run.startup import Startup
from lookonce.train.loop.checkpoints import Start
from lookonce.train.loop.distributed import ALONE
from lookonce.train.train import _make_examples


def test_records_that_are_too_long_are_said_with_the_key_to_change():
    notes: list[str] = []
    opened = SimpleNamespace(
        run=SimpleNamespace(batch=BatchSection(tokens_per_pack=60), train=TrainSection(), cache=CacheSection()),
        records={"train": [1] * 10, "val": []},
        cache=None,
        notes=[],
        notify=notes.append,
        examples=lambda split: ([], 3),
    )
    _make_examples(opened, Start(), ALONE, Startup(lambda note: None))
    [note] = notes
    assert note.startswith("left out 3 of 10 train records, with more than 60 tokens; raise `batch.tokens_per_pack`")
