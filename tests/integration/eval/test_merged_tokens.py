"""With `cache.keep` everything that trains or answers sees the same merged tokens."""

from __future__ import annotations

import shutil

import pytest
import torch
from click.testing import CliRunner

from lookonce.cache.maintenance.recompute import recompute
from lookonce.cache.maintenance.show import show
from lookonce.cache.model.kept import num_kept
from lookonce.cache.model.merging import merge_image
from lookonce.checks.images import check_images
from lookonce.checks.model import check_model
from lookonce.checks.records import check_records
from lookonce.cli import main
from lookonce.datasets.records import read_records
from lookonce.errors import CacheMismatch
from lookonce.eval.asking.answerer import Answerer
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.prediction import read_predictions
from lookonce.run.config import RunFile
from lookonce.run.inputs import RunInputs
from lookonce.train.loop.session import Session
from lookonce.workflow.train import train

KEEP = 0.5
QUIET = {"notify": lambda note: None}


@pytest.fixture(scope="module")
def run(make_run_in, tmp_path_factory) -> RunFile:
    """A trained run with varied answers. Tests must not change its adapter."""
    made = make_run_in(
        tmp_path_factory.mktemp("merged"),
        cache={"keep": KEEP, "max_pixels": 60_000},
        train={"steps": 6, "learning_rate": 0.01},
        lora={"modules_to_save": ["embed_tokens"]},
        eval={"max_new_tokens": 6},
    )
    RunInputs.open(made).build()
    train(made, **QUIET)
    return made


def test_the_cache_has_the_merged_tokens_of_a_whole_one_and_is_as_large_as_estimated(run, tmp_path):
    inputs = RunInputs.open(run)
    cache, estimate = inputs.open_cache(), inputs.estimate(0)
    sections = {"keep": 1.0, "dir": tmp_path}
    whole = RunInputs.open(run.model_copy(update={"cache": run.cache.model_copy(update=sections)}))
    with pytest.raises(CacheMismatch, match=r"keep: this run 1\.0, that cache 0\.5"):
        RunInputs.open(run.model_copy(update={"cache": run.cache.model_copy(update={"keep": 1.0})})).open_cache()
    whole.build()
    of_whole = whole.open_cache()
    for key in of_whole.keys():
        expected = merge_image(of_whole[key], num_kept(len(of_whole[key]), KEEP))
        assert torch.equal(cache[key], expected.features) and cache.grid_thw(key) == of_whole.grid_thw(key)
        assert cache.kept(key).indices.tolist() == expected.kept.tolist()
    entries = [cache.entry(key)[1] for key in cache.keys()]
    assert sum(entry.size_bytes for entry in entries) == estimate.num_bytes < 0.51 * whole.estimate(0).num_bytes
    assert "(0.5 of the tower's, cache.keep)" in show(cache, key).text() and "keep" not in show(of_whole, key).text()
    where = cache.folder, inputs.fingerprint, inputs.images.path_of
    assert recompute(*where, inputs.processor, inputs.load_tower(), 4).worst_error == 0


def test_lengths_are_counted_alike_with_and_without_the_cache(run, tmp_path):
    session = Session.open(RunInputs.from_cache(run))
    examples, _ = session.examples("train")
    shown = {key: example.num_image_tokens[0] for example in examples for key in example.image_keys}
    for cache in (run.cache, run.cache.model_copy(update={"dir": tmp_path})):
        changed = run.model_copy(update={"cache": cache})
        found, _ = check_images(changed, check_records(changed, None)[0], check_model(changed)[0])
        counted = {key: found.tokens[path] for path, key in found.keys.items()}
        assert {key: counted[key] for key in shown} == shown


def test_all_engines_give_the_same_answers_from_the_cache_or_not(run, tmp_path):
    def answers(**changes) -> list[tuple]:
        path = tmp_path / "run.yaml"
        path.write_text(run.model_copy(update=changes).to_yaml())
        evaluate_run(path, "val", **QUIET)
        return [(row.predicted, row.num_tokens) for row in read_predictions(run.output / "predictions" / "val.jsonl")]

    expected = answers()
    assert len(set(expected)) > 10
    assert answers(eval=run.eval.model_copy(update={"engine": "generate"})) == expected
    shutil.copytree(run.cache.dir / "fingerprints", tmp_path / "empty" / "fingerprints")
    without = run.model_copy(update={"cache": run.cache.model_copy(update={"dir": tmp_path / "empty"})})
    (tmp_path / "run.yaml").write_text(without.to_yaml())
    records = read_records(run.data.val[0])
    asked = Answerer.open(tmp_path / "run.yaml").answer_records(records)
    assert [(answer.text, answer.num_tokens) for answer in asked] == expected


def test_towers_in_every_step_are_refused(run, tmp_path):
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    done = CliRunner().invoke(main, ["bench", "step", str(tmp_path / "run.yaml"), "--variants", "plain,shared"])
    assert done.exit_code == 2
    assert "cache.keep is 0.5; leave out plain (--variants)" in done.output
