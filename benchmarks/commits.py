"""Measure the training steps of several commits in one run, on the same model and records.

    git worktree add /tmp/older d7c9069
    python benchmarks/commits.py /tmp/older . --models 8b 2b --samples 96 16 --rounds 2 --out figures.json

Each commit's own `lookonce bench step` runs in a process of its own, with its own compiler caches, in turn: a GPU whose
power is limited becomes slower while it is warm, which a measurement of one commit after the other would take for a
difference. Printed are the milliseconds a sample of each round, the best of them, and the ratio to the first commit's
best. The model's files are written once, by the first commit, to `--place`.
Commits before d7c9069 have no option `--variants`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

KEYS = ("ms_per_sample", "products_share", "peak_gb", "warm_up_seconds", "wait_share")
"""What is kept of each variant's figures."""


def measure(checkout: Path, model: str, samples: int, options: Any) -> list[dict[str, Any]]:
    """The figures of each variant of one checkout; a failure is a line on stderr and an empty list."""
    command = [sys.executable, "-m", "lookonce", "bench", "step", *what(model, options), "--json"]
    command += ["--steps", str(options.steps), "--variants", options.variants]
    for assignment in (f"batch.samples_per_step={samples}", *options.set):
        command += ["--set", assignment]
    caches = options.place / "compiled" / checkout.resolve().name
    own = {
        "PYTHONPATH": str(checkout / "src"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    began = time.perf_counter()
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    if done.returncode:
        print(f"{checkout}: {model}, {samples} samples a step: {done.stderr.strip()[-2000:]}", file=sys.stderr)
        return []
    seconds = time.perf_counter() - began
    return [
        {key: way[key] for key in KEYS} | {"variant": way["way"], "command_seconds": seconds}
        for way in json.loads(done.stdout)["ways"]
    ]


def what(model: str, options: Any) -> list[str]:
    """The arguments that name a run file, or a model of real size with its synthetic records."""
    if model.endswith(".yaml"):
        return [model]
    tokenizer = ["--tokenizer", str(options.tokenizer)] if options.tokenizer else []
    return ["--model", model, "--place", str(options.place), "--images", str(options.images), *tokenizer]


def best(figures: list[dict[str, Any]], variant: str) -> dict[str, Any] | None:
    """The fastest round of a variant."""
    of_variant = [one for one in figures if one["variant"] == variant]
    return min(of_variant, key=lambda one: float(one["ms_per_sample"]), default=None)


def rows(model: str, samples: int, measured: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Lines of the table: one for each commit and variant."""
    first = best(next(iter(measured.values())), "shared")
    lines = []
    for name, figures in measured.items():
        for variant in dict.fromkeys(one["variant"] for one in figures):
            found = best(figures, variant)
            assert found
            rounds = ", ".join(f"{one['ms_per_sample']:.3f}" for one in figures if one["variant"] == variant)
            ratio = f"{first['ms_per_sample'] / found['ms_per_sample']:.3f}" if first else ""
            share, peak = (found[key] or 0.0 for key in ("products_share", "peak_gb"))
            cells = (model, samples, name, variant, rounds, ratio, f"{share:.1%}", f"{peak:.1f}")
            lines.append(f"| {' | '.join(map(str, (*cells, round(found['warm_up_seconds']))))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, help="the first is compared with")
    parser.add_argument("--models", nargs="+", default=["8b", "2b"], help="sizes, or run files whose cache is built")
    parser.add_argument("--samples", nargs="+", type=int, default=[96], help="samples a step")
    parser.add_argument("--variants", default="shared")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="by default whole epochs of eight seconds")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--place", type=Path, default=Path("bench"))
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the run file, known to all commits")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    options = parser.parse_args()
    options.place = options.place.resolve()
    print("| model | samples a step | commit | variant | ms a sample | speed | of matmul rate | peak GB | before, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    everything = []
    for model, samples in product(options.models, options.samples):
        measured: dict[str, list[dict[str, Any]]] = {str(checkout): [] for checkout in options.checkouts}
        for _ in range(options.rounds):
            for checkout in options.checkouts:
                measured[str(checkout)] += measure(checkout, model, samples, options)
        print("\n".join(rows(model, samples, measured)), flush=True)
        everything.append({"model": model, "samples_per_step": samples, "commits": measured})
        if options.out:  # after each model, since a time limit may end the next
            options.out.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
