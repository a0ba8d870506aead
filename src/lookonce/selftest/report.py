"""The result of a self-test: the variants of computing packs, and what was compared in each.

A variant is three switches, as in the run file. Each switch that is off leaves out a part that could be wrong on a
machine where it was never tested. A difference may be `FACTOR` times the spread, which is measured in the same run
between exact computations (docs/selftest.md); no spread counts as smaller than `ROUNDING`, as a loss may agree by
chance.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lookonce.environment import device_name, library_version, library_versions
from lookonce.text import duration, first_line, table
from lookonce.train.loop.first_pack import FACTOR, ROUNDING

SETTINGS = {"flex": "train.flex_attention", "compiled": "train.compile", "captured": "train.cuda_graphs"}
"""The key of the run file for each switch."""
ROWS = "batch.mode=separate"
"""The setting that is left if no variant is exact: stock rows."""


@dataclass(frozen=True)
class Variant:
    flex: bool = True
    """Whether attention is computed by FlexAttention, and not with a dense mask."""
    compiled: bool = True
    captured: bool = True

    @property
    def name(self) -> str:
        """What is done, for tables: "compiled, replayed"."""
        names = ("" if self.flex else "dense masks", "compiled" if self.compiled else "not compiled")
        return ", ".join(name for name in (*names, "replayed" if self.captured else "launched") if name)

    @property
    def settings(self) -> list[str]:
        """The settings that differ from the defaults."""
        return [f"{key}=false" for switch, key in SETTINGS.items() if not getattr(self, switch)]

    def includes(self, other: Variant) -> bool:
        """Whether a fault of the other variant is one of this variant too: the same masks, and not more of the rest."""
        return self.flex == other.flex and self.compiled >= other.compiled and self.captured >= other.captured


ON_GPU = tuple(Variant(*switches) for switches in product((True, False), repeat=3))
"""All variants on a GPU, the fastest first."""
ON_CPU = (Variant(flex=False, compiled=False, captured=True), Variant(flex=False, compiled=False, captured=False))
"""The variants without a GPU. Replaying only runs a pass again on the buffers of its capture."""


@dataclass(frozen=True)
class Check:
    what: str
    difference: float
    """Infinite if the computation failed, or is not a number."""
    allowed: float
    variant: Variant | None = None
    """The variant that was compared; None for what all variants with FlexAttention use."""
    error: str = ""
    """The first line of the error if the computation failed."""
    is_part: bool = False
    """Whether the variant was compared as a part of all variants that include it."""

    @property
    def ok(self) -> bool:
        return self.difference <= self.allowed

    def concerns(self, variant: Variant) -> bool:
        """Whether a mismatch means that the variant is not exact."""
        if self.variant is None:
            return variant.flex
        return variant.includes(self.variant) if self.is_part else variant == self.variant

    def to_json(self) -> dict[str, Any]:
        finite = self.difference if math.isfinite(self.difference) else None
        result = {"what": self.what, "difference": finite, "allowed": self.allowed, "ok": self.ok}
        return result | ({"error": self.error} if self.error else {})


def within_spread(
    what: str, differences: Sequence[float], spread: Sequence[float], variant: Variant | None = None
) -> Check:
    """The check that the largest of `differences` is within the spread, whose largest value counts."""
    largest = max((value if math.isfinite(value) else math.inf for value in differences), default=math.inf)
    return Check(what, largest, FACTOR * max(*spread, ROUNDING), variant)


def attempted(what: str, compare: Callable[[], list[Check]], variant: Variant | None = None) -> list[Check]:
    """The checks that `compare` makes; a computation that fails is a mismatch, except for want of memory."""
    try:
        return compare()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a kernel raises
        return [Check(what, math.inf, 0, variant, f"{type(error).__name__}: {first_line(error)}")]


@dataclass(frozen=True)
class Report:
    combination: dict[str, str]
    """The hardware and the library versions."""
    checks: tuple[Check, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def compared(self) -> list[Variant]:
        """The variants that were compared, the fastest first."""
        variants = {check.variant for check in self.checks if not check.is_part}
        return [variant for variant in ON_GPU if variant in variants]

    @property
    def exact(self) -> list[Variant]:
        """The variants that were compared and whose checks are all within their spread, the fastest first."""
        return [
            variant for variant in self.compared if all(check.ok for check in self.checks if check.concerns(variant))
        ]

    @property
    def fastest(self) -> str:
        """The fastest exact settings as options of a command; empty for the defaults."""
        if self.ok:
            return ""
        settings = self.exact[0].settings if self.exact else [ROWS]
        return " ".join(f"--set {setting}" for setting in settings)

    def text(self) -> str:
        header = ("", "difference", "allowed", "")
        lines = [(check.what, *_figures(check), "ok" if check.ok else "MISMATCH") for check in self.checks]
        errors = [f"{check.what}: {check.error}" for check in self.checks if check.error]
        versions = ", ".join(f"{name} {version}" for name, version in self.combination.items())
        ran = f"{versions}; {duration(self.seconds)}"
        conclusion = "packs are exact here: all differences are within their spread"
        if not self.ok:
            conclusion = f"NOT EXACT HERE: {sum(not check.ok for check in self.checks)} of {len(self.checks)} checks"
            conclusion += f"; the fastest exact settings: {self.fastest}" if self.fastest else ""
        return "\n".join([table(header, lines), *errors, "", ran, conclusion])

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "combination": self.combination,
            "checks": [check.to_json() for check in self.checks],
            "exact": [variant.settings for variant in self.exact],
            "fastest": self.fastest,
            "seconds": self.seconds,
        }


def _figures(check: Check) -> tuple[str, str]:
    if not math.isfinite(check.difference):
        return "failed", f"{check.allowed:.1e}"
    return (f"{check.difference:.1e}", f"{check.allowed:.1e}") if check.allowed else (f"{check.difference:.0f}", "0")


MODULE = Path("/sys/module/nvidia/version")
"""The driver's version, where Linux shows its module; nvidia-smi takes a second."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def combination(precision: str) -> dict[str, str]:
    """The device, its driver, the library versions and the precision; what is missing is "none"."""
    libraries = library_versions() | {"triton": library_version("triton"), "cuda": torch.version.cuda}
    names = ("torch", "cuda", "triton", "transformers", "lookonce")
    versions = {"device": device_name(), "driver": _driver() if torch.cuda.is_available() else None}
    versions |= {name: libraries[name] for name in names} | {"precision": precision}
    return {name: value or "none" for name, value in versions.items()}


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        return MODULE.read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=60, check=True)
        return next(iter(done.stdout.split()), None)
    return None
