"""Cache constants that can be imported without torch: format version, allowed values, commands to suggest."""

from __future__ import annotations

from typing import Literal

FORMAT_VERSION = 2

Backend = Literal["pil", "torchvision"]
"""The library that the image processor resizes with."""
DtypeName = Literal["bfloat16", "float32", "fp8_e4m3"]
"""How features are stored. float16 is left out on purpose: the outliers of a tower overflow it."""
Grid = tuple[int, int, int]
"""The patch grid of an image (t, h, w): frames, rows and columns of patches."""
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""Exceptions that parsing a damaged file may raise."""
MAX_RECORDS_BYTES = 1 << 30
"""The most bytes of a receipt or a plan file; one about a million images has 150 MB."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors for the header of a file."""
BUILD_COMMAND = "lookonce cache build RUN.yaml"
REPAIR_COMMAND = "lookonce cache repair RUN.yaml"
VERIFY_COMMAND = "lookonce cache verify RUN.yaml"
