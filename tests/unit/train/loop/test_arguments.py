"""Trainer's settings: arguments of schedules reach it, and what cannot work is refused before anything is read."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers.integrations import get_reporting_integration_callbacks

from lookonce.errors import UsageError
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.log_files import EXTRAS
from lookonce.train.train import open_training


@pytest.fixture
def settings_of(make_run, tmp_path):
    """Trainer's settings for some keys of `train`."""

    def settings_of(eval=None, **train):
        return training_arguments(make_run(train=train, eval=eval or {}), tmp_path)

    return settings_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp16 is fine on a GPU")
def test_fp16_without_a_gpu_is_refused(settings_of):
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        settings_of(precision="fp16")


def test_the_best_checkpoint_is_chosen_by_what_the_run_file_says(settings_of):
    by_epoch = {"eval_steps": 2, "save_steps": None}  # which Trainer itself would refuse
    arguments = settings_of({"every": "epoch"}, best="metric", **by_epoch)
    assert (arguments.load_best_model_at_end, arguments.metric_for_best_model) == (True, "exact_match")
    assert arguments.greater_is_better
    by_score = settings_of({"every": "epoch", "metric": "token_f1"}, best="metric", **by_epoch)
    assert (by_score.metric_for_best_model, by_score.greater_is_better) == ("score", True)
    by_loss = settings_of(best="loss")
    assert (by_loss.load_best_model_at_end, by_loss.greater_is_better) == (True, False)


@pytest.mark.parametrize("name", EXTRAS)
def test_an_absent_tracker_is_an_error_with_the_command(settings_of, monkeypatch, name):
    assert get_reporting_integration_callbacks([name])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else find(package))
    expected = rf"train.track names {name}, which is not installed; .* pip install 'lookonce\[{EXTRAS[name]}\]'"
    with pytest.raises(UsageError, match=expected):
        settings_of(track=[name])


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


def test_an_optimizer_that_trainer_does_not_know_is_refused(settings_of):
    with pytest.raises(UsageError, match="`train` section is not valid"):
        settings_of(optimizer="no such thing")


@pytest.mark.parametrize(
    ("scheduler", "arguments", "message"),
    [
        ("cosinus", {}, "`train.scheduler` 'cosinus' is unknown; allowed: linear, cosine, .*warmup_stable_decay"),
        ("warmup_stable_decay", {}, "`train.scheduler_args` {} .*'num_decay_steps'.*; allowed: num_decay_steps, "),
        ("cosine_with_min_lr", {"min_lr_rate": "low"}, "{'min_lr_rate': 'low'} .*; allowed: "),
        ("polynomial", {"lr_end": 1}, "lr_end .* must be smaller than initial lr"),
        ("cosine", {"cycles": 1}, "does not fit `train.scheduler: cosine`: unknown cycles; allowed: num_cycles$"),
        ("linear", {"num_training_steps": 1}, "unknown num_training_steps; allowed: none$"),
        ("reduce_lr_on_plateau", {}, "train.scheduler: reduce_lr_on_plateau follows .* set train.best: loss, or"),
    ],
)
def test_a_schedule_that_cannot_be_made_or_does_not_follow_what_is_best_is_refused(
    settings_of, scheduler, arguments, message
):
    best = "metric" if scheduler == "reduce_lr_on_plateau" else None
    with pytest.raises(UsageError, match=message):
        settings_of({"every": "epoch"}, scheduler=scheduler, scheduler_args=arguments, best=best)


def test_a_start_with_a_wrong_schedule_does_not_claim_the_run_folder(make_run):
    run = make_run(train={"scheduler": "cosine_with_min_lr"})
    with pytest.raises(UsageError, match="`train.scheduler_args`"):
        open_training(run)
    assert not run.output.exists()


@pytest.mark.parametrize(("given", "value"), [("1e-5", 1e-5), (3, 3), ("linear", "linear"), (True, True)])
def test_a_number_that_yaml_reads_as_text_is_a_number(make_run, given, value):
    [found] = make_run(train={"scheduler_args": {"key": given}}).train.scheduler_args.values()
    assert found == value and type(found) is type(value)
