"""What training says of records that are left out, and of weights that are too large for the GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lookonce.errors import TrainingError
from lookonce.run.sections import BatchSection, CacheSection, TrainSection
from lookonce.run.startup import Startup
from lookonce.train.loop import session
from lookonce.train.loop.checkpoints import Start
from lookonce.train.loop.distributed import ALONE
from lookonce.train.train import _make_examples

CONFIG = SimpleNamespace(text_config=SimpleNamespace(hidden_size=4096, num_hidden_layers=36))


@pytest.fixture(autouse=True)
def a_gpu_of_16_gb(monkeypatch):
    monkeypatch.setattr(session, "gpu_gb", lambda: 16.0)


def test_weights_that_are_too_large_name_what_fits(make_run):
    with pytest.raises(TrainingError) as caught, session.weights_fit(make_run(), CONFIG):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB")
    assert str(caught.value).startswith(
        "out of memory: the model's weights do not fit this GPU of 16.0 GB; set train.frozen: nf4, or int8, or "
        "train.fsdp on several GPUs; what fits by docs/training.md#memory: packs of 1,152 tokens with "
        "train.frozen=nf4, 2,176 tokens with train.frozen=nf4 and train.gradient_checkpointing=selective, 6,144"
    )


def test_nothing_is_said_of_models_and_modes_that_were_not_measured(make_run):
    assert session.memory_hint(make_run(), SimpleNamespace(text_config=SimpleNamespace())) == ""
    assert session.memory_hint(make_run(batch={"mode": "separate"}), CONFIG) == ""


def test_records_that_are_too_long_are_said_with_the_key_to_change():
    notes: list[str] = []
    opened = SimpleNamespace(
        run=SimpleNamespace(batch=BatchSection(tokens_per_pack=60), train=TrainSection(), cache=CacheSection()),
        records={"train": [1] * 10, "val": []},
        cache=None,
        variants=None,
        model_folder=SimpleNamespace(read_ahead=lambda: None),
        notes=[],
        notify=notes.append,
        examples=lambda split: ([], 3),
    )
    _make_examples(opened, Start(), ALONE, Startup(lambda note: None))
    [note] = notes
    assert note.startswith("left out 3 of 10 train records, with more than 60 tokens; raise `batch.tokens_per_pack`")
