"""A run whose frozen weights are fp8: it trains with them, and answers with unrounded ones unless it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lookonce.cache.store.reader import VisionCache
from lookonce.eval.answers.questions import Questions
from lookonce.run.config import RunFile
from lookonce.run.open import FROM_CACHE, TO_BUILD, open_run
from lookonce.train.model.frozen import Fp8Linear
from lookonce.train.model.load import load_trained
from lookonce.workflow import train


@pytest.fixture(scope="module")
def run(make_run_in: Callable[..., RunFile], built: VisionCache, tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    options = {"steps": 3, "frozen": "fp8", "logging_steps": 1}
    made = make_run_in(tmp_path_factory.mktemp("fp8"), cache={"dir": str(built.folder.parent)}, train=options)
    train(made, notify=lambda note: None)
    return made


def with_answers_in(run: RunFile, frozen: str | None) -> RunFile:
    return run.model_copy(update={"eval": run.eval.model_copy(update={"frozen": frozen})})


def num_fp8(model: Any) -> int:
    return sum(isinstance(module, Fp8Linear) for module in model.modules())


@pytest.mark.guarantee("After training in fp8, answers are computed with unrounded weights.")
def test_it_is_answered_with_unrounded_weights(run):
    assert (run.output / "predictions" / "val.jsonl").exists()
    inputs, adapter = open_run(run, TO_BUILD), run.output / "adapter"
    assert num_fp8(load_trained(inputs.model_folder, run, adapter)) == 0
    assert num_fp8(load_trained(inputs.model_folder, with_answers_in(run, "fp8"), adapter)) > 0


def test_answers_are_those_of_a_run_file_without_the_key_unless_other_weights_are_named(run):
    """So an evaluation that was interrupted before the key existed is continued."""

    def identity(changed: RunFile) -> str:
        return Questions.of(open_run(changed, FROM_CACHE), "val").identity()

    assert identity(run) == identity(with_answers_in(run, "precision")) != identity(with_answers_in(run, "fp8"))
