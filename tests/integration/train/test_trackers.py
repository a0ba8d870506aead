"""Trackers: transformers' callbacks log a training, also one that was killed and resumed."""

from __future__ import annotations

import pytest

from lookonce.train.loop.log_files import MetricsLog
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}
pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.mark.guarantee(
    "TensorBoard shows the losses of a training that was killed and resumed as those of an uninterrupted one, bit for "
    "bit."
)
@pytest.mark.filterwarnings("ignore")  # TensorBoard uses what others call deprecated
def test_tensorboard_shows_a_resumed_training_as_an_uninterrupted_one(make_run, built, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    options = {"steps": 8, "save_steps": 4, "eval_steps": 4, "logging_steps": 1, "track": "tensorboard"}
    others = {"cache": {"dir": str(built.folder.parent)}, "eval": {"max_new_tokens": 1}}
    whole = make_run(train=options, output=str(tmp_path / "whole"), **others)
    train(whole, **QUIET)
    run = make_run(train=options, **others)

    def die(self, args, state, control, **kwargs):
        if state.global_step == 6:
            raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(MetricsLog, "on_step_begin", die)
        train(run, **QUIET)
    assert scalars(run)["train/loss"][-1][0] == 6
    train(run, resume=True, **QUIET)
    found, expected = scalars(run), scalars(whole)
    assert found.keys() == expected.keys() and "train/tokens_per_second" in found
    for name in ("train/loss", "train/grad_norm", "train/train_loss", "eval/loss"):
        assert found[name] == expected[name]
    assert [step for step, _ in found["train/loss"]] == [*range(1, 9)]


def scalars(run) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each scalar that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.output / "tensorboard")).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}
