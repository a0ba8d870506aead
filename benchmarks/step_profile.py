"""Where a step's time goes on a GPU: kernels, and the gaps between them with what the CPU did meanwhile.

    python benchmarks/step_profile.py run.yaml --samples 96

Trains with shared passes as `lookonce bench step` does, and profiles three steps after a few. For a run file of made-up
data and a model of real size, run `lookonce bench step --model 8b` once; it leaves one in `bench/`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from lookonce.bench.variants import WAYS, set_up
from lookonce.run.config import read_run_file
from lookonce.run.inputs import Inputs
from lookonce.text import table
from lookonce.train.loop.session import Session
from lookonce.train.model.compile import training_on_packs

FIRST, NUM_STEPS = 6, 3
"""The step before the first that is profiled, and how many are."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
NUM_SHOWN = 16
Event = dict[str, Any]


class Profiled(TrainerCallback):
    """Profiles some steps of a training."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == FIRST:
            self.profile.start()
        if state.global_step == FIRST + NUM_STEPS:
            self.profile.stop()


def events_of(run: Path, samples: int) -> list[Event]:
    """What the profiler saw: Chrome's trace format, times in microseconds."""
    session = Session.open(Inputs.open(read_run_file(run, [f"batch.samples_per_step={samples}"])))
    examples, _ = session.examples("train")
    profiled = Profiled()
    with tempfile.TemporaryDirectory() as folder:
        model, trainer = set_up(WAYS["shared"], session, examples, FIRST + NUM_STEPS, Path(folder), print)
        trainer.add_callback(profiled)
        with training_on_packs(model, compiled=session.inputs.run.train.compile):
            trainer.train()
        trace = Path(folder, "trace.json")
        profiled.profile.export_chrome_trace(str(trace))
        return list(json.loads(trace.read_text())["traceEvents"])


def gaps_of(on_gpu: list[Event]) -> list[tuple[float, float, str]]:
    """When nothing ran on the GPU: how long, since when, and what ended it."""
    found, busy_until = [], on_gpu[0]["ts"]
    for event in on_gpu:
        if event["ts"] > busy_until:
            found.append((event["ts"] - busy_until, busy_until, event["name"]))
        busy_until = max(busy_until, event["ts"] + event["dur"])
    return found


def meanwhile(on_cpu: list[Event], start: float, length: float) -> str:
    """What the CPU was at longest in that time."""
    shares = defaultdict(float)
    for event in on_cpu:
        shared = min(event["ts"] + event["dur"], start + length) - max(event["ts"], start)
        if shared > 0:
            shares[event["name"][:32]] += shared
    return ", ".join(sorted(shares, key=lambda name: -shares[name])[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=int, default=96, help="a step")
    options = parser.parse_args()
    events = events_of(options.run, options.samples)
    on_gpu = sorted((event for event in events if event.get("cat") in ON_GPU), key=lambda event: event["ts"])
    on_cpu = [event for event in events if event.get("cat") in ON_CPU and "dur" in event]
    gaps = gaps_of(on_gpu)
    total = max(event["ts"] + event["dur"] for event in on_gpu) - on_gpu[0]["ts"]
    idle = sum(gap[0] for gap in gaps) / total
    print(
        f"a step takes {total / NUM_STEPS / 1e3:.1f} ms, in {idle:.1%} of which nothing runs on the GPU: "
        f"{len(gaps) // NUM_STEPS:,} gaps"
    )
    longest = sorted(gaps, reverse=True)[:NUM_SHOWN]
    lines = [(name[:40], f"{length / 1e3:.2f}", meanwhile(on_cpu, start, length)) for length, start, name in longest]
    print(table(("longest gaps, before", "ms", "the CPU meanwhile"), lines), end="\n\n")
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in on_gpu:
        kernels[event["name"][:60]].append(event["dur"])
    largest = sorted(kernels, key=lambda name: -sum(kernels[name]))[:NUM_SHOWN]
    lines = [
        (name, f"{sum(kernels[name]) / NUM_STEPS / 1e3:.2f}", f"{len(kernels[name]) / NUM_STEPS:.0f}")
        for name in largest
    ]
    print(table(("kernels", "ms a step", "times"), lines))


if __name__ == "__main__":
    main()
