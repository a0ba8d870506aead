"""Learning rate schedules: arguments reach transformers, and wrong ones are refused before anything is written."""

from __future__ import annotations

import pytest

from lookonce.errors import UsageError
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.train import open_training


@pytest.fixture
def settings_of(make_run, tmp_path):
    """Trainer's settings for some keys of `train`."""

    def settings_of(**train):
        return training_arguments(make_run(train=train, data={"train": ["a"], "val": ["b"]}), tmp_path)

    return settings_of


@pytest.mark.parametrize(
    ("scheduler", "arguments"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2, "lr_end": 1e-6}),
        ("constant", {}),
        ("warmup_stable_decay", {"num_decay_steps": 5, "num_stable_steps": 7}),
        ("reduce_lr_on_plateau", {"patience": 3, "mode": "min"}),
    ],
)
def test_arguments_of_a_schedule_reach_trainer(settings_of, scheduler, arguments):
    found = settings_of(scheduler=scheduler, scheduler_args=arguments)
    assert (found.lr_scheduler_type, found.lr_scheduler_kwargs or {}) == (scheduler, arguments)


@pytest.mark.parametrize(
    ("scheduler", "arguments", "message"),
    [
        ("cosinus", {}, "`train.scheduler` 'cosinus' is unknown; allowed: linear, cosine, .*warmup_stable_decay"),
        ("warmup_stable_decay", {}, "`train.scheduler_args` {} .*'num_decay_steps'.*; allowed: num_decay_steps, "),
        ("cosine_with_min_lr", {"min_lr_rate": "low"}, "{'min_lr_rate': 'low'} .*; allowed: "),
        ("polynomial", {"lr_end": 1}, "lr_end .* must be smaller than initial lr"),
        ("cosine", {"cycles": 1}, "does not fit `train.scheduler: cosine`: unknown cycles; allowed: num_cycles$"),
        ("linear", {"num_training_steps": 1}, "unknown num_training_steps; allowed: none$"),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused(settings_of, scheduler, arguments, message):
    with pytest.raises(UsageError, match=message):
        settings_of(scheduler=scheduler, scheduler_args=arguments)


def test_a_start_with_a_wrong_schedule_does_not_claim_the_run_folder(make_run):
    run = make_run(train={"scheduler": "cosine_with_min_lr"})
    with pytest.raises(UsageError, match="`train.scheduler_args`"):
        open_training(run)
    assert not run.output.exists()


@pytest.mark.parametrize(("given", "value"), [("1e-5", 1e-5), (3, 3), ("linear", "linear"), (True, True)])
def test_a_number_that_yaml_reads_as_text_is_a_number(make_run, given, value):
    [found] = make_run(train={"scheduler_args": {"key": given}}).train.scheduler_args.values()
    assert found == value and type(found) is type(value)
