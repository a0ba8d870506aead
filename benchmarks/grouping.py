"""Measure whether learning suffers when the questions about an image stay together in a step.

    python benchmarks/grouping.py --folder /tmp/grouping --images 2000 --processes 6

Trains the sample's tiny model on a larger sample in several orders, three seeds each, and asks held-out questions at
marks on the way: exact match against samples seen and against seconds of training. Writes a file for each training to
`FOLDER/curves`, so that an interrupted study resumes, prints a table, and draws `samples.png` and `seconds.png` if
matplotlib is installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.datasets.records import read_records, write_records
from lookonce.datasets.sample.write import write_sample
from lookonce.eval.answers.questions import Questions
from lookonce.eval.scores.metrics import Evaluation
from lookonce.files import write_text
from lookonce.run.config import RunFile
from lookonce.run.open import FROM_CACHE, TO_BUILD, OpenRun, open_run
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.session import make_trainer
from lookonce.train.model.load import PRECISIONS, add_lora, load_without_tower

ORDERS = {"random": 1, "4 an image": 4, "all of an image": None}
STEPS = {16: 2.5e-3, 64: 5e-3}
"""Learning rate by samples a step; it grows with the square root."""
SEEDS = (0, 1, 2)
NUM_MARKS = 12
ENOUGH = 0.98
NUM_ASKED = 1000
"""Number of held-out questions, the same at every mark."""


def name_of(order: str, samples_per_step: int, seed: int) -> str:
    return f"{order}, {samples_per_step} a step, seed {seed}"


def run_file(folder: Path, order: str, samples_per_step: int, seed: int, epochs: float) -> RunFile:
    sample = folder / "sample"
    return RunFile.model_validate(
        {
            "model": {"path": str(sample / "model")},
            "data": {"train": str(sample / "train.jsonl"), "val": str(sample / "asked.jsonl")},
            "cache": {"dir": str(folder / "caches"), "dtype": "float32"},
            "lora": {"rank": 32, "alpha": 64, "modules_to_save": ["embed_tokens"]},
            "batch": {"samples_per_step": samples_per_step, "questions_per_image": ORDERS[order]},
            "train": {
                "epochs": epochs,
                "precision": "fp32",
                "learning_rate": STEPS[samples_per_step],
                "warmup": 0.05,
                "seed": seed,
                "compile": False,
            },
            "eval": {"max_new_tokens": 16, "batch_size": 256},
            "output": str(folder / "unused"),
        }
    )


class Marks(TrainerCallback):
    """Evaluates the held-out questions at marks; the time for that is not counted."""

    def __init__(self, session: OpenRun, model: Any, num_steps: int) -> None:
        self.session, self.model = session, model
        self.points: list[dict[str, float]] = []
        self._every = max(num_steps // NUM_MARKS, 1)
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every and state.global_step != state.max_steps:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        questions = Questions.of(self.session, "val")
        answered = dict(questions.answer(self.model, range(len(questions.batches))))
        found = Evaluation.of(questions.predictions(questions.of_questions(answered))).overall
        samples = state.global_step * self.session.run.batch.samples_per_step
        self.points.append(
            {"samples": samples, "seconds": seconds, "exact_match": found.exact_match, "majority": found.majority}
        )
        self._started = time.perf_counter() - seconds


def train_one(run: RunFile) -> list[dict[str, float]]:
    """Train, and return the points of the curve."""
    session = open_run(run, FROM_CACHE)
    examples, _ = session.examples("train")
    model = load_without_tower(session.model_folder, PRECISIONS[run.train.precision])
    model = add_lora(model, session.model_folder, run.lora, run.train.seed)
    arguments = training_arguments(run, Path(run.output), eval_strategy="no", save_strategy="no", logging_steps=1000)
    trainer = make_trainer(session, model, arguments, examples)
    num_steps = round(trainer.train_sampler.num_steps * run.train.epochs)
    marks = Marks(session, model, num_steps)
    trainer.add_callback(marks)
    trainer.train()
    return marks.points


def prepare(folder: Path, num_images: int) -> None:
    sample = folder / "sample"
    write_sample(sample, num_images=num_images)
    held_out = read_records(sample / "val.jsonl")
    write_records(sample / "asked.jsonl", random.Random(0).sample(held_out, min(NUM_ASKED, len(held_out))))
    open_run(run_file(folder, "random", 16, 0, 1), TO_BUILD).build()


def all_curves(folder: Path, epochs: float, num_processes: int) -> dict[str, list[dict[str, float]]]:
    def curve(training: tuple[str, int, int]) -> tuple[str, list[dict[str, float]]]:
        path = folder / "curves" / f"{name_of(*training)}.json"
        if not path.exists():
            command = [sys.executable, __file__, "--folder", str(folder), "--epochs", str(epochs)]
            done = subprocess.run(
                [*command, "--one", json.dumps(training)], check=True, stdout=subprocess.PIPE, text=True
            )
            write_text(path, done.stdout.splitlines()[-1])
            print(name_of(*training), file=sys.stderr, flush=True)
        return name_of(*training), json.loads(path.read_text())

    trainings = [(order, size, seed) for seed, size, order in itertools.product(SEEDS, STEPS, ORDERS)]
    with ThreadPoolExecutor(num_processes) as threads:
        return dict(threads.map(curve, trainings))


def table(curves: dict[str, list[dict[str, float]]]) -> str:
    """Mean over seeds: exact match after parts of the samples, thousands of samples to reach `ENOUGH`, and seconds."""
    lines = [f"{'':32}{'quarter':>16}{'half':>16}{'3 quarters':>16}{'end':>16}{f'to {ENOUGH:.0%}':>10}{'seconds':>10}"]
    for order, size in itertools.product(ORDERS, STEPS):
        found = [curves[name_of(order, size, seed)] for seed in SEEDS]
        cells = []
        for share in (0.25, 0.5, 0.75, 1.0):
            at = [curve[max(round(len(curve) * share) - 1, 0)]["exact_match"] for curve in found]
            cells.append(f"{statistics.mean(at):.1%} ±{statistics.stdev(at):.1%}")
        seconds = statistics.mean(curve[-1]["seconds"] for curve in found)
        needed = statistics.mean(samples_to(ENOUGH, curve) for curve in found) / 1e3
        row = "".join(f"{cell:>16}" for cell in cells) + f"{needed:>10.1f}{seconds:>10.0f}"
        lines.append(f"{f'{order}, {size} a step':32}{row}")
    return "\n".join(lines)


def samples_to(enough: float, curve: list[dict[str, float]]) -> float:
    """Samples seen when exact match first reached `enough`, interpolated between two marks; NaN if it never did."""
    before = {"samples": 0.0, "exact_match": curve[0]["majority"]}
    for point in curve:
        if point["exact_match"] >= enough:
            share = (enough - before["exact_match"]) / (point["exact_match"] - before["exact_match"])
            return before["samples"] + share * (point["samples"] - before["samples"])
        before = point
    return float("nan")


def draw(curves: dict[str, list[dict[str, float]]], folder: Path) -> None:
    from matplotlib import pyplot

    for quantity, label in (("samples", "samples seen"), ("seconds", "seconds of training")):
        figure, axes = pyplot.subplots(1, len(STEPS), figsize=(11, 4.2), sharey=True)
        for axis, size in zip(axes, STEPS, strict=True):
            for color, order in zip(("tab:blue", "tab:orange", "tab:green"), ORDERS, strict=True):
                for seed in SEEDS:
                    curve = curves[name_of(order, size, seed)]
                    x, y = [point[quantity] for point in curve], [point["exact_match"] for point in curve]
                    axis.plot(x, y, color=color, alpha=0.8, label=order if seed == SEEDS[0] else None)
            axis.axhline(curve[-1]["majority"], color="gray", linestyle=":")
            axis.set(title=f"{size} samples a step", xlabel=label)
        axes[0].set(ylabel="exact match, held-out images")
        axes[0].legend()
        figure.tight_layout()
        figure.savefig(folder / f"{quantity}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train_one(run_file(options.folder, *json.loads(options.one), options.epochs))))
        return
    prepare(options.folder, options.images)
    curves = all_curves(options.folder, options.epochs, options.processes)
    print(table(curves))
    try:
        draw(curves, options.folder)
    except ImportError:
        print("matplotlib is not installed; no plots drawn", file=sys.stderr)


if __name__ == "__main__":
    main()
