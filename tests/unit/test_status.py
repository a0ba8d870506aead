"""The questions that an evaluation without a result has answered so far."""

from __future__ import annotations

from pathlib import Path

from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.files import PartialAnswers
from lookonce.eval.decoding.dialogue import Answer
from lookonce.run.folder import RunFolder
from lookonce.status import find_unfinished

YES = Answer("yes", (1, 2), -0.5, "stop")


def test_answers_of_all_ranks_are_counted_beside_the_questions_of_the_split(tmp_path):
    stages = ("test", 0, [3]), ("test-stage-2", 0, [2])
    for name, rank, batches in (*stages, ("test", 1, [4]), ("val-untuned", 0, [1]), ("other", 0, [1])):
        with PartialAnswers(tmp_path / "predictions", name, "an evaluation", rank) as partial:
            for number, size in enumerate(batches):
                partial.add(10 * rank + number, [YES] * size)
    record = Record((Path("a"),), (Turn("Is there text?", "yes"),) * 2)
    found = find_unfinished(RunFolder(tmp_path), {"test": [record] * 8, "val": [record]})
    assert found == {"test": (9, 16), "val-untuned": (1, 2)}
    assert find_unfinished(RunFolder(tmp_path / "absent"), {"test": [record]}) == {}
