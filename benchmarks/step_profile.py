"""Summarise profiles of training steps on a GPU: kinds of kernels, the longest ones, and the gaps between them.

    python benchmarks/turns.py --tokenizer Qwen3-VL-tokenizer --rounds 1 --profile traces "8b shared" "2b shared"
    python benchmarks/step_profile.py traces/8b-shared.json.gz

A gap is named after the kernel that ends it, and what the CPU did meanwhile.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from turns import NUM_PROFILED

from lookonce.text import table

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
KINDS = {
    "products": ("nvjet", "gemm", "cutlass", "xmma", "splitK"),
    "attention": ("flex_attention", "flash", "fmha", "zeros_mul_sum"),
    "LoRA's small products": ("times_narrow", "sums_of_outer", "scaled_copies"),
    "between an MLP's products": ("_gated", "_gradients"),
    "other compiled code": ("triton_",),
    "optimizer and sums of gradients": ("multi_tensor",),
}
"""Parts of the names of kernels of each kind, the first that fits; the rest are others."""
Event = dict[str, Any]


def events_of(trace: Path) -> list[Event]:
    """The events of a trace in Chrome's format, with times in microseconds."""
    return list(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])


def kind_of(name: str) -> str:
    found = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
    return next(found, "others")


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


def sums(on_gpu: list[Event], key: Any) -> list[tuple[str, str, str]]:
    """For each name that `key` gives kernels: milliseconds and kernels a step, the most milliseconds first."""
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in on_gpu:
        kernels[key(event["name"])].append(event["dur"])
    longest_first = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return [
        (name, f"{sum(times) / NUM_PROFILED / 1e3:.2f}", f"{len(times) / NUM_PROFILED:.0f}")
        for name, times in longest_first
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--shown", type=int, default=16, help="lines of a table (default: %(default)s)")
    options = parser.parse_args()
    events = events_of(options.trace)
    on_gpu = sorted((event for event in events if event.get("cat") in ON_GPU), key=lambda event: event["ts"])
    if not on_gpu:
        raise SystemExit(f"{options.trace} has no kernels of a GPU; profile a training on one")
    on_cpu = [event for event in events if event.get("cat") in ON_CPU and "dur" in event]
    gaps = gaps_of(on_gpu)
    total = max(event["ts"] + event["dur"] for event in on_gpu) - on_gpu[0]["ts"]
    idle = sum(gap[0] for gap in gaps) / total
    print(
        f"a step takes {total / NUM_PROFILED / 1e3:.1f} ms; the GPU is idle {idle:.1%} of it, "
        f"in {len(gaps) // NUM_PROFILED:,} gaps\n"
    )
    print(table(("kind", "ms a step", "kernels"), sums(on_gpu, kind_of)), end="\n\n")
    longest = sorted(gaps, reverse=True)[: options.shown]
    lines = [(name[:40], f"{length / 1e3:.2f}", meanwhile(on_cpu, start, length)) for length, start, name in longest]
    print(table(("longest gaps, before", "ms", "CPU meanwhile"), lines), end="\n\n")
    print(table(("kernels", "ms a step", "times"), sums(on_gpu, lambda name: name[:60])[: options.shown]))


if __name__ == "__main__":
    main()
