"""What measuring ways of training has shown, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lookonce.text import duration, table

KVASIR_EPOCH = 41_079
"""Training samples of Kvasir-VQA, split by image 70/15/15."""


@dataclass(frozen=True)
class Measured:
    """Some steps of one way."""

    way: str
    says: str
    num_steps: int
    num_samples: int
    seconds: float
    warm_up_seconds: float
    """Before these: the trial of packs, with what is compiled and recorded in it, and the first steps."""
    wait_share: float
    """Of the time, spent waiting for data."""
    tokens_per_second: float
    """Of samples as they would stand alone, without padding."""
    products_share: float | None
    """Of the time, what the language model's matrix products would take at the card's own rate; None without a GPU."""
    peak_gb: float | None
    losses: list[float]
    """That were logged; of the first step, before anything is learned, it is equal in all ways that see the same
    samples in it."""

    @property
    def ms_per_sample(self) -> float:
        return 1e3 * self.seconds / self.num_samples

    def text(self) -> str:
        products = "" if self.products_share is None else f", products {_share(self.products_share)}"
        peak = "" if self.peak_gb is None else f", peak {_gigabytes(self.peak_gb)} GB"
        return f"{self.way}: {self.ms_per_sample:.2f} ms a sample{products}, wait {_share(self.wait_share)}{peak}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ms_per_sample": self.ms_per_sample}


@dataclass(frozen=True)
class StepReport:
    """All ways that were measured."""

    measured: list[Measured]
    samples_per_step: int
    tflops: float | None
    """That the card reaches in large products."""
    num_ranks: int = 1
    """Processes that shared each step."""
    missing: tuple[str, ...] = ()
    """Ways that have not ended."""

    def speedup(self, way: str) -> float:
        """Against the first."""
        return self.measured[0].ms_per_sample / self.of(way).ms_per_sample

    def of(self, way: str) -> Measured:
        return next(measured for measured in self.measured if measured.way == way)

    def text(self) -> str:
        lines = [
            (
                one.way,
                f"{1e3 / one.ms_per_sample:.1f}",
                f"{one.ms_per_sample:.2f}",
                f"{self.measured[0].ms_per_sample / one.ms_per_sample:.1f}x",
                f"{one.tokens_per_second:,.0f}",
                _share(one.products_share),
                _share(one.wait_share),
                _gigabytes(one.peak_gb),
                duration(one.ms_per_sample * KVASIR_EPOCH / 1e3),
                duration(one.warm_up_seconds),
                f"{one.losses[0]:.4f}",
            )
            for one in self.measured
        ]
        head = (
            "",
            "samples/s",
            "ms/sample",
            "",
            "tokens/s",
            "products",
            "wait",
            "peak GB",
            "epoch",
            "before",
            "first loss",
        )
        notes = [f"  {one.way}: {one.says} ({one.num_steps} steps)" for one in self.measured]
        rate = [f"  products: their share of the time at {self.tflops:.0f} TFLOP/s"] if self.tflops else []
        epoch = f"  epoch: {KVASIR_EPOCH:,} samples, Kvasir-VQA's training split; before: compilation and first steps"
        steps = f"  {self.samples_per_step} samples a step" + (
            f", shared by {self.num_ranks} processes" if self.num_ranks > 1 else ""
        )
        missing = [f"  not measured: {', '.join(self.missing)}"] if self.missing else []
        return "\n".join([table(head, lines), *notes, *missing, *rate, epoch, steps])

    def to_json(self) -> dict[str, Any]:
        return {
            "ways": [one.to_json() for one in self.measured],
            "samples_per_step": self.samples_per_step,
            "tflops": self.tflops,
            "num_ranks": self.num_ranks,
            "missing": self.missing,
        }


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _gigabytes(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"
