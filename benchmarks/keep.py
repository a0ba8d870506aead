"""Measure merged tokens beside fewer pixels: the cache, the time of a step, and what the sample's model learns.

    python benchmarks/keep.py FOLDER REPORT.md [--seeds 3] [--max-pixels 80000 20480]

Trains the sample with each share of `cache.keep`, and with the `cache.max_pixels` whose images have as many tokens in
all, for several seeds; answers the validation and test questions with each adapter, and with those that were trained
on merged tokens also without merging, as other programs do; writes the report, with a table for each `--max-pixels` to
begin with. A step's seconds are those of the CPU, of `shared` over 100 steps, the least of several turns, so that they
depend little on what else the machine does. Runs that are finished are not trained again.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from sample_runs import exact_match, majority, sample_run, train_all

from lookonce.bench.variants import VARIANTS, set_up
from lookonce.cache.build.planner import planned_images
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.sample.write import write_sample
from lookonce.run.config import RunFile
from lookonce.run.inputs import RunInputs
from lookonce.text import size
from lookonce.train.loop.session import Session
from lookonce.train.model.compile import training_on_packs

SHARES = (1.0, 0.5, 0.25)
NUM_STEPS, NUM_TURNS = 100, 4
PIXEL_STEP = 256


@dataclass(frozen=True)
class Measured:
    """What a way to have fewer tokens costs and gives."""

    name: str
    tokens: float
    """Tokens an image, in the mean."""
    num_bytes: int
    exact_match: list[float]
    without_merging: list[float]
    """The exact match of the same adapters with all tokens; empty if no tokens were merged."""
    step_seconds: float = math.inf

    def row(self, whole: Measured) -> str:
        step = f"{1000 * self.step_seconds:.1f} | {self.step_seconds / whole.step_seconds:.2f}"
        scores = f"{in_percent(self.exact_match)} | {in_percent(self.without_merging)}"
        return f"| {self.name} | {self.tokens:.1f} | {size(self.num_bytes)} | {step} | {scores} |"


def in_percent(scores: list[float]) -> str:
    """The mean of some scores, and each of them."""
    if not scores:
        return ""
    each = ", ".join(f"{100 * score:.1f}" for score in scores)
    return f"**{100 * sum(scores) / len(scores):.1f}** ({each})"


def run_of(folder: Path, name: str, seed: int, **cache: float) -> RunFile:
    """The sample's run with these settings of the cache."""
    values = {"cache.min_pixels": 1} | {f"cache.{key}": value for key, value in cache.items()}
    return sample_run(folder, name, seed, values)


def measure(folder: Path, name: str, seeds: int, **cache: float) -> tuple[Measured, Session]:
    runs = [run_of(folder, "-".join(map(str, cache.values())), seed, **cache) for seed in range(seeds)]
    inputs = RunInputs.open(runs[0])
    inputs.build()
    found = inputs.open_cache()
    tokens = [found.entry(key)[1].num_tokens for key in found.keys()]
    train_all(runs)
    scores = [exact_match(run, "cache", keep=run.cache.keep) for run in runs]
    others = [exact_match(run, "cache", keep=1.0) for run in runs] if runs[0].cache.keep < 1 else []
    return Measured(name, sum(tokens) / len(tokens), found.size_bytes, scores, others), Session.open(inputs)


def step_seconds(session: Session) -> float:
    """CPU seconds of a step."""
    with TemporaryDirectory() as folder:
        examples, variant = session.examples("train")[0], VARIANTS["shared"]
        model, trainer = set_up(variant, session, examples, NUM_STEPS, Path(folder), lambda note: None)
        start = time.process_time()
        with training_on_packs(model, compiled=False):
            trainer.train()
    return (time.process_time() - start) / NUM_STEPS


def equal_pixels(inputs: RunInputs, most: int, share: float) -> int:
    """The `cache.max_pixels` with which the images have most nearly this share of their tokens."""
    sizes = [inputs.images.size_of[key] for key in inputs.images.path_of]

    def num_tokens(pixels: int) -> int:
        processor = ImageProcessor(inputs.model_folder.folder, min_pixels=1, max_pixels=pixels)
        return sum(processor.num_tokens(*one) for one in sizes)

    wanted = share * sum(image.num_tokens for image in planned_images(inputs.images, inputs.processor))
    return min(range(PIXEL_STEP, most + 1, PIXEL_STEP), key=lambda pixels: abs(num_tokens(pixels) - wanted))


def measure_all(folder: Path, seeds: int, max_pixels: int) -> list[Measured]:
    write_sample(folder / "sample")
    whole = RunInputs.open(run_of(folder, "whole", 0, max_pixels=max_pixels))
    found = [measure(folder, f"`keep: {share:g}`", seeds, max_pixels=max_pixels, keep=share) for share in SHARES]
    for share in SHARES[1:]:
        pixels = equal_pixels(whole, max_pixels, share)
        found.append(measure(folder, f"`max_pixels: {pixels}`", seeds, max_pixels=pixels))
    turns = [[step_seconds(session) for _, session in found] for _ in range(NUM_TURNS)]
    return [
        replace(one, step_seconds=min(times)) for (one, _), times in zip(found, zip(*turns, strict=True), strict=True)
    ]


def to_markdown(tables: dict[int, list[Measured]], of_majority: float) -> str:
    lines = [
        "# Merged tokens and fewer pixels on the sample, on a CPU",
        "",
        "Written by `benchmarks/keep.py`: the run of `experiments/sample.yaml`, one thread, float32. Exact match is",
        "that on validation and test questions: the mean of some seeds of training, and each of them. The last column",
        "has that of the same adapters with all tokens of the images. Always the majority answer:",
        f"{100 * of_majority:.1f} %.",
    ]
    for max_pixels, found in tables.items():
        lines += [
            "",
            f"## From `max_pixels: {max_pixels}`",
            "",
            "| | tokens an image | cache | CPU ms a step | relative | exact match, % | without merging, % |",
            "|---|---|---|---|---|---|---|",
            *(one.row(found[0]) for one in found),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-pixels", type=int, nargs="+", default=[80_000, 20_480])
    options = parser.parse_args()
    folder = options.folder.absolute()
    tables: dict[int, list[Measured]] = {}
    for pixels in options.max_pixels:
        tables[pixels] = measure_all(folder, options.seeds, pixels)
        options.report.write_text(to_markdown(tables, majority(run_of(folder, "", 0))))


if __name__ == "__main__":
    main()
