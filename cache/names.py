"""What is said of caches where torch is not wanted: the choices of a run file, and the command that makes one."""

from __future__ import annotations

from typing import Literal

Backend = Literal["pil", "torchvision"]
"""Of the image processor."""
DtypeName = Literal["bfloat16", "float32"]
"""Of the tower and of what is stored. float16 is left out on purpose: a tower's outliers overflow it."""
BUILD_COMMAND = "lookonce cache build RUN.yaml"
