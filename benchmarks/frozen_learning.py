"""Measure what rounded frozen weights change in what is learned: loss curves and exact match of the sample's model.

    python benchmarks/frozen_learning.py FOLDER REPORT.md [--seeds 8] [--frozen fp8 int8 nf4]

Trains the sample with each value of `train.frozen` and without rounding, with the same seeds, and so the same steps.
Answers the validation and test questions with each adapter, on the weights of its training and on unrounded ones, as
other programs have them; and those with the adapters of unrounded weights on rounded ones. Writes the report, and
beside it a drawing of the validation losses. Runs that are finished are not trained again. `frozen.py` compares
gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

from lookonce import page, read_run_file
from lookonce.datasets.balance import Majority
from lookonce.datasets.records import Record, read_records
from lookonce.datasets.sample.write import write_sample
from lookonce.eval.answerer import Answerer
from lookonce.page import Line, Panel
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.log_file import Curve, Curves, read_curves
from lookonce.run.open import TO_BUILD, Needs, open_run
from lookonce.run.sections import UNQUANTISED
from lookonce.workflow import train

RUN_FILE = Path(__file__).parents[1] / "experiments" / "sample.yaml"
KINDS = ("fp8", "int8", "nf4")
EVERY = 50
"""Steps between two logged losses, each the mean since the one before."""
SHOWN = (50, 100, 200, 400, 600, 800, 1000, 1200, 1300)
"""Steps in the table of losses."""


@dataclass(frozen=True)
class Trained:
    """The runs with one value of `train.frozen`, one a seed."""

    frozen: str
    runs: list[RunFile]

    @property
    def name(self) -> str:
        return "unrounded" if self.frozen == UNQUANTISED else f"`{self.frozen}`"

    @cached_property
    def curves(self) -> list[Curves]:
        return [read_curves(RunFolder(run.output).log) for run in self.runs]

    def scores(self, frozen: str) -> list[float]:
        """The exact match of each adapter, in percent, on frozen weights of a kind."""
        return [100 * exact_match(run, frozen) for run in self.runs]

    @property
    def mean_validation_loss(self) -> Curve:
        curves = [one.validation_loss for one in self.curves]
        return {step: mean(one[step] for one in curves) for step in curves[0]}

    @property
    def seconds(self) -> float:
        return mean(RunFolder(run.output).read_trained().seconds for run in self.runs)


def run_of(folder: Path, frozen: str, seed: int) -> RunFile:
    """The sample's run with these frozen weights; the sample lies in `folder`, which gets its run."""
    values: dict[str, object] = {
        f"data.{split}": folder / "sample" / f"{split}.jsonl" for split in ("train", "val", "test")
    }
    values |= {"model.path": folder / "sample" / "model", "cache.dir": folder / "caches"}
    values |= {"output": folder / "runs" / f"{frozen}-{seed}", "train.seed": seed, "train.frozen": frozen}
    values |= {"train.logging_steps": EVERY, "train.eval_steps": EVERY}
    return read_run_file(RUN_FILE, [f"{key}={value}" for key, value in values.items()])


def trained(folder: Path, frozen: str, seeds: int) -> Trained:
    runs = [run_of(folder, frozen, seed) for seed in range(seeds)]
    open_run(runs[0], TO_BUILD).build()
    for run in runs:
        if not (run.output / "summary.json").exists():
            train(run, restart=run.output.exists(), notify=lambda note: None)
    return Trained(frozen, runs)


def exact_match(run: RunFile, frozen: str) -> float:
    """The exact match of a run's adapter on frozen weights of a kind.

    Answers are given to validation and test questions together, since each split alone is small, and in memory, so that
    no run folder changes.
    """
    shown = run.model_copy(update={"eval": run.eval.model_copy(update={"frozen": frozen})})
    opened = open_run(shown, Needs("benchmark", model="open"))
    records, answerer = questions(run), Answerer(opened, opened.folder.adapter)
    return share_right(records, [answer.text for answer in answerer.answer_records(records)])


def majority(run: RunFile) -> float:
    """The exact match of always giving the most frequent training answer."""
    known = Majority.of_records(record for path in run.data.train for record in read_records(path))
    records = questions(run)
    return share_right(records, [known.answer(record.turns[0].question) for record in records])


def questions(run: RunFile) -> list[Record]:
    return [record for path in (*run.data.val, *run.data.test) for record in read_records(path)]


def share_right(records: Sequence[Record], answers: Sequence[str]) -> float:
    right = [text.strip() == one.turns[0].answer.strip() for text, one in zip(answers, records, strict=True)]
    return sum(right) / len(right)


def to_markdown(found: list[Trained], of_majority: float) -> str:
    lines = [
        "# Rounded frozen weights and what is learned, on a CPU",
        "",
        "Written by `benchmarks/frozen_learning.py`: the run of `experiments/sample.yaml`. Exact match, in percent, is",
        "that on validation and test questions: the mean of the seeds of training, their standard deviation, and each",
        "of them. The difference from the first row, seed by seed, has its standard error. Always the majority answer:",
        f"{100 * of_majority:.1f} %.",
        "",
        *scores_table(found),
        "",
        f"Training loss, over {EVERY} steps, and validation loss, both the mean of the seeds:",
        "",
        *losses_table(found),
        "",
        f"Seconds of training: {', '.join(f'{one.name} {one.seconds:.0f}' for one in found)}.",
    ]
    return "\n".join(lines) + "\n"


def scores_table(found: list[Trained]) -> list[str]:
    """The exact match on the weights of the training, and if these are rounded, of each on the other's weights."""
    lines = ["| trained on | answered on | mean | deviation | difference | each seed |", "|---|---|---|---|---|---|"]
    whole, first = found[0], found[0].scores(UNQUANTISED)
    for one in found:
        for of, on in [(one, one), (one, whole), (whole, one)] if one is not whole else [(one, one)]:
            scores = of.scores(on.frozen)
            apart = [score - other for score, other in zip(scores, first, strict=True)]
            cells = (f"**{mean(scores):.1f}**", f"{stdev(scores):.1f}")
            difference = f"{mean(apart):+.1f} ± {stdev(apart) / len(apart) ** 0.5:.1f}" if any(apart) else ""
            each = ", ".join(f"{score:.1f}" for score in scores)
            lines.append(f"| {' | '.join((of.name, on.name, *cells, difference, each))} |")
    return lines


def losses_table(found: list[Trained]) -> list[str]:
    """Training and validation losses at some steps, each the mean of the seeds."""
    names = [f"{what}, {one.name}" for what in ("training", "validation") for one in found]
    lines = [f"| step | {' | '.join(names)} |", f"|{'---|' * (1 + len(names))}"]
    for step in SHOWN:
        losses = [mean(one.loss[step] for one in each.curves) for each in found]
        losses += [each.mean_validation_loss[step] for each in found]
        lines.append(f"| {step:,} | {' | '.join(f'{loss:.3f}' for loss in losses)} |")
    return lines


def draw(found: list[Trained], report: Path) -> None:
    """Draw the validation losses of each kind beside those of unrounded weights, as PDFs beside the report."""
    whole, high = found[0], max(list(found[0].mean_validation_loss.values())[2:])
    for each in found[1:]:
        lines = [Line("unrounded, each seed", one.validation_loss, "faint") for one in whole.curves]
        lines.append(Line("unrounded, mean", whole.mean_validation_loss, "line"))
        lines.append(Line("rounded, mean", each.mean_validation_loss, "marked", 1))
        figure = page.curves(Panel(f"validation loss, {each.frozen}", lines, (0.0, high)), "step")
        page.write_pdf(figure, report.with_name(f"{report.stem}-{each.frozen}.pdf"))


def points_of(curve: Curve) -> list[tuple[float, float]]:
    return list(curve.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--seeds", type=int, default=8, help="at least 2")
    parser.add_argument("--frozen", nargs="+", default=KINDS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    write_sample(folder / "sample")
    found = [trained(folder, frozen, options.seeds) for frozen in (UNQUANTISED, *options.frozen)]
    options.report.write_text(to_markdown(found, majority(found[0].runs[0])))
    draw(found, options.report)


if __name__ == "__main__":
    main()
