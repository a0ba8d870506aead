"""Finding runs: folders, run files and predictions files; their names, and which are seeds of one another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.answers import look_trained

from lookonce.errors import LookonceError, UsageError
from lookonce.eval.join import read_runs, short_names
from lookonce.eval.scores.prediction import Prediction, write_predictions
from lookonce.files import hash_file, write_json
from lookonce.run.folder import RunFolder
from lookonce.run.start_adapter import adapter_hash

ROW = Prediction("val.jsonl:1", ("a.jpg",), "q", "no", "no", "yes", image_keys=("0f",))


@pytest.fixture
def trained(make_run, tmp_path):
    """Makes a run folder with predictions, and returns it."""

    def make(name: str, split: str = "val", **changes) -> Path:
        run = make_run(output=str(tmp_path / name), **changes)
        write_json(run.output / "run.json", {"run": run.model_dump(mode="json"), "inputs": {"records": "x"}})
        write_predictions(RunFolder(run.output).predictions(split), [ROW])
        return run.output

    return make


def test_runs_are_found_by_folder_run_file_and_predictions_file(trained, tmp_path):
    folder = trained("first")
    (folder / "run.yaml").write_text("model: {path: x}\n")
    outside = tmp_path / "given.jsonl"
    write_predictions(outside, [replace(ROW, predicted="yes")])
    runs = read_runs([folder, folder / "run.yaml", folder / "predictions" / "val.jsonl", outside])
    assert [run.name for run in runs] == ["first", "first (2)", "first (3)", "given"]
    assert [run.predictions for run in runs[:3]] == [[ROW]] * 3 and runs[3].predictions[0].predicted == "yes"
    assert runs[0].training == runs[2].training and (runs[3].training, runs[3].seed) == ("", None)


def test_runs_that_differ_in_their_seed_alone_are_seeds_of_one_another(trained):
    runs = read_runs(
        [
            trained("a", train={"seed": 1}),
            trained("b", train={"seed": 2}, cache={"stage": "/elsewhere"}),
            trained("c", train={"seed": 3, "learning_rate": 0.1}),
            trained("d", train={"seed": 4}, eval={"max_new_tokens": 9}),
        ]
    )
    assert [run.seed for run in runs] == [1, 2, 3, 4]
    assert runs[0].training == runs[1].training and len({run.training for run in runs}) == 3


def test_runs_on_records_that_the_seed_draws_are_seeds_of_one_another(trained):
    """The hashes of their training records differ, since each seed draws others."""

    def drawn(name: str, seed: int, data: dict[str, object], val: str = "v") -> Path:
        folder = trained(name, train={"seed": seed}, data=data)
        recorded = json.loads((folder / "run.json").read_text())
        hashes = {"records": {"train": f"t{seed}", "val": val}, "stages": f"l{seed}", "context": f"c{seed}"}
        write_json(folder / "run.json", recorded | {"inputs": hashes})
        return folder

    share, replayed = {"where": {"share": 0.5}}, {"where": {"stage": 2}, "replay": {"stage": 1, "share": 0.5}}
    for number, data in enumerate((share, replayed, {"held_out": {"fold": 1, "of": 2}})):
        first, second = read_runs([drawn(f"a{number}", 1, data), drawn(f"b{number}", 2, data)])
        assert first.training == second.training
    others = (
        drawn("other-share", 2, {"where": {"share": 0.25}}),
        drawn("other-file", 2, share | {"train": "other.jsonl"}),
        drawn("other-questions", 2, share, val="w"),
        drawn("all-of-a-stage", 1, {"where": {"stage": 2}}),
        drawn("all-of-a-stage-again", 2, {"where": {"stage": 2}}),
    )
    assert len({run.training for run in read_runs([drawn("a", 1, share), *others])}) == 6


def test_runs_that_start_from_seeds_of_one_training_are_seeds_of_one_another(trained, tmp_path):
    first = [trained(f"first-{seed}", train={"seed": seed}) for seed in (1, 2)]
    second = []
    for seed, start in enumerate(first, start=1):
        (start / "adapter").mkdir()
        (start / "adapter" / "adapter_model.safetensors").write_text(f"weights {seed}")
        look_trained(RunFolder(start))
        second.append(trained(f"second-{seed}", train={"seed": seed, "start_from": str(start)}))
        inputs = {"records": "x", "start": adapter_hash(RunFolder(start))}
        recorded = RunFolder(second[-1]).read_run().model_dump(mode="json")
        write_json(second[-1] / "run.json", {"run": recorded, "inputs": inputs})
    runs = read_runs([*first, *second])
    assert runs[2].training == runs[3].training != runs[0].training == runs[1].training
    (first[1] / "adapter" / "adapter_model.safetensors").write_text("trained again")
    assert len({run.training for run in read_runs([*second])}) == 2


def test_runs_with_the_answers_of_seeds_of_one_training_are_seeds_of_one_another(trained):
    runs = []
    for seed in (1, 2):
        answers = RunFolder(trained(f"fold-{seed}", train={"seed": seed})).predictions("val")
        write_predictions(answers, [replace(ROW, predicted=f"of seed {seed}")])
        context = {"by": "stage", "order": [1, 2], "answers": [str(answers)]}
        runs.append(trained(f"staged-{seed}", train={"seed": seed}, data={"context": context}))
        recorded = json.loads((runs[-1] / "run.json").read_text())
        write_json(runs[-1] / "run.json", recorded | {"inputs": {"records": "x", "answers": [hash_file(answers)]}})
    first, second = read_runs(runs)
    assert first.training == second.training
    write_predictions(answers, [ROW])
    assert len({run.training for run in read_runs(runs)}) == 2, "the file has other answers now"


def test_other_splits_are_refused_unless_one_is_chosen(trained):
    first, second = trained("a"), trained("b", "test", eval={"split": "test"})
    with pytest.raises(UsageError, match=r"different splits \(.*a: val, .*b: test\); choose one with --split"):
        read_runs([first, second])
    with pytest.raises(UsageError, match=r"a has no predictions of the split test; there are those of val; run: looko"):
        read_runs([first, second], "test")


def test_an_unfinished_evaluation_is_named(trained):
    folder = trained("a")
    (folder / "predictions" / "val.jsonl").rename(folder / "predictions" / "val.partial-0.jsonl")
    with pytest.raises(UsageError, match="a has an unfinished evaluation of the split val; run: lookonce eval"):
        read_runs([folder, folder])
    (folder / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    write_json(folder / "checkpoints" / "checkpoint-2" / "trainer_state.json", {})
    with pytest.raises(UsageError, match=r"a has an unfinished training and .*; run: lookonce train .*--res"):
        read_runs([folder, folder])


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(LookonceError, match="is not a run folder"):
        read_runs([tmp_path, tmp_path])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["x/run", "y/run", "z"], ["x/run", "y/run", "z"]),
        (["x/1/run", "y/1/run"], ["x/1/run", "y/1/run"]),
        (["runs/a", "runs/a", "runs/a"], ["a", "a (2)", "a (3)"]),
        (["p/a.jsonl", "p/a.jsonl", "h/a (2).jsonl"], ["a", "a (3)", "a (2)"]),
        (["runs/a/predictions/val.jsonl", "b.jsonl"], ["a", "b"]),
    ],
)
def test_names_are_the_shortest_ends_that_differ(paths, names):
    assert short_names([Path(path) for path in paths]) == names
