"""Run folders made by hand, as a training and an evaluation leave them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from support.answers import look_finished, look_trained

from lookonce.datasets.records import Record, Turn
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import Prediction, write_predictions
from lookonce.files import write_json, write_text
from lookonce.run.folder import RunFolder
from lookonce.train.data.policy import Drawn
from lookonce.train.loop.log_files import write_drawn

REWARDED = {"reward_spread": 0.25, "mixed_share": 0.5, "entropy": 1.5, "answer_tokens": 3.0, "kl": 0.0625}
REWARDED |= {"questions_drawn": 7, "cut_share": 0.0}
REWARDED |= {"sampling_seconds": 3.0, "rewarding_seconds": 0.5, "training_seconds": 1.5}
"""What a line of the log of a training by rewards has besides."""


@pytest.fixture
def make_folder(make_run, tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder with these answers; without answers, one whose training has stopped.

    With `beside`, questions follow earlier answers, and these are the answers after true ones and after none. With
    `drawn` it is a training by rewards, which drew these answers to questions of the same texts.
    """

    def make(
        name: str,
        rows: Sequence[Prediction] = (),
        seed: int = 0,
        beside: Mapping[str, Sequence[Prediction]] | None = None,
        metric: str = "exact_match",
        drawn: Sequence[str] = (),
    ) -> Path:
        train = tmp_path / "train.jsonl"
        record = {"image_filename": "a.jpg", "question": "q0", "answer": "yes"}
        train.write_text(json.dumps(record) + "\n")
        context = None if beside is None else {"by": "stage", "order": [1, 2, 3]}
        data = {"train": str(train), "val": [], "test": [], "context": context}
        run = make_run(output=str(tmp_path / name), data=data, train={"seed": seed})
        folder = RunFolder(run.output)
        write_json(run.output / "run.json", {"run": run.model_dump(mode="json"), "inputs": {"cache": "c" * 64}})
        lines = [
            {"step": step, "loss": 4 / step, "time": 1e9 + step, "tokens_per_second": 10.0} for step in range(1, 9)
        ]
        if drawn:
            lines = [line | REWARDED | {"reward": line["step"] / 16} for line in lines]
            asked = [(Record((Path(f"/{text}"),), (Turn(text, text),), origin=text), 0) for text in drawn]
            for step in (1, 8):
                answers = [Drawn([1], 0.125 * number, text=text) for number, text in enumerate(drawn)]
                write_drawn(folder.drawn, asked, step, [(number, answers) for number in range(len(drawn))])
        lines += [{"step": 8, "eval_loss": 0.25, "time": 1e9 + 9}]
        write_text(folder.log, "".join(json.dumps(line) + "\n" for line in lines))
        if rows:
            _finish(folder, rows, metric)
        for kind, others in (beside or {}).items():
            write_predictions(folder.predictions(f"val-{kind}"), others)
        return run.output

    return make


def _finish(folder: RunFolder, rows: Sequence[Prediction], metric: str) -> None:
    write_predictions(folder.predictions("val"), rows)
    write_json(folder.metrics("val"), Evaluation.of(list(rows), metric=metric).to_json())
    write_json(folder.answering("val"), {"num_answered": len(rows), "seconds": 3.0})
    figures = {"num_steps": 8, "num_samples": 64, "num_too_long": 2, "seconds": 30.0}
    look_trained(folder, **figures, startup_seconds={"load weights": 2.0})
    write_json(folder.folder / "environment.json", {"gpus": ["A GPU"], "libraries": {"torch": "2.0"}})
    look_finished(folder)
