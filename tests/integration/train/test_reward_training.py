"""A training by rewards: resumed, in several ranks, with filtered questions, and with rewards that fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.trainings import QUIET, train_until

from lookonce.errors import RecordsError, RunFolderError, TrainingError, UsageError
from lookonce.run.config import RunFile
from lookonce.run.open import TO_TRAIN, open_run
from lookonce.run.startup import Startup
from lookonce.train.data.policy import Drawn
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.rewards import Asked, RewardTrainer
from lookonce.train.loop.session import make_trainer
from lookonce.train.model.load import add_lora, load_untuned
from lookonce.workflow import train

pytestmark = pytest.mark.usefixtures("no_fsync")

TOLERANCE = 1e-5
OF_FORM = {"reward": {"format": 1.0, "token_f1": 2.0}, "samples": 4, "max_new_tokens": 4}
"""Rewards that the answers of an untrained model differ in."""
GRPO: dict[str, dict[str, Any]] = {
    "once": OF_FORM,
    "three times, near the start": OF_FORM | {"iterations": 3, "kl": 0.1, "clip": [0.01, 0.01], "temperature": 1.3},
    "all questions": OF_FORM | {"filter": False, "iterations": 2, "kl": 0.1, "loss": "sequence", "cut": "punished"},
}


@pytest.fixture
def make(trainings, make_run_in) -> Callable[..., RunFile]:
    """Makes runs of a few steps that learn from rewards, in a folder, from an adapter whose answers mostly end."""
    begun = trainings.uninterrupted("shared", steps=60, save_steps=60, eval_steps=60, learning_rate=0.01)

    def make(folder: Path, grpo: dict[str, Any], **train_options: Any) -> RunFile:
        start = {"objective": "grpo", "start_from": str(begun.output), "scheduler": "constant", "learning_rate": 0.003}
        options = trainings.options("shared", **start | {"steps": 7} | train_options)
        options["train"] |= {"save_steps": 1, "eval_steps": None, "logging_steps": 2}
        options |= {"lora": {}, "grpo": grpo, "batch": {"samples_per_step": 5, "tokens_per_pack": 400}}
        options["data"]["val"] = []
        return make_run_in(folder, output=str(folder / "run"), **options | {"eval": {"split": "val"}})

    return make


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a log without what changes from run to run."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.endswith(("time", "seconds", "second", "wait_share"))}
        for line in lines
    ]


@pytest.mark.guarantee(
    "An interrupted and resumed training ends with the adapter of an uninterrupted one, bit for bit: on a CPU,"
    " and on a GPU with the sample's model."
)
@pytest.mark.parametrize("case", GRPO)
def test_a_training_by_rewards_that_was_interrupted_ends_as_one_that_was_not(
    make, trainings, tmp_path, monkeypatch, case
):
    """After any step, also between two with the same answers; the reference is the adapter that it starts from."""
    one, other = (make(tmp_path / name, GRPO[case]) for name in ("one", "other"))
    train(one, **QUIET)
    for step in (1, 3, 5):
        train_until(other, step + 1, monkeypatch, resume=True)
        assert trainings.checkpoints(other)[-1] == step
    train(other, resume=True, **QUIET)
    trainings.assert_same_adapter(other, one)
    assert lines_of(other.output / "log.jsonl") == lines_of(one.output / "log.jsonl")
    assert lines_of(other.output / "drawn.jsonl") == lines_of(one.output / "drawn.jsonl")
    figures = [line for line in lines_of(one.output / "log.jsonl") if "clipped_share" in line]
    assert [line["step"] for line in figures] == [1, 2, 4, 6]
    assert all(line.get("log_prob_distance", 0) < TOLERANCE for line in figures)
    assert any(line.get("mixed_share", 1) < 1 for line in figures)
    if GRPO[case].get("iterations"):
        assert "reward" in figures[0] and "reward" not in figures[1], "the second step has the answers of the first"
    if GRPO[case].get("kl"):
        assert figures[0]["kl"] == pytest.approx(0, abs=1e-9) and figures[-1]["kl"] > 1e-6
    if case.startswith("three times"):
        assert max(line["clipped_share"] for line in figures) > 0.01


@pytest.mark.guarantee(
    "An interrupted and resumed training ends with the adapter of an uninterrupted one, bit for bit: on a CPU,"
    " and on a GPU with the sample's model."
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")  # the compiler warns
@pytest.mark.parametrize("case", ["once", "three times, near the start"])
def test_captured_passes_learn_from_answers_that_captured_passes_draw(make, trainings, tmp_path, monkeypatch, case):
    """On a GPU in bfloat16: later draws and passes compile nothing, and a resumed training has the same answers."""
    monkeypatch.setenv("LOOKONCE_SELFTEST", "on")
    notes: list[str] = []
    one, other = (make(tmp_path / name, GRPO[case], precision="bf16") for name in ("one", "other"))
    train(one, notify=notes.append)
    assert any("captured as a CUDA graph" in note for note in notes)
    assert any("the first pack agrees with its questions as separate rows" in note for note in notes)
    assert not [note for note in notes if "recompilation" in note]
    train_until(other, 5, monkeypatch)
    train(other, resume=True, **QUIET)
    trainings.assert_same_adapter(other, one)
    assert lines_of(other.output / "drawn.jsonl") == lines_of(one.output / "drawn.jsonl")
    figures = [line for line in lines_of(one.output / "log.jsonl") if "log_prob_distance" in line]
    assert all(line["log_prob_distance"] < 0.1 for line in figures)


def test_a_checkpoint_between_two_steps_with_the_same_answers_needs_them(make, tmp_path, monkeypatch):
    run = make(tmp_path, GRPO["all questions"])
    train_until(run, 2, monkeypatch)
    answers = run.output / "checkpoints/checkpoint-1/drawn.json"
    kept = json.loads(answers.read_text())
    assert len(kept["drawn"]) == 5 and {len(group) for group in kept["drawn"]} == {4}
    answers.unlink()
    notes: list[str] = []
    train(run, resume=True, notify=notes.append)
    assert any("checkpoint-1 is damaged (missing, or changed" in note and "drawn.json" in note for note in notes)
    assert any("no checkpoint is left" in note for note in notes)


@dataclass
class Fixed:
    """Draws answers whose rewards differ for some questions only."""

    mixed: Callable[[int], set[int]]
    """The numbers of these questions, by the number of calls before."""
    asked: list[list[int]] = field(default_factory=list)
    tokens_per_batch: int | None = None
    sampling_seconds: float = 0.0
    rewarding_seconds: float = 0.0

    def __call__(self, model: Any, asked: Asked, seed: int) -> list[list[Drawn]]:
        mixed = self.mixed(len(self.asked))
        self.asked.append([number for number, _ in asked])
        return [
            [Drawn((5, 6), 1.0), Drawn((7,), 0.0 if number in mixed else 1.0), Drawn((8,), 1.0)] for number, _ in asked
        ]


@pytest.fixture
def train_with(make, tmp_path) -> Callable[..., Any]:
    """Trains on the answers of a `Fixed`; returns the trainer and the questions that each step learned from."""

    def train_with(draw: Fixed, steps: int, notes: list[str], **grpo: Any) -> tuple[Any, list[list[int]]]:
        run = make(tmp_path / str(len(list(tmp_path.iterdir()))), grpo | {"samples": 3}, steps=steps)
        learned: list[list[int]] = []
        with open_run(run, TO_TRAIN) as opened:
            model = add_lora(load_untuned(opened.model_folder, run), opened.model_folder, run.lora, seed=0)
            _, prompts, _ = opened.questions("train")
            arguments = training_arguments(run, run.output / "checkpoints", save_strategy="no")
            trainer = make_trainer(opened, model, arguments, prompts, startup=Startup(notes.append), draw=draw)
            step_of, number_of = trainer._step_of, {id(prompt): n for n, prompt in enumerate(prompts)}

            def noted(chosen: Sequence[Any], drawn: Any) -> Any:
                learned.append([number_of[id(prompt)] for prompt in chosen])
                return step_of(chosen, drawn)

            trainer._step_of = noted
            trainer.train()
        return trainer, learned

    return train_with


def test_questions_without_differences_are_replaced_until_a_step_is_full(train_with):
    draw = Fixed(lambda calls: {*range(0, 87, 3)})
    _, learned = train_with(draw, 6, [])
    assert [len(step) for step in learned] == [5] * 6
    assert all(number % 3 == 0 for step in learned for number in step)
    used = [number for asked in draw.asked for number in asked]
    first_epoch = list(dict.fromkeys(used))[:87]
    assert len(first_epoch) == 87, "of an epoch no question is left out"
    chosen = [number for number in first_epoch if number % 3 == 0]
    assert [number for step in learned for number in step][: len(chosen)] == chosen, "each is learned from once"


def test_replacements_are_asked_for_in_few_sizes_once_it_is_known_how_many_will_do(train_with):
    draw = Fixed(lambda calls: {*range(87)} - {*range(0, 87, 10)})
    _, learned = train_with(draw, 10, [])
    sizes = [len(asked) for asked in draw.asked]
    assert {*sizes} <= {5, 2, 1} and sum(sizes) < 1.3 * 50 and [len(step) for step in learned] == [5] * 10
    used = list(dict.fromkeys(number for asked in draw.asked for number in asked))
    chosen = [number for number in used if number % 10]
    assert [number for step in learned for number in step] == chosen[:50]


def test_without_the_filter_each_step_has_the_next_questions(train_with):
    draw = Fixed(lambda calls: {*range(0, 87, 3)})
    _, learned = train_with(draw, 18, [], filter=False)
    assert learned == draw.asked and sorted(number for step in learned for number in step)[:87]
    assert sorted([number for step in learned for number in step][:87]) == [*range(87)]


@pytest.mark.parametrize("mixed", [set(), {*range(87)}], ids=["none", "all"])
def test_without_the_filter_a_training_that_learns_nothing_says_so_once(train_with, mixed):
    notes: list[str] = []
    train_with(Fixed(lambda calls: mixed), 6, notes, filter=False)
    said = [note for note in notes if "differ in reward" in note]
    expected = (
        "step 1: none of the last 5 questions got answers that differ in reward, so nothing was learned from them"
    )
    assert said == ([] if mixed else [expected])


def test_a_step_that_finds_too_few_questions_says_so_and_one_that_finds_none_is_the_last(train_with):
    notes: list[str] = []
    draw = Fixed(lambda calls: {1, 2, 3} if calls < 18 else set())  # 18 draws of 5 are all questions
    trainer, learned = train_with(draw, 9, notes)
    assert [len(step) for step in learned] == [3, 0] and trainer.state.global_step == 2
    assert "step 1: of 87 questions 3 got answers that differ in reward, so it has fewer than 5" in notes
    expected = "ended after step 2 of 9: of 87 questions none got answers that differ in reward"
    assert trainer.evaluations.why_over(trainer.state) == expected


def test_a_training_whose_answers_are_all_cut_off_does_not_begin(make, tmp_path):
    with pytest.raises(TrainingError, match="all answers of the first step were cut off .* raise grpo.max_new_tokens"):
        train(make(tmp_path, {"max_new_tokens": 1, "filter": False}), **QUIET)


def test_a_step_that_crosses_an_epoch_asks_no_question_twice(train_with):
    draw = Fixed(lambda calls: {*range(0, 87, 20)})  # five, which each step needs all of
    _, learned = train_with(draw, 4, [])
    assert [sorted(step) for step in learned] == [[0, 20, 40, 60, 80]] * 4


def test_a_step_asks_a_limited_number_of_questions(train_with, monkeypatch):
    monkeypatch.setattr("lookonce.train.loop.rewards.MOST", 4)
    notes: list[str] = []
    draw = Fixed(lambda calls: {*range(0, 87, 20)})
    _, learned = train_with(draw, 3, notes)
    assert any(note.startswith("step 1: of 20 questions") for note in notes)
    assert sum(map(len, draw.asked)) == 60 and all(step and len(step) < 5 for step in learned)


def test_a_training_that_has_nothing_to_learn_from_does_not_begin(train_with):
    expected = (
        "of 87 questions none got answers that differ in reward, .* mean reward is 1, and 0% were cut off .*; choose"
    )
    with pytest.raises(TrainingError, match=expected):
        train_with(Fixed(lambda calls: set()), 3, [])


def test_a_training_that_ended_early_and_was_killed_then_ends_there_again(make, trainings, tmp_path, monkeypatch):
    """The checkpoint says that it has ended: the adapter of another step would be another one."""
    few = {"samples": 2, "max_new_tokens": 2}
    one, other = (make(tmp_path / name, OF_FORM | few) for name in ("one", "other"))
    check = RewardTrainer._check_full

    def ended(trainer: Any, num: int, groups: Any) -> None:
        check(trainer, 0 if trainer.state.global_step == 2 else num, groups)

    monkeypatch.setattr(RewardTrainer, "_check_full", ended)
    train(one, **QUIET)
    with monkeypatch.context() as killed:
        killed.setattr(RewardTrainer, "_load_best_model", lambda trainer: None)
        killed.setattr("lookonce.train.train.Training._save_adapter", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(other, **QUIET)
    assert trainings.checkpoints(other)[-1] == 3
    monkeypatch.undo()
    train(other, resume=True, **QUIET)
    trainings.assert_same_adapter(other, one)
    assert "ended after step 3" in json.loads((other.output / "trained.json").read_text())["ended_early"]


def test_the_distance_of_log_probabilities_is_that_of_passes_over_new_answers(make, tmp_path):
    distances = []
    for logging_steps in (1, 3):
        run = make(tmp_path / str(logging_steps), OF_FORM | {"iterations": 3}, steps=6)
        options = run.train.model_copy(update={"logging_steps": logging_steps})
        train(run.model_copy(update={"train": options}), **QUIET)
        distances.append({line["step"]: line.get("log_prob_distance") for line in lines_of(run.output / "log.jsonl")})
    each, three = distances
    assert [step for step, distance in each.items() if distance] == [1, 4] and three[6] == each[4]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('no such row')", "test.jsonl:.*KeyError: 'no such row'"),
        ("return float('nan')", "gave nan for .*test.jsonl:1 "),
        ("return 'good'", "test.jsonl:.*good"),
        ("return -1e9", "is -1e\\+09 with its weight for .*test.jsonl:1 .* at most 1,000,000 from 0"),
        ("raise GeneratorExit", "test.jsonl:.*GeneratorExit"),
    ],
)
def test_a_reward_of_the_users_own_that_fails_names_the_record(make, tmp_path, monkeypatch, body, expected):
    name = f"own_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def worth(question, answer, reference, record):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = make(tmp_path / "folder", {"reward": f"{name}:worth", "samples": 2, "max_new_tokens": 2})
    with pytest.raises(UsageError, match=expected):
        train(run, **QUIET)


def test_a_reward_of_the_users_own_may_switch_gradients_off_and_change_its_record(make, tmp_path, monkeypatch):
    (tmp_path / "own_careless.py").write_text(
        "import torch\n"
        "def worth(question, answer, reference, record):\n"
        "    torch.set_grad_enabled(False)\n"
        "    tags = record.setdefault('tags', [])\n"
        "    tags.append(answer)\n"
        "    return len(tags) + len(answer)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = make(tmp_path / "folder", {"reward": "own_careless:worth", "samples": 4, "max_new_tokens": 2}, steps=2)
    train(run, **QUIET)
    shown = [json.loads(line) for line in (run.output / "drawn.jsonl").read_text().splitlines()]
    assert all(answer["reward"] == 1 + len(answer["text"]) for line in shown for answer in line["answers"])


def test_a_reward_of_the_users_own_gets_question_answer_reference_and_record(make, tmp_path, monkeypatch):
    (tmp_path / "own_noted.py").write_text(
        "seen = []\n"
        "def worth(question, answer, reference, record):\n"
        "    seen.append((question, answer, reference, record['origin']))\n"
        "    return len(seen) % 3 / 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = make(tmp_path / "folder", {"reward": "own_noted:worth", "samples": 4, "max_new_tokens": 2}, steps=2)
    train(run, **QUIET)
    import own_noted

    shown = [json.loads(line) for line in (run.output / "drawn.jsonl").read_text().splitlines()]
    assert shown and {line["step"] for line in shown} == {1, 2}
    for line in shown:
        for answer in line["answers"]:
            assert (line["question"], answer["text"], line["references"][0], line["origin"]) in own_noted.seen


def test_questions_that_leave_no_room_for_an_answer_are_left_out(make, tmp_path):
    notes: list[str] = []
    train(make(tmp_path / "some", OF_FORM | {"max_new_tokens": 366}, steps=1), notify=notes.append)
    [note] = [note for note in notes if note.startswith("left out")]
    assert "train questions, with more than 400 tokens, with an answer of grpo.max_new_tokens; raise" in note
    with pytest.raises(
        RecordsError,
        match=r"none of 87 questions of train leaves room for an answer of 399 tokens in 400; lower `grpo.max_new",
    ):
        train(make(tmp_path / "none", OF_FORM | {"max_new_tokens": 399}, steps=1), **QUIET)


def test_another_run_cannot_be_continued_with_other_rewards(make, tmp_path, monkeypatch):
    run = make(tmp_path, OF_FORM)
    train_until(run, 2, monkeypatch)
    changed = run.model_copy(update={"grpo": run.grpo.model_copy(update={"samples": 5})})
    with pytest.raises(RunFolderError, match=r"run\.grpo\.samples: this run 5, that one 4"):
        train(changed, resume=True, **QUIET)
