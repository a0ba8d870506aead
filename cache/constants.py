"""What is said of caches where torch is not wanted: the choices of a run file, and the commands to run next."""

from __future__ import annotations

from typing import Literal

FORMAT_VERSION = 2

Backend = Literal["pil", "torchvision"]
"""Of the image processor."""
DtypeName = Literal["bfloat16", "float32", "fp8_e4m3"]
"""Of what is stored. float16 is left out on purpose: a tower's outliers overflow it."""
BUILD_COMMAND = "lookonce cache build RUN.yaml"
REPAIR_COMMAND = "lookonce cache repair RUN.yaml"
VERIFY_COMMAND = "lookonce cache verify RUN.yaml"
