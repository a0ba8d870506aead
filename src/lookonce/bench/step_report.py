"""The figures of `lookonce bench step` as a table and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lookonce.text import count, duration, table

HEADER = (
    "",
    "samples/s",
    "ms/sample",
    "",
    "tokens/s",
    "MFU",
    "wait",
    "peak GB",
    "epoch",
    "before",
    "first loss",
)


@dataclass(frozen=True)
class Measured:
    """The measured steps of one variant."""

    variant: str
    description: str
    num_steps: int
    num_samples: int
    seconds: float
    warm_up_seconds: float
    """Time before the measured steps: the trial of packs with its compilation and capturing, and the first steps."""
    wait_share: float
    """Share of the time that was spent waiting for data."""
    tokens_per_second: float
    """Each sample's tokens are counted as if it stood alone, without padding."""
    mfu: float | None
    """FLOPs of the language model's matrix products over those that the GPU reaches; None without a GPU."""
    peak_gb: float | None
    losses: list[float]
    """Logged losses. Variants that see the same samples in the first step have the same first loss."""

    @property
    def ms_per_sample(self) -> float:
        return 1e3 * self.seconds / self.num_samples

    def text(self) -> str:
        mfu = "" if self.mfu is None else f", MFU {_percent(self.mfu)}"
        peak = "" if self.peak_gb is None else f", peak {_gigabytes(self.peak_gb)} GB"
        return f"{self.variant}: {self.ms_per_sample:.2f} ms per sample{mfu}, wait {_percent(self.wait_share)}{peak}"

    def to_json(self) -> dict[str, Any]:
        """The keys are those of the first version, which called variants ways."""
        return {
            "way": self.variant,
            "says": self.description,
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "seconds": self.seconds,
            "warm_up_seconds": self.warm_up_seconds,
            "wait_share": self.wait_share,
            "tokens_per_second": self.tokens_per_second,
            "products_share": self.mfu,
            "peak_gb": self.peak_gb,
            "losses": self.losses,
            "ms_per_sample": self.ms_per_sample,
        }


@dataclass(frozen=True)
class StepReport:
    """All variants that were measured."""

    measured: list[Measured]
    samples_per_step: int
    samples_per_epoch: int
    """Training samples of the run."""
    tflops: float | None
    """TFLOP/s that the GPU reaches in large matrix products."""
    num_ranks: int = 1
    """Processes that shared each step."""
    missing: tuple[str, ...] = ()
    """Variants that were not measured to the end."""

    def speedup(self, one: Measured) -> float:
        """How many times faster a variant is than the first."""
        return self.measured[0].ms_per_sample / one.ms_per_sample

    def text(self) -> str:
        notes = [f"  {one.variant}: {one.description} ({count(one.num_steps, 'step')})" for one in self.measured]
        missing = [f"  not measured: {', '.join(self.missing)}"] if self.missing else []
        rate = [f"  MFU: matrix products' share of the time at {self.tflops:.0f} TFLOP/s"] if self.tflops else []
        samples = count(self.samples_per_epoch, "training sample")
        epoch = f"  epoch: the {samples} of this run; before: compilation and first steps"
        shared = f", shared by {self.num_ranks} processes" if self.num_ranks > 1 else ""
        steps = f"  {self.samples_per_step} samples per step{shared}"
        return "\n".join(
            [table(HEADER, [self._row(one) for one in self.measured]), *notes, *missing, *rate, epoch, steps]
        )

    def _row(self, one: Measured) -> tuple[str, ...]:
        return (
            one.variant,
            f"{1e3 / one.ms_per_sample:.1f}",
            f"{one.ms_per_sample:.2f}",
            f"{self.speedup(one):.1f}x",
            f"{one.tokens_per_second:,.0f}",
            _percent(one.mfu),
            _percent(one.wait_share),
            _gigabytes(one.peak_gb),
            duration(one.ms_per_sample * self.samples_per_epoch / 1e3),
            duration(one.warm_up_seconds),
            f"{one.losses[0]:.4f}",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "ways": [one.to_json() for one in self.measured],
            "samples_per_step": self.samples_per_step,
            "samples_per_epoch": self.samples_per_epoch,
            "tflops": self.tflops,
            "num_ranks": self.num_ranks,
            "missing": self.missing,
        }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _gigabytes(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"
