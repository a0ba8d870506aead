"""The names a run file may use for what a cache is made with; apart, so that reading a run file needs no torch."""

from __future__ import annotations

from typing import Literal

Backend = Literal["pil", "torchvision"]
"""Of the image processor."""
DtypeName = Literal["bfloat16", "float32"]
"""Of the tower and of what is stored. float16 is left out on purpose: a tower's outliers overflow it."""
