"""Learning rate schedules: arguments reach transformers, and wrong ones are refused before anything is written."""

from __future__ import annotations

import json
import re

import pytest

from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
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
        ("linear", {}),
        ("cosine", {"num_cycles": 0.5}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2, "lr_end": 1e-6}),
        ("inverse_sqrt", {}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "linear"}),
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
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "steep"}, "Unknown decay type: steep"),
        ("cosine_with_min_lr", {}, "One of min_lr or min_lr_rate should be set .*allowed: num_cycles, min_lr, "),
        ("cosine_with_min_lr", {"min_lr_rate": "low"}, "{'min_lr_rate': 'low'} .*; allowed: "),
        ("polynomial", {"lr_end": 1}, "lr_end .* must be smaller than initial lr"),
        ("cosine", {"cycles": 1}, "does not fit `train.scheduler: cosine`: unknown cycles; allowed: num_cycles$"),
        ("constant", {"min_lr": 1}, "does not fit `train.scheduler: constant`: unknown min_lr; allowed: none$"),
        ("linear", {"num_training_steps": 1}, "unknown num_training_steps; allowed: none$"),
        ("reduce_lr_on_plateau", {"patient": 3}, "unknown patient; allowed: mode, factor, patience, "),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused(settings_of, scheduler, arguments, message):
    with pytest.raises(UsageError, match=message):
        settings_of(scheduler=scheduler, scheduler_args=arguments)


def test_all_schedules_of_transformers_can_be_set(settings_of):
    with pytest.raises(UsageError) as caught:
        settings_of(scheduler="none such")
    needed = {"cosine_with_min_lr": {"min_lr": 0}, "cosine_warmup_with_min_lr": {"min_lr": 0}}
    needed["warmup_stable_decay"] = {"num_decay_steps": 1}
    for name in re.search("allowed: (.*)", str(caught.value))[1].split(", "):
        settings_of(scheduler=name, scheduler_args=needed.get(name, {}))


def test_a_start_with_a_wrong_schedule_does_not_claim_the_run_folder(make_run):
    run = make_run(train={"scheduler": "cosine_with_min_lr"})
    with pytest.raises(UsageError, match="`train.scheduler_args`"):
        open_training(run)
    assert not run.output.exists()


def test_a_run_recorded_without_arguments_is_the_same_run(make_run):
    run = make_run()
    folder = RunFolder(run.output)
    folder.claim(run, {})
    folder.log.touch()
    record = json.loads((run.output / "run.json").read_text())
    del record["run"]["train"]["scheduler_args"]
    (run.output / "run.json").write_text(json.dumps(record))
    folder.check(run, {})


@pytest.mark.parametrize(("given", "value"), [("1e-5", 1e-5), (3, 3), ("linear", "linear"), (True, True)])
def test_a_number_that_yaml_reads_as_text_is_a_number(make_run, given, value):
    [found] = make_run(train={"scheduler_args": {"key": given}}).train.scheduler_args.values()
    assert found == value and type(found) is type(value)


def test_arguments_are_part_of_the_resolved_run_file(make_run):
    run = make_run(train={"scheduler": "cosine_with_min_lr", "scheduler_args": {"min_lr": 1e-5}})
    assert RunFile.model_validate(json.loads(run.model_dump_json())) == run
