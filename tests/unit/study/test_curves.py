"""Learning curves of arms: means over seeds, chains behind one another, and no minutes of resumed trainings."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lookonce.study.file import StudyFile
from lookonce.study.report import ArmCurve, Measured, curve_panels, learning_curves

ARMS = {"one": None, "two": {"starts_from": "one"}, "routed": {"route": {"arms": {"1": "one", "2": "two"}}}}


@pytest.fixture
def run(tmp_path):
    """Makes a run of 4 steps of 10 samples, a minute a step, that has logged validation losses."""

    def make(name: str, losses: dict[int, float], first_step: int = 0) -> SimpleNamespace:
        log = tmp_path / f"{name}.jsonl"
        lines = [{"step": step, "time": 1000.0 + 60 * step, "eval_loss": loss} for step, loss in losses.items()]
        log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 4, "time": 1240.0, "loss": 1.0}]))
        trained = SimpleNamespace(num_steps=4, num_samples=40, seconds=240.0, first_step=first_step)
        return SimpleNamespace(folder=SimpleNamespace(log=log, read_trained=lambda: trained))

    return make


@pytest.fixture
def study(tmp_path) -> StudyFile:
    return StudyFile(base=str(tmp_path / "run.yaml"), arms=ARMS, seeds=[1, 2], output=str(tmp_path / "study"))


def test_a_chain_continues_where_its_first_phase_ended(study, run):
    runs = {
        "one-1": run("one-1", {2: 4.0, 4: 2.0}),
        "one-2": run("one-2", {2: 6.0, 4: 3.0}),
        "two-1": run("two-1", {4: 1.0}),
        "two-2": run("two-2", {2: 9.0, 4: 2.0}),
    }
    one, two = learning_curves(study, ["one", "two", "routed"], runs)
    assert one == ArmCurve("one", ["one"], [Measured(20, 2, 5.0, None), Measured(40, 4, 2.5, None)])
    assert two.phases == ["one", "two"] and two.points == [*one.points, Measured(80, 8, 1.5, None)]


def test_a_resumed_training_has_no_minutes_nor_have_the_phases_after_it(study, run):
    runs = {f"{arm}-{seed}": run(f"{arm}-{seed}", {4: 2.0}, first_step=arm == "one") for arm in ARMS for seed in (1, 2)}
    _, two = learning_curves(study, ["one", "two"], runs)
    assert [(point.samples, point.minutes) for point in two.points] == [(40, None), (80, None)]
    assert two.points_of("validation_loss", "samples") == {40: 2.0, 80: 2.0}
    assert two.points_of("validation_loss", "minutes") == {}


def test_runs_that_are_not_complete_are_not_drawn(study, run):
    assert learning_curves(study, ["one", "two"], {"one-1": run("one-1", {})}) == []
    assert curve_panels([]) == {}


def test_every_variant_is_in_each_figure():
    arms = [
        ArmCurve(f"arm-{number}", [], [Measured(10, 1, 2.0, 0.5), Measured(20, 2, 1.0, 0.7)]) for number in range(30)
    ]
    panels = curve_panels(arms)
    names = ["validation loss over samples", "validation loss over minutes"]
    assert list(panels) == [*names, *(name.replace("validation loss", "exact match while training") for name in names)]
    assert all([line.name for line in panel.lines] == [one.arm for one in arms] for panel, _ in panels.values())
