"""Profile training steps on a GPU: the longest kernels, and the gaps between kernels with what the CPU did meanwhile.

    python benchmarks/step_profile.py run.yaml --samples 96

Trains the variant `shared` of `lookonce bench step`, and profiles three steps after some warm-up. To get a run file
with made-up data and a model of real size, run `lookonce bench step --model 8b` once; it writes one to `bench/`.
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

from lookonce.bench.variants import VARIANTS, set_up
from lookonce.run.config import read_run_file
from lookonce.run.inputs import RunInputs
from lookonce.text import table
from lookonce.train.loop.session import Session
from lookonce.train.model.compile import training_on_packs

NUM_WARM_UP, NUM_STEPS = 6, 3
"""Steps before the profile, and steps in it."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
NUM_SHOWN = 16
Event = dict[str, Any]


class Profiled(TrainerCallback):
    """Profiles `NUM_STEPS` steps of a training after `NUM_WARM_UP`."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == NUM_WARM_UP:
            self.profile.start()
        if state.global_step == NUM_WARM_UP + NUM_STEPS:
            self.profile.stop()


def events_of(run: Path, samples: int) -> list[Event]:
    """Train, and return the profiler's events in Chrome's trace format, with times in microseconds."""
    session = Session.open(RunInputs.open(read_run_file(run, [f"batch.samples_per_step={samples}"])))
    examples, _ = session.examples("train")
    profiled = Profiled()
    with tempfile.TemporaryDirectory() as folder:
        model, trainer = set_up(VARIANTS["shared"], session, examples, NUM_WARM_UP + NUM_STEPS, Path(folder), print)
        trainer.add_callback(profiled)
        with training_on_packs(model, compiled=session.inputs.run.train.compile):
            trainer.train()
        trace = Path(folder, "trace.json")
        profiled.profile.export_chrome_trace(str(trace))
        return list(json.loads(trace.read_text())["traceEvents"])


def gaps_of(on_gpu: list[Event]) -> list[tuple[float, float, str]]:
    """Intervals in which the GPU was idle: length, start, and the name of the kernel that ended them."""
    found, busy_until = [], on_gpu[0]["ts"]
    for event in on_gpu:
        if event["ts"] > busy_until:
            found.append((event["ts"] - busy_until, busy_until, event["name"]))
        busy_until = max(busy_until, event["ts"] + event["dur"])
    return found


def meanwhile(on_cpu: list[Event], start: float, length: float) -> str:
    """The three CPU operations that took the most time in an interval."""
    shares = defaultdict(float)
    for event in on_cpu:
        shared = min(event["ts"] + event["dur"], start + length) - max(event["ts"], start)
        if shared > 0:
            shares[event["name"][:32]] += shared
    return ", ".join(sorted(shares, key=lambda name: -shares[name])[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=int, default=96, help="samples a step (default: %(default)s)")
    options = parser.parse_args()
    events = events_of(options.run, options.samples)
    on_gpu = sorted((event for event in events if event.get("cat") in ON_GPU), key=lambda event: event["ts"])
    on_cpu = [event for event in events if event.get("cat") in ON_CPU and "dur" in event]
    gaps = gaps_of(on_gpu)
    total = max(event["ts"] + event["dur"] for event in on_gpu) - on_gpu[0]["ts"]
    idle = sum(gap[0] for gap in gaps) / total
    print(
        f"a step takes {total / NUM_STEPS / 1e3:.1f} ms; the GPU is idle {idle:.1%} of it, "
        f"in {len(gaps) // NUM_STEPS:,} gaps"
    )
    longest = sorted(gaps, reverse=True)[:NUM_SHOWN]
    lines = [(name[:40], f"{length / 1e3:.2f}", meanwhile(on_cpu, start, length)) for length, start, name in longest]
    print(table(("longest gaps, before", "ms", "CPU meanwhile"), lines), end="\n\n")
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
